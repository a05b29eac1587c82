from __future__ import annotations

import ctypes
import platform

import pytest

from inferencex.runtime.heap_room import MOST_ROOM, make_heap_room

IS_GLIBC = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not IS_GLIBC, reason="other C libraries keep no heap of this kind")
def test_pieces_that_follow_come_from_a_heap_that_has_grown_already() -> None:
    libc = ctypes.CDLL(None)
    libc.sbrk.restype, libc.malloc.restype = ctypes.c_void_p, ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    make_heap_room(MOST_ROOM)
    end = libc.sbrk(0)
    pieces = [libc.malloc(100) for _ in range(100_000)]
    assert libc.sbrk(0) == end
    for piece in pieces:
        libc.free(piece)


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 40])
def test_any_size_may_be_asked_for(nbytes: int) -> None:
    make_heap_room(nbytes)
