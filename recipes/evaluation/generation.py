"""How tasks of lm-eval say that an answer is to be generated, as the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferencex.formats.errors import OptionError
from inferencex.runtime import SamplingParams

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
_SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")
_IGNORED = ("num_beams", "use_cache", "pad_token_id")  # as long as they say what the engine does anyway


def sampling_params(wanted: Mapping[str, Any], max_gen_toks: int, seed: int) -> tuple[SamplingParams, list[str]]:
    """Return the parameters of `generation_kwargs`, and the strings that end an answer.

    An answer is greedy unless `do_sample` or a temperature above 0 asks for chance. Raises OptionError for parameters
    that the engine does not know, and RequestError for values out of range.
    """
    until = wanted.get("until") or []
    stops = [until] if isinstance(until, str) else [str(text) for text in until]
    lengths = [wanted[name] for name in LENGTHS if wanted.get(name) is not None]
    unknown = [
        name for name in wanted if name not in ("until", "do_sample", "temperature", *LENGTHS, *_SAMPLING, *_IGNORED)
    ]
    if unknown or wanted.get("num_beams", 1) != 1:
        raise OptionError(
            f"a task generates with {', '.join(unknown) or 'num_beams'}, which the engine does not know; it knows "
            f"until, do_sample, temperature, {', '.join((*LENGTHS, *_SAMPLING))}"
        )
    temperature = float(wanted.get("temperature") or 0.0)
    do_sample = wanted.get("do_sample")
    if do_sample is None:
        do_sample = temperature > 0.0
    fields: dict[str, Any] = {"temperature": 0.0}
    if do_sample:
        chance = {name: wanted[name] for name in _SAMPLING if wanted.get(name) is not None}
        fields = {"temperature": temperature, "seed": seed, **chance}
    elif wanted.get("repetition_penalty") is not None:
        fields["repetition_penalty"] = wanted["repetition_penalty"]
    length = int(lengths[0]) if lengths else max_gen_toks
    return SamplingParams(max_tokens=length, stop=[text for text in stops if text], **fields), stops


def without_stops(text: str, stops: Sequence[str]) -> str:
    """Return what comes before the first of the strings that end an answer."""
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text
