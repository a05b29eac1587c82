"""How a bundle does on text that calibration never saw, against the model it was made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inferencex.convert.capture import Captured
from inferencex.convert.capture.export import PARAMETER_PREFIX
from inferencex.convert.oracle import source_logits
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import FidelityError
from inferencex.runtime.backends import select_backend
from inferencex.runtime.backends.base import Executable, Float32Array
from inferencex.runtime.backends.divergence import Divergence, whole_sequence_logits, whole_sequence_options

SourceLogits = Callable[[NDArray[np.int64]], Float32Array]
"""Runs the source on one sequence: token ids int64 `[T]` -> logits float32 `[T, vocab]`."""

# A backend that keeps repacked weights takes about the bundle's size again; a larger bundle runs on the reference
# backend, which reads one weight at a time, so that judging a bundle takes no more memory than making it.
_REPACKED_BYTES = 2 << 30


@dataclass(frozen=True)
class HeldOutFidelity:
    """How the predictions of a bundle differ from its source's over `windows` windows of `length` tokens.

    mean_kl, p99_kl:  KL(source || bundle) in nats per token, over `windows * length` tokens
    same_top1:        share of positions at which both find the same token most likely
    source_perplexity, bundle_perplexity:  of the text, each window on its own
    backend:          what ran the bundle
    activation_dtype: how it read the inputs of quantized linears: "float32", or "auto" as the runtime does by default
    kv_cache_dtype:   how it kept keys and values
    """

    windows: int
    length: int
    mean_kl: float
    p99_kl: float
    same_top1: float
    source_perplexity: float
    bundle_perplexity: float
    backend: str
    activation_dtype: str
    kv_cache_dtype: str = "float32"

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def source_runner(captured: Captured, sources: Mapping[str, ParameterSource]) -> SourceLogits:
    """Return what runs the recorded program of a source, reading one weight at a time."""

    def run(token_ids: NDArray[np.int64]) -> Float32Array:
        logits = source_logits(captured.program, PARAMETER_PREFIX, sources, torch.from_numpy(token_ids))
        array: Float32Array = logits.numpy()
        return array

    return run


def held_out_fidelity(
    source: SourceLogits,
    bundle: Path,
    windows: NDArray[np.int64],
    *,
    backend: str | None = None,
    activation_dtype: str = "float32",
    kv_cache_dtype: str = "float32",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> HeldOutFidelity:
    """Compare a bundle with its source on `windows`, int64 `[W, length]`, one after the other.

    In memory are the logits of one window, twice, and the weights as the backend keeps them. `backend` None takes the
    fastest that can run the bundle without taking much more memory than the bundle. `progress` hears of each window.
    Raises FidelityError when the source's or the bundle's logits are not finite, BackendError when nothing can run it.
    """
    name = backend if backend is not None else _backend_for(bundle)
    chosen = select_backend(name, bundle)
    count, length = windows.shape
    executable: Executable = chosen.compile(bundle, whole_sequence_options(length, activation_dtype, kv_cache_dtype))
    divergence = Divergence()
    for done, window in enumerate(windows, 1):
        divergence.add(source(window), whole_sequence_logits(executable, window), window)
        progress(done, count)
    figures = divergence.summary()
    if math.isnan(figures.mean_kl):
        raise FidelityError(
            f"{bundle}: logits on the text held out are not finite (NaN or infinity), the bundle's or its source's; "
            "try another --dtype or --quantization"
        )
    return HeldOutFidelity(
        windows=count,
        length=length,
        mean_kl=figures.mean_kl,
        p99_kl=figures.p99_kl,
        same_top1=figures.same_top1,
        source_perplexity=figures.reference_perplexity,
        bundle_perplexity=figures.perplexity,
        backend=chosen.name,
        activation_dtype=activation_dtype,
        kv_cache_dtype=kv_cache_dtype,
    )


def _backend_for(bundle: Path) -> str:
    stored = sum(tensor.nbytes for tensor in Bundle.open(bundle).stored.values())
    return "auto" if stored <= _REPACKED_BYTES else "reference"
