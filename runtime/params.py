"""What a user may ask of one request's generation, and how a model's own defaults fill the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Self

from inferencex.formats.errors import BundleError, RequestError
from inferencex.formats.records import record

GREEDY_TEMPERATURE = 1e-5  # at or below it the most likely token is taken, without randomness

_REPETITION_PENALTIES = (1e-3, 1e3)  # beyond any use, and far from where penalized logits leave float32

_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_OFF: dict[str, float | int] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@record(frozen=True)
class SamplingParams:
    """How to continue a prompt. Raises RequestError for a value out of range.

    A field left at None takes the model's default (`with_defaults`), and where the model has none, the
    value in brackets.

    n:                   independent continuations of the prompt
    temperature:         divides the logits; 0 takes the most likely token [see `with_defaults`]
    top_k:               keep the k most likely tokens; 0 or -1 keeps all [0]
    top_p:               keep the most likely tokens that hold this much probability together [1.0]
    min_p:               keep tokens at least this likely, relative to the most likely one [0.0]
    repetition_penalty:  divides positive and multiplies negative logits of tokens in prompt or output [1.0]
    presence_penalty:    subtracted from the logits of tokens already in the output
    frequency_penalty:   the same, once for each time the token is in the output
    logit_bias:          added to the logits of these token ids
    seed:                makes the choices reproducible, whatever else runs; None: different every time
    stop:                strings that end the text; `include_stop_str_in_output` keeps them in it
    stop_token_ids:      token ids that end the output, beside the model's end-of-sequence tokens
    min_tokens:          before this many tokens neither end-of-sequence nor a stop ends the output
    max_tokens:          most tokens to generate [up to the context's end]
    ignore_eos:          treat end-of-sequence tokens as any other
    logprobs:            report the log-probability of each chosen token and of this many most likely ones
    prompt_logprobs:     the same for the tokens of the prompt
    prompt_logprobs_start: report those from this position on; what comes before may be in the prefix cache
    skip_special_tokens: leave special tokens out of the text

    Log-probabilities are the model's own, before penalties, temperature and filters.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1)
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, *_REPETITION_PENALTIES)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, None)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("logprobs", self.logprobs, 0)
        _integer("prompt_logprobs", self.prompt_logprobs, 0)
        _integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; expected true or false")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.n > 1 and self.temperature is not None and self.temperature <= GREEDY_TEMPERATURE:
            raise RequestError(
                f"n={self.n} with temperature={self.temperature} would give {self.n} equal answers; "
                "set n=1 or a temperature above 0"
            )

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the defaults a `generation_config.json` states, as transformers reads it.

        Without `do_sample: true` the model's way is greedy, and its sampling fields do not apply.
        `max_new_tokens` becomes `max_tokens`. Raises BundleError for a value out of range.
        """
        wanted = [name for name in _MODEL_DEFAULTS if config.get(name) is not None]
        values: dict[str, Any] = {name: config[name] for name in wanted}
        if not config.get("do_sample"):
            values = {name: value for name, value in values.items() if name == "repetition_penalty"}
            values["temperature"] = 0.0
        if config.get("max_new_tokens") is not None:
            values["max_tokens"] = config["max_new_tokens"]
        try:
            return cls(**values)
        except RequestError as error:
            raise BundleError(f"generation_config.json: {error}") from error

    def with_defaults(self, defaults: SamplingParams) -> SamplingParams:
        """Return these parameters with every field left at None filled.

        A greedy default gives way to temperature 1.0 when the request itself asks for something that only
        makes sense with randomness (`top_k`, `top_p`, `min_p`, `seed` or `n > 1`).
        """
        values: dict[str, Any] = {}
        for name in _MODEL_DEFAULTS:
            if getattr(self, name) is None:
                default = getattr(defaults, name)
                values[name] = _OFF[name] if default is None else default
        asks_for_randomness = self.n > 1 or any(
            value is not None for value in (self.top_k, self.top_p, self.min_p, self.seed)
        )
        if asks_for_randomness and values.get("temperature", 1.0) <= GREEDY_TEMPERATURE:
            values["temperature"] = 1.0
        if self.max_tokens is None and defaults.max_tokens is not None:
            values["max_tokens"] = max(defaults.max_tokens, self.min_tokens)
        return replace(self, **values)


def _integer(name: str, value: object, low: int | None) -> None:
    if value is None and name not in ("n", "min_tokens", "prompt_logprobs_start"):
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; expected an integer")
    if low is not None and value < low:
        raise RequestError(f"{name} is {value}; expected at least {low}")


def _number(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if value is None and not name.endswith(("presence_penalty", "frequency_penalty")):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {value!r}; expected a number")
    if not math.isfinite(value) or value < low or value > high or (above and value == low):
        least = "more than" if above else "at least"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} is {value}; expected {least} {low:g}{most}")


def _strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"stop is {stop!r}; expected a string or a list of strings")
    if "" in strings:
        raise RequestError("stop holds an empty string, which would end every text at once; remove it")
    return tuple(strings)


def _token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise RequestError(f"stop_token_ids is {ids!r}; expected a list of token ids")
    return tuple(ids)


def _biases(biases: object) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias is {biases!r}; expected a mapping from token id to number")
    for token_id, bias in biases.items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError(f"logit_bias has the key {token_id!r}; expected a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
            raise RequestError(f"logit_bias of token {token_id} is {bias!r}; expected a number from -100 to 100")
    return {int(token_id): float(bias) for token_id, bias in biases.items()}
