"""What a device can do at best, and how long something takes on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH = 512 << 20
"""Bytes written before each run, more than any cache: weights of a step are not in the cache when it begins."""


@dataclass(frozen=True)
class Limits:
    """Bytes a second of a copy, read and written, and operations a second of torch's matrix product."""

    bandwidth: float
    matmul: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> Limits:
        """Measure both; small, and of no meaning, on the CPU."""
        on_gpu = device.type == "cuda"
        source = torch.empty((1 << 30) if on_gpu else 1 << 20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        size = 8192 if on_gpu else 128
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        copy = seconds(lambda: target.copy_(source), device)
        product = seconds(lambda: torch.mm(a, b), device)
        return cls(2 * source.numel() / copy, 2 * size**3 / product)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time of a function on the device: with CUDA events, its weights out of the cache."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device)
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)
