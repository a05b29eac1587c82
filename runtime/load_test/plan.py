"""From options to what will be done: everything that can be wrong about them is found before a request is sent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferencex.formats.errors import OptionError
from inferencex.runtime.load_test.api import Endpoint
from inferencex.runtime.load_test.arrivals import parse_concurrencies, parse_rates
from inferencex.runtime.load_test.connection import Origin
from inferencex.runtime.load_test.lengths import Lengths, parse_lengths
from inferencex.runtime.load_test.objectives import Objective, parse_objectives
from inferencex.runtime.load_test.prompt_files import FilePrompt, is_text, read_prompts
from inferencex.runtime.load_test.statistics import Load

_REQUESTS = 100  # of each measurement, when nothing says how many


@dataclass(frozen=True)
class Plan:
    """What to measure, and where results go.

    loads:         the measurements, in order
    requests:      of each of them; None: as many as `duration` allows
    file_prompts:  of a file of records; None: they are made, or cut out of the text `text_file`
    as_text:       whether made prompts are sent as text, rather than as token ids
    """

    origin: Origin
    api_key: str | None
    model: str | None
    endpoint: Endpoint
    stream: bool
    temperature: float
    ignore_eos: bool
    extra: Mapping[str, Any]
    timeout: float
    loads: tuple[Load, ...]
    fixed_rate: bool
    requests: int | None
    duration: float | None
    warm_up: int
    seed: int
    prompt_lengths: Lengths
    output_lengths: Lengths
    shared_prefix: int
    file_prompts: tuple[FilePrompt, ...] | None
    text_file: Path | None
    as_text: bool
    tokenizer: Path | None
    objectives: tuple[Objective, ...]
    output: Path | None
    plot: Path | None


def make_plan(
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    endpoint: Endpoint,
    stream: bool,
    extra: str | None,
    timeout: float,
    rate: str,
    fixed_rate: bool,
    concurrency: str | None,
    requests: int | None,
    duration: float | None,
    warm_up: int,
    seed: int | None,
    prompt_length: str,
    output_length: str,
    shared_prefix: int,
    prompts: Path | None,
    text: bool,
    tokenizer: Path | None,
    ignore_eos: bool,
    temperature: float,
    slo: str | None,
    output: Path | None,
    plot: Path | None,
) -> Plan:
    """Check the command's options and return what they mean; OptionError for one that cannot be."""
    if requests is not None and duration is not None:
        raise OptionError("--requests and --duration both say when to stop; give one of them")
    for name, value, least in (
        ("--requests", requests, 1),
        ("--duration", duration, None),
        ("--timeout", timeout, None),
        ("--warm-up", warm_up, 0),
        ("--shared-prefix", shared_prefix, 0),
        ("--temperature", temperature, 0),
    ):
        too_small = value is not None and (not value > 0 if least is None else value < least)
        if value is not None and (too_small or not math.isfinite(value)):
            raise OptionError(f"{name} {value}: expected {'more than 0' if least is None else f'{least} or more'}")
    if prompts is not None and shared_prefix:
        raise OptionError("--shared-prefix is for random prompts, and --prompts brings others; leave one of them out")
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise OptionError(f"{option} {path}: its folder does not exist; make it first")
    records = None if prompts is None or is_text(prompts) else tuple(read_prompts(prompts, endpoint))
    if prompts is not None and records is None and duration is not None:
        raise OptionError("--duration does not say how many prompts to cut from the text; give --requests")
    loads = _loads(rate, concurrency, fixed_rate)
    if requests is None and duration is None:
        # Those of a file are asked once, through all loads and their warm-ups.
        requests = _REQUESTS if records is None else max(1, len(records) // len(loads) - warm_up)
    return Plan(
        origin=Origin.parse(url),
        api_key=api_key,
        model=model,
        endpoint=endpoint,
        stream=stream,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra=_fields(extra),
        timeout=timeout,
        loads=loads,
        fixed_rate=fixed_rate,
        requests=requests,
        duration=duration,
        warm_up=warm_up,
        seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
        prompt_lengths=parse_lengths("--prompt-length", prompt_length),
        output_lengths=parse_lengths("--output-length", output_length),
        shared_prefix=shared_prefix,
        file_prompts=records,
        text_file=prompts if records is None else None,
        as_text=text or endpoint == "chat",
        tokenizer=tokenizer,
        objectives=() if slo is None else parse_objectives(slo, stream),
        output=output,
        plot=plot,
    )


def _loads(rate: str, concurrency: str | None, fixed_rate: bool) -> tuple[Load, ...]:
    rates = parse_rates(rate)
    limits: list[int] | list[None] = [None] if concurrency is None else parse_concurrencies(concurrency)
    if len(rates) > 1 and len(limits) > 1:
        raise OptionError(f"--rate {rate} and --concurrency {concurrency} are two sweeps; give one of them one value")
    if math.inf in rates and len(rates) > 1:
        raise OptionError(f"--rate {rate}: inf is no rate to sweep to; sweep --concurrency instead")
    if rates == [math.inf]:
        if fixed_rate:
            raise OptionError("--fixed-rate needs a --rate, such as --rate 4")
        return tuple(Load(None, limit or 1) for limit in limits)
    return tuple(Load(each, limit) for each in rates for limit in limits)


def _fields(extra: str | None) -> Mapping[str, Any]:
    if extra is None:
        return {}
    try:
        fields = json.loads(extra)
    except ValueError as error:
        raise OptionError(f"--extra: is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise OptionError(f"--extra: is a JSON {type(fields).__name__}, expected an object")
    return fields
