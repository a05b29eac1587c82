"""The chunks of a streamed `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from inferencex.runtime.outputs import CompletionDelta, RequestOutput, TokenLogprobs
from inferencex.runtime.server.generation import Generation
from inferencex.runtime.server.openai.answer_parser import AnswerEvent, AnswerParser, Reasoning
from inferencex.runtime.server.openai.conversation import Conversation
from inferencex.runtime.server.openai.logprobs import chat_logprobs
from inferencex.runtime.server.openai.protocol.chat import ChatRequest
from inferencex.runtime.server.openai.protocol.usage import Usage
from inferencex.runtime.server.openai.sse import DONE, compact, quoted
from inferencex.runtime.server.tools import CallArguments, CallStart, Text


class ChatStream:
    """Writes the chunks of one request. What all of them share is written once, for a chunk is made for each token."""

    def __init__(self, body: ChatRequest, chat: Conversation, generation: Generation, identifier: str) -> None:
        options = body.stream_options
        self._generation = generation
        self._with_usage = options is not None and bool(options.include_usage)
        self._head = (
            f'data: {{"id":{quoted(identifier)},"object":"chat.completion.chunk","created":{generation.created},'
            f'"model":{quoted(generation.model.name)},"system_fingerprint":null,"choices":['
        )
        self._tail = '],"usage":null}\n\n' if self._with_usage else "]}\n\n"
        self._choices = [
            _Choice(index, body, generation, chat.parser(generation), self._head, self._tail)
            for index in range(generation.params.n)
        ]

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks, the usage if it is wanted, and the end."""
        output: RequestOutput | None = None
        async for delta in self._generation:
            chunks = self._choices[delta.index].chunks(delta)
            if chunks:
                yield chunks.encode("ascii")
            output = delta.output
        if output is None:  # closed early: nobody reads on
            return
        if self._with_usage:
            yield f'{self._head}],"usage":{Usage.of([output]).model_dump_json()}}}\n\n'.encode("ascii")
        yield DONE


class _Choice:
    """One answer under way."""

    def __init__(
        self,
        index: int,
        body: ChatRequest,
        generation: Generation,
        parser: AnswerParser | None,
        head: str,
        tail: str,
    ) -> None:
        self._generation = generation
        self._parser = parser
        self._begin = f'{head}{{"index":{index},"delta":'
        self._end = f"}}{tail}"
        self._before_text = self._begin + '{"content":'
        self._after_text = '},"logprobs":null,"finish_reason":null' + self._end
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._return_ids = bool(body.return_token_ids)
        self._plain = self._num_top is None and not self._return_ids
        self._begun = False
        self._ids: list[int] = []
        self._entries: list[TokenLogprobs] = []

    def chunks(self, delta: CompletionDelta) -> str:
        """Return what to send for a delta, "" for one without news."""
        if self._plain and self._parser is None and self._begun and delta.finish_reason is None:
            # What nearly all tokens of nearly all requests come to.
            return f"{self._before_text}{quoted(delta.text)}{self._after_text}" if delta.text else ""
        if delta.finish_reason in ("abort", "error"):  # what is told of that comes with the last of the answers
            return ""
        if not self._plain:
            self._ids += delta.token_ids
            self._entries += delta.logprobs or ()
        written = [] if self._begun else [self._first()]
        self._begun = True
        for event in self._events(delta):
            if self._plain and isinstance(event, Text):
                written.append(f"{self._before_text}{quoted(event.text)}{self._after_text}")
            elif (change := _change(event)) is not None:
                written.append(self._chunk(change, None))
        if delta.finish_reason is not None:
            written.append(self._last(delta))
        return "".join(written)

    def _events(self, delta: CompletionDelta) -> list[AnswerEvent]:
        if self._parser is None:
            return [Text(delta.text)] if delta.text else []
        events = self._parser.push(delta.text)
        return events + self._parser.finish() if delta.finish_reason is not None else events

    def _first(self) -> str:
        rest = ',"logprobs":null,"finish_reason":null'
        if self._return_ids:
            rest += f',"prompt_token_ids":{compact(list(self._generation.prompt_token_ids))}'
        return f'{self._begin}{{"role":"assistant","content":"","refusal":null}}{rest}{self._end}'

    def _last(self, delta: CompletionDelta) -> str:
        reason = "length" if delta.finish_reason == "length" else "stop"
        if reason == "stop" and self._parser is not None and self._parser.has_calls:
            reason = "tool_calls"
        return self._chunk({}, f'"{reason}","stop_reason":{compact(delta.stop_reason)}')

    def _chunk(self, change: dict[str, Any], reason: str | None) -> str:
        rest = f',"logprobs":{self._logprobs()},"finish_reason":{reason or "null"}'
        if self._return_ids:
            rest += f',"token_ids":{compact(self._ids)}'
        self._ids, self._entries = [], []
        return f"{self._begin}{compact(change)}{rest}{self._end}"

    def _logprobs(self) -> str:
        """Return the log-probabilities of the tokens since the last chunk."""
        tokenizer = self._generation.model.tokenizer
        if self._num_top is None or tokenizer is None or not self._entries:
            return "null"
        content = chat_logprobs(tokenizer, self._entries, self._ids, self._num_top)
        return compact({"content": [token.model_dump() for token in content], "refusal": None})


def _change(event: AnswerEvent) -> dict[str, Any] | None:
    """Return the `delta` of a chunk; None for what cannot be told: a call that was begun cannot be taken back."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
