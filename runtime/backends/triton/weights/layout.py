"""The order in which kernels read small numbers, and how a bundle's order is turned into it by torch on the device.

A bundle stores a weight `[N, K]` row by row, two numbers of four bits to a byte. Kernels read **panels** of `panel`
features of all rows (128, less where groups are short), one after the other, each a matrix of 16-bit **words**:

    words      [K / panel, N, slice]       slice = panel / slices,  slices = 16 / bits: four of 4 bits, two of 8

    panel 0    row 0    word 0   word 1   ...  word 31      16 bytes are eight words of a row: one read of a thread
               row 1    word 0   word 1   ...  word 31      a tile of rows is one piece of memory, without gaps
               ...
    panel 1    row 0    ...

    a word of four 4-bit numbers of a panel of 128, word w:

        bits   15....12   11.....8   7......4   3......0
        feature  96 + w     64 + w     32 + w          w
                slice 3    slice 2    slice 1    slice 0

So a warp's read is 512 bytes in a row of memory, whatever the kernel's tile, and masking or shifting a tile of words
gives four tiles of the weight, features in order, each of which is multiplied with 32 neighbouring columns of the
activations (kernels/dequantize.py). K is padded to whole panels; kernels read activations there as zeros.

Integers are stored with an offset so that none is negative: signed ones plus 8 (4 bits) or 128 (8 bits). Integers of
three bits take four, of five and six bits eight. Scales and zero points are `[groups, N]`: a kernel needs those of a
tile of rows for one group at a time. Stacks of experts have one more, leading dimension everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MOST_AT_ONCE = 1 << 26
"""Numbers that are repacked at a time: what bounds the memory that repacking takes beside its result."""


def panel_of(bits: int, group_size: int, features: int) -> int:
    """Return the features of a panel: the most up to 128 for which no slice of it lies in two groups, else 128.

    `bits` are the stored ones, 4 or 8. Slices have at least 16 features, which a matrix instruction takes.
    """
    slices = 16 // bits
    panel = 128
    while panel // slices >= 16:
        if group_size >= features or group_size % (panel // slices) == 0:
            return panel
        panel //= 2
    return 128


def pack_words(stored: Tensor, shape: tuple[int, ...], bits: int, signed: bool | None, panel: int) -> Tensor:
    """Return numbers that lie in a bundle's order as words, int16 `[..., panels, N, slice]`.

    stored: uint8, a flat stream of `bits` bits for each number, or for 8 bits one byte each
    shape:  `[..., N, K]`
    signed: of integers, whether they are; None for the codes of floats
    """
    *stack, rows, features = shape
    count = math.prod(stack)
    width = 4 if bits <= 4 else 8
    slices = 16 // width
    panels = -(-features // panel)
    words = torch.empty((count, panels, rows, panel // slices), dtype=torch.int16, device=stored.device)
    flat = stored.reshape(-1)
    for layer, first, last in _pieces(count, rows, features):
        start, end = (layer * rows + first) * features, (layer * rows + last) * features
        numbers = with_offset(_numbers(flat, start, end, bits), bits, signed).reshape(last - first, features)
        numbers = torch.nn.functional.pad(numbers, (0, panels * panel - features))
        parts = numbers.view(last - first, panels, slices, panel // slices).unbind(2)
        if width == 4:
            parts = (parts[0] | parts[1] << 4, parts[2] | parts[3] << 4)
        piece = torch.stack(parts, dim=-1).view(torch.int16).squeeze(-1)  # the first byte is the low one
        words[layer, :, first:last].copy_(piece.transpose(0, 1))
    return words.reshape(*stack, *words.shape[1:])


def unpack_stream(stored: Tensor, count: int, bits: int) -> Tensor:
    """Return `count` numbers of 3 to 8 bits out of a flat stream as uint8 `[count]`, the bits as they are."""
    return _numbers(stored.reshape(-1), 0, count, bits)


def with_offset(codes: Tensor, bits: int, signed: bool | None) -> Tensor:
    """Return the bits of integers, uint8, as the unsigned integers that are stored for them."""
    if not signed:
        return codes
    half = 1 << (bits - 1)
    return (codes ^ half) + ((8 if bits <= 4 else 128) - half)


def by_group(values: Tensor, groups: int) -> Tensor:
    """Return what is `[..., N, G]`, a value for each group of a row, as `[..., groups, N]`, padded with zeros."""
    padded = torch.nn.functional.pad(values, (0, groups - values.shape[-1]))
    return padded.transpose(-1, -2).contiguous()


def _pieces(layers: int, rows: int, features: int) -> Iterator[tuple[int, int, int]]:
    """Yield pieces (layer, first row, end row) of at most about `MOST_AT_ONCE` numbers."""
    step = max(1, MOST_AT_ONCE // max(features, 1))
    for layer in range(layers):
        for first in range(0, rows, step):
            yield layer, first, min(rows, first + step)


def _numbers(flat: Tensor, start: int, end: int, bits: int) -> Tensor:
    """Return numbers `start` to `end` of a stream, one to a byte."""
    if bits == 8:
        return flat[start:end]
    first, last = start // 8, -(-end // 8)  # of words of eight numbers, which take `bits` bytes
    piece = flat[first * bits : last * bits]
    piece = torch.nn.functional.pad(piece, (0, (last - first) * bits - piece.shape[0]))
    if bits == 4:
        numbers = torch.stack((piece & 15, piece >> 4), dim=-1).view(-1)
    else:
        octets = piece.view(-1, bits).to(torch.int64)
        stream = octets[:, 0].clone()
        for place in range(1, bits):
            stream |= octets[:, place] << (8 * place)
        places = [(stream >> (bits * place) & ((1 << bits) - 1)).to(torch.uint8) for place in range(8)]
        numbers = torch.stack(places, dim=-1).view(-1)
    return numbers[start - first * 8 : end - first * 8]
