"""The chunks of a streamed `/v1/completions`."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from inferencex.runtime.outputs import CompletionDelta, RequestOutput, TokenLogprobs
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.logprobs import completion_logprobs
from inferencex.runtime.server.openai.merged import merged
from inferencex.runtime.server.openai.protocol.completions import CompletionRequest
from inferencex.runtime.server.openai.protocol.usage import Usage
from inferencex.runtime.server.openai.sse import DONE, compact, quoted
from inferencex.runtime.server.openai.token_texts import TextOffsets, prompt_text
from inferencex.runtime.text.tokenizer import Tokenizer


class CompletionStream:
    """Writes the chunks of one request. What all of them share is written once, for a chunk is made for each token."""

    def __init__(self, body: CompletionRequest, generations: Sequence[Generation], identifier: str) -> None:
        self._body = body
        self._generations = generations
        first = generations[0]
        self._head = (
            f'data: {{"id":{quoted(identifier)},"object":"text_completion","created":{first.created},'
            f'"model":{quoted(first.model.name)},"system_fingerprint":null,"choices":['
        )
        options = body.stream_options
        self._with_usage = options is not None and bool(options.include_usage)
        self._tail = '],"usage":null}\n\n' if self._with_usage else "]}\n\n"
        n = 1 if body.n is None else body.n
        self._n = n
        self._choices = [_Choice(self, generation, n) for generation in generations for _ in range(n)]

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, the usage if it is wanted, and the end."""
        outputs: list[RequestOutput] = []
        async with aclosing(merged(self._generations)) as deltas:
            async for place, delta in deltas:
                index = place * self._n + delta.index
                chunk = self._choices[index].chunk(index, delta)
                if chunk:
                    yield chunk.encode("ascii")
                if delta.output is not None:
                    outputs.append(delta.output)
        if len(outputs) < len(self._generations):  # closed early: nobody reads on
            return
        if self._with_usage:
            unwanted = sum(len(output.outputs) for output in outputs) if self._body.max_tokens == 0 else 0
            usage = Usage.of(outputs, unwanted).model_dump_json()
            yield f'{self._head}],"usage":{usage}}}\n\n'.encode("ascii")
        yield DONE

    def write(self, index: int, text: str, rest: str) -> str:
        """Return a chunk; `rest` is what follows the text in its choice."""
        return f'{self._head}{{"index":{index},"text":{quoted(text)},{rest}}}{self._tail}'


class _Choice:
    """One answer under way."""

    def __init__(self, stream: CompletionStream, generation: Generation, n: int) -> None:
        body = stream._body
        self._stream = stream
        self._silent = body.max_tokens == 0
        self._plain = body.logprobs is None and not body.return_token_ids
        self._begun = False
        self._prompt_ids = generation.prompt_token_ids
        self._return_ids = bool(body.return_token_ids)
        self._tokenizer = generation.model.tokenizer
        self._echo = _echo(self._tokenizer, generation) if body.echo else ""
        self._start = len(self._echo)  # of the answer, in the text of the choice
        self._end_of_text = 0
        self._ids: list[int] = []
        self._entries: list[TokenLogprobs] = []
        self._offsets: TextOffsets | None = None
        self._pending: list[int] = []
        if body.logprobs is not None and self._tokenizer is not None:
            self._offsets = TextOffsets(
                self._tokenizer, generation.params.skip_special_tokens, generation.prompt_token_ids
            )

    def chunk(self, index: int, delta: CompletionDelta) -> str:
        """Return what to send for a delta, "" for one without news."""
        if delta.finish_reason in ("abort", "error"):  # what is told of that comes with the last of the answers
            return ""
        text = "" if self._silent else delta.text
        self._end_of_text += len(text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        reason = delta.finish_reason
        if self._plain:
            if reason is None:
                return self._stream.write(index, text, '"logprobs":null,"finish_reason":null') if text else ""
            return self._stream.write(index, text, f'"logprobs":null,{self._end(delta)}')
        if not self._silent:
            self._take(delta)
        if not text and reason is None and not self._return_ids:
            return ""
        return self._stream.write(index, text, self._details(reason is not None) + self._end(delta))

    def _take(self, delta: CompletionDelta) -> None:
        self._ids += delta.token_ids
        if self._offsets is not None and delta.logprobs is not None:
            self._pending += [self._offsets.push(token_id) for token_id in delta.token_ids]
            self._entries += delta.logprobs

    def _details(self, final: bool) -> str:
        parts = []
        if self._offsets is None or self._tokenizer is None:
            parts.append('"logprobs":null,')
        else:
            # A stop text is cut off only when all of it is there: its tokens are at the end of what is left.
            limit = self._end_of_text if final else sys.maxsize
            offsets = [self._start + min(offset, limit) for offset in self._pending]
            found = completion_logprobs(self._tokenizer, self._entries, offsets, self._ids)
            parts.append(f'"logprobs":{compact(found.model_dump())},')
        if self._return_ids:
            parts.append(f'"token_ids":{compact(self._ids)},')
            if not self._begun:
                parts.append(f'"prompt_token_ids":{compact(list(self._prompt_ids))},')
        self._begun = True
        self._ids, self._entries, self._pending = [], [], []
        return "".join(parts)

    def _end(self, delta: CompletionDelta) -> str:
        if delta.finish_reason is None:
            return '"finish_reason":null'
        reason = "stop" if delta.finish_reason == "stop" and not self._silent else "length"
        return f'"finish_reason":"{reason}","stop_reason":{compact(delta.stop_reason)}'


def _echo(tokenizer: Tokenizer | None, generation: Generation) -> str:
    if generation.prompt is not None or tokenizer is None:
        return generation.prompt or ""
    return prompt_text(tokenizer, generation.prompt_token_ids, None)[0]
