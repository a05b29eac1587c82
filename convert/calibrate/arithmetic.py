"""In which precision calibration multiplies matrices, and by how many threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@functools.cache
def product_dtype() -> torch.dtype:
    """Return the dtype of matrix products: bfloat16 where the processor multiplies it, else float32.

    Sums, norms, activations and statistics are float32 in both cases, so nothing overflows.
    """
    supported = (
        getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        or getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    )
    return torch.bfloat16 if supported else torch.float32


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x [M, K] @ weight [N, K].T` as float32; operands are rounded to the dtype of `weight`."""
    return torch.nn.functional.linear(x.to(weight.dtype), weight).to(torch.float32)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Let every operator of torch run on its caller's thread.

    Work is divided among threads by samples and channels instead, in pieces that do not depend on their number, and
    that makes a result independent of it: the libraries below torch divide sums by threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
_LARGEST = (1 << 31) - 1


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the C library keep what is freed instead of giving it back to the system.

    Training makes and frees large tensors at every operation; with glibc's defaults each is mapped and cleared anew,
    which takes longer than computing it. Other C libraries are left as they are.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    for option, value in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, 64 << 20)):
        library.mallopt(option, value)
    try:
        yield
    finally:
        for option, value in ((_MMAP_THRESHOLD, 128 << 10), (_TRIM_THRESHOLD, 128 << 10), (_TOP_PAD, 128 << 10)):
            library.mallopt(option, value)
        library.malloc_trim(0)
