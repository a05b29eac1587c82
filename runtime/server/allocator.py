"""What a process that lives for months asks of glibc's allocator. Others decide for themselves, and are left alone."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_ARENA_MAX = -8  # malloc.h
_ARENAS = 2


def limit_arenas() -> None:
    """Let all threads share two heaps, before any is started (mallopt(3)).

    By default threads get heaps of their own, and each load of a model runs on a new thread: what is freed in one heap
    is of no use to the next, and the process grows until all have been at their peak.
    """
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def give_memory_back() -> None:
    """Free what refers to itself, and return free pages to the system (malloc_trim(3)), those between others too."""
    gc.collect()
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(function: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of the C library; None where it has none of this name."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform == "linux" else None
