"""Rules of thumb for what conversions and evaluations take, until an earlier run of the same step says it better.

They come from conversions of SmolLM2-135M-Instruct (docs/accuracy.md) on two processors with AVX-512: 111 seconds and
2.3 GiB for calibrated INT4 of 0.25 GiB of bfloat16 weights, 1260 processor-seconds more for `--effort best`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferencex.recipes.pipeline.base import Estimate

GIB = 1 << 30
_START_SECONDS, _START_MEMORY = 10.0, GIB  # torch and transformers


@dataclass(frozen=True)
class _Cost:
    """Processor-seconds for each GiB of weights, and bytes of memory for each byte of them."""

    seconds: float
    memory: float


_ROUNDING = _Cost(40, 1.0)
_CALIBRATING = _Cost(850, 4.5)
_REFINING = _Cost(6000, 9.0)
_SEARCHING = 2.0  # times as long: sensitivities come first, and the bundle is made again until it fits
_EVALUATING = _Cost(900, 1.5)


def conversion_estimate(nbytes: int | None, options: Mapping[str, Any], processors: int) -> Estimate:
    """Return what a conversion of `nbytes` of 16-bit weights takes; disk is the bundle alone."""
    if nbytes is None:
        return Estimate(None, None, None)
    quantization = str(options.get("quantization", "none"))
    budget = any(options.get(name) is not None for name in ("target-bits", "target-size", "max-kl"))
    calibrated = budget or bool(re.search(r"^int4$|gptq|awq|smoothquant", quantization)) or "calibration" in options
    cost = _REFINING if options.get("effort") == "best" else _CALIBRATING if calibrated else _ROUNDING
    seconds = _START_SECONDS + cost.seconds * nbytes / GIB / processors * (_SEARCHING if budget else 1)
    memory = _START_MEMORY + int(cost.memory * nbytes)
    return Estimate(round(seconds, 1), memory, int(nbytes * _share(quantization, options)))


def evaluation_estimate(nbytes: int | None, limit: int | None, processors: int) -> Estimate:
    """Return what an evaluation of a bundle of `nbytes` takes, where `limit` says how many examples a task has."""
    if nbytes is None:
        return Estimate(None, None, None)
    share = 1.0 if limit is None else min(1.0, limit / 1000)
    seconds = _START_SECONDS + _EVALUATING.seconds * share * nbytes / GIB / processors
    return Estimate(round(seconds, 1), _START_MEMORY + int(_EVALUATING.memory * nbytes), 1 << 20)


def copy_estimate(nbytes: int | None) -> Estimate:
    """Return what writing a bundle again takes, at 200 MiB a second."""
    if nbytes is None:
        return Estimate(None, None, None)
    return Estimate(round(1 + nbytes / (200 << 20), 1), (1 << 28) + nbytes, nbytes)


def _share(quantization: str, options: Mapping[str, Any]) -> float:
    """Return a bundle's size as a share of 16-bit weights; embeddings that stay plain are not known here."""
    if options.get("target-bits") is not None:
        return float(options["target-bits"]) / 16
    bits = re.search(r"int(\d)|fp(4|8)", quantization)
    return 1.0 if bits is None else (float(bits.group(1) or bits.group(2)) + 0.3) / 16
