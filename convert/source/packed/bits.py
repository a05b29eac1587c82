"""Integers packed into 32-bit words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD = 32


def unpack_words(words: NDArray[Any], bits: int, count: int, axis: int) -> NDArray[np.uint8]:
    """Unpack the first `count` integers of every stream of words along `axis`; they come along the last axis.

    A stream is dense: integer `i` has the bits `i * bits` to `(i + 1) * bits`, counted from the lowest of the first
    word, and may lie in two words. `words` is int32 or uint32 `[..., words]`, with `axis` anywhere.
    """
    streams = np.ascontiguousarray(np.moveaxis(words.view(np.uint32), axis, -1))
    if 8 % bits == 0:
        return _unpack_bytes(streams.astype("<u4", copy=False).view(np.uint8), bits)[..., :count]
    # The shortest run of words that ends where an integer ends: one word for 2, 4 and 8 bits, three for 3.
    period = math.lcm(bits, WORD) // WORD
    padding = -streams.shape[-1] % period
    if padding:
        streams = np.pad(streams, [(0, 0)] * (streams.ndim - 1) + [(0, padding)])
    runs = streams.reshape(*streams.shape[:-1], -1, period)
    integers = np.empty((*runs.shape[:-1], period * WORD // bits), dtype=np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for index in range(integers.shape[-1]):
        word, shift = divmod(index * bits, WORD)
        value = runs[..., word] >> np.uint32(shift)
        if shift + bits > WORD:
            value = value | (runs[..., word + 1] << np.uint32(WORD - shift))
        integers[..., index] = value & mask
    return integers.reshape(*runs.shape[:-2], -1)[..., :count]


def _unpack_bytes(stream: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Unpack integers of which a byte holds a whole number."""
    if bits == 8:
        return stream
    integers = np.empty((*stream.shape, 8 // bits), dtype=np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for place in range(8 // bits):
        np.bitwise_and(stream >> np.uint8(place * bits), mask, out=integers[..., place])
    return integers.reshape(*stream.shape[:-1], -1)


def ones_per_field(bits: int) -> NDArray[np.uint32]:
    """Return the words of a stream in which every integer is 1, one period of them."""
    period = math.lcm(bits, WORD) // WORD
    words = [0] * period
    for start in range(0, period * WORD, bits):
        words[start // WORD] |= 1 << (start % WORD)
    return np.array(words, dtype=np.uint32)


def words_for(count: int, bits: int) -> int:
    """Return the words that `count` integers take."""
    return -(-count * bits // WORD)
