"""Our engine as a model of lm-eval: what its `hf` model scores and generates, batched and with cached prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from inferencex.formats.errors import OptionError, RequestError
from inferencex.recipes.evaluation.generation import sampling_params, without_stops
from inferencex.recipes.evaluation.prefix_order import prefix_order
from inferencex.recipes.evaluation.progress import Unwatched, Watcher
from inferencex.runtime import LLM, RequestOutput, SamplingParams

DEFAULT_MAX_GEN_TOKS = 256

Pair = tuple[tuple[str, str] | None, list[int], list[int]]
"""Context and continuation as texts (None: not to be cached), and the token ids of both."""


class EngineLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no type information
    """Scores and continues texts with a loaded bundle.

    Everything that is asked for in one call goes to the engine together. A context is at most two tokens shorter than
    what the model can hold: the engine reads the scored tokens whole, and generates one after them.

    Raises RequestError when the bundle has no tokenizer, or the tokenizer no token that a text can begin with.
    """

    backend = "causal"

    def __init__(self, llm: LLM, *, seed: int = 0, watcher: Watcher | None = None) -> None:
        super().__init__()
        self._llm = llm
        self._text = llm.require_tokenizer()
        self._seed = seed
        self._watcher = Unwatched() if watcher is None else watcher
        bos, eos = (
            None if token is None else self._text.token_to_id(token)
            for token in (self._text.bos_token, self._text.eos_token)
        )
        if eos is None and self._text.eos_token_ids:
            eos = self._text.eos_token_ids[0]
        if bos is None and eos is None:
            raise RequestError(
                "the tokenizer names neither bos_token nor eos_token, so that there is nothing to score a text's first "
                "token after; name one in tokenizer_config.json"
            )
        self._eot = bos if eos is None else eos
        self._prefix = eos if bos is None else bos
        self._prefix_text = self._text.decode([self.prefix_token_id], skip_special_tokens=False)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        assert self._eot is not None
        return self._eot

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context is scored after: beginning of text, or else end of text."""
        assert self._prefix is not None
        return self._prefix

    @property
    def max_length(self) -> int:
        """Most tokens that a prediction may be based on."""
        return self._llm.engine.limits.max_model_len - 2

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer, where a task does not say."""
        return DEFAULT_MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval tells cached requests of different models apart by."""
        return str(self._llm.engine.limits.vocab_size)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids; what the model expects around a text is added unless the text begins with it already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._prefix_text)
        return self._text.encode(string, add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the text of the template that `apply_chat_template` uses."""
        return self._llm.chat_template.source() if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, with the beginning of an answer or inside the last message.

        A template that knows no system message is given the conversation without it.
        """
        template = self._llm.chat_template
        try:
            text = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except RequestError:
            plain = [message for message in chat_history if message["role"] != "system"]
            if len(plain) == len(chat_history):
                raise
            chat_history = plain
            text = template.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        kept = last if last in text else last.strip()
        if kept not in text:
            raise RequestError("the chat template changes the last message, so that the answer cannot go on inside it")
        return text[: text.rindex(kept) + len(kept)]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would give it."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in windows of what the model can hold."""
        windows: list[Pair] = []
        owners: list[int] = []
        for place, (text,) in enumerate(request.args for request in requests):
            pieces = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, pieces):
                windows.append((None, context, continuation))
                owners.append(place)
        totals = [0.0] * len(requests)
        for place, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[place] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        prompts, starts = [], []
        for _texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RequestError(
                    f"a text to score has {len(continuation)} tokens; from 1 to {self.max_length} are possible"
                )
            prompt = (context + continuation)[-(self.max_length + 1) :]
            prompts.append(prompt)
            starts.append(len(prompt) - len(continuation))
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(prompts)
        limits = self._llm.engine.limits
        at_once = min(4 * self._llm.engine.options.max_num_batched_tokens, limits.num_slots // 2)
        order = prefix_order(prompts, starts, at_once)

        def finished(place: int, output: RequestOutput) -> None:
            at = order[place]
            scores[at] = _score(output, starts[at])
            texts = requests[at][0]
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, scores[at])

        self._run(
            "scoring",
            [prompts[at] for at in order],
            [
                SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=starts[at])
                for at in order
            ],
            finished,
        )
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to what its parameters say it ends with."""
        prompts, params, ends = [], [], []
        for place, (context, wanted) in enumerate(request.args for request in requests):
            asked, stops = sampling_params(wanted, self.max_gen_toks, self._seed + place)
            room = self.max_length - (asked.max_tokens or 0)
            if room < 1:
                raise OptionError(
                    f"a task asks for answers of {asked.max_tokens} tokens, which leaves no room for a question in a "
                    f"context of {self.max_length}; set max_gen_toks in the task's generation_kwargs"
                )
            bos = self._text.bos_token
            add_special = bos is None or not context.startswith(bos)
            prompts.append(self._text.encode(context, add_special)[-room:])
            params.append(asked)
            ends.append(stops)
        texts = [""] * len(prompts)

        def finished(place: int, output: RequestOutput) -> None:
            # Not the output's text: that goes on with the prompt, while tasks expect the answer decoded on its own.
            answer = self._text.decode(output.outputs[0].token_ids)
            texts[place] = without_stops(answer, ends[place])
            self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])

        self._run("generating", prompts, params, finished)
        return texts

    def _run(
        self, what: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], finished: Any
    ) -> None:
        done = 0

        def count(place: int, output: RequestOutput) -> None:
            nonlocal done
            done += 1
            finished(place, output)
            self._watcher.advance(what, done, len(prompts))

        if prompts:
            self._llm.generate(prompts, params, on_finished=count)


def _score(output: RequestOutput, start: int) -> tuple[float, bool]:
    """Return the summed log-probability of a prompt's tokens from `start` on, and whether each was the most likely."""
    assert output.prompt_logprobs is not None
    entries = _entries(output.prompt_logprobs[start:], output.prompt_token_ids[start:])
    return sum(logprob for logprob, _ in entries), all(rank == 1 for _, rank in entries)


def _entries(positions: Iterable[Any], token_ids: Iterable[int]) -> list[tuple[float, int]]:
    return [(found[token].logprob, found[token].rank) for found, token in zip(positions, token_ids, strict=True)]
