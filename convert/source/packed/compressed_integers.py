"""Integers of compressed-tensors: packed into words, or one to a byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.act_order import order_of
from inferencex.convert.source.packed.base import (
    SCALE_TYPES,
    WORD_TYPES,
    PackedStorage,
    Parts,
    expect,
    grouping,
    groups_of,
    integer_tensor,
    require,
)
from inferencex.convert.source.packed.bits import WORD, unpack_words, words_for
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor


@dataclass(frozen=True)
class IntegerScheme:
    """How the integers of a module are stored; `group_size` None for one scale a channel or for all."""

    label: str
    method: str
    bits: int
    symmetric: bool
    group_size: int | None


def open_packed_integers(module: str, scheme: IntegerScheme, parts: Parts) -> PackedStorage:
    """Check the tensors of a module in the format `pack-quantized`. Raises SourceError."""
    packed, scales, shape = require(module, parts, ("weight_packed", "weight_scale", "weight_shape"), scheme.label)
    if len(packed.shape) != 2 or tuple(shape.shape) != (2,) or shape.dtype not in (torch.int64, torch.int32):
        raise SourceError(
            f"{module}: weight_packed {list(packed.shape)} and weight_shape {shape.dtype} {list(shape.shape)} are not "
            "those of a matrix; expected [N, words] and two integers"
        )
    rows, columns = (int(size) for size in shape.load().tolist())
    words = words_for(columns, scheme.bits)
    if scheme.bits == 3 and packed.shape == (rows, -(-columns // (WORD // 3))) != (rows, words):
        raise SourceError(
            f"{packed.name}: three-bit integers ten to a word, as older versions of compressed-tensors packed them, "
            "are not read; save the checkpoint with a current version"
        )
    expect(packed, (rows, words), WORD_TYPES, f"{shape.name} is [{rows}, {columns}], {scheme.bits} bits")
    return _open(module, scheme, parts, (packed, shape), scales, (rows, columns))


def open_plain_integers(module: str, scheme: IntegerScheme, parts: Parts) -> PackedStorage:
    """Check the tensors of a module in the format `int-quantized`: `[N, K]`, a byte each. Raises SourceError."""
    weight, scales = require(module, parts, ("weight", "weight_scale"), scheme.label)
    if len(weight.shape) != 2:
        raise SourceError(f"{weight.name}: has shape {list(weight.shape)}, expected [N, K]")
    shape = (weight.shape[0], weight.shape[1])
    expect(weight, shape, (torch.int8,), scheme.label)
    return _open(module, scheme, parts, (weight,), scales, shape)


def _open(
    module: str,
    scheme: IntegerScheme,
    parts: Parts,
    values: tuple[TensorHandle, ...],
    scales: TensorHandle,
    shape: tuple[int, int],
) -> PackedStorage:
    rows, columns = shape
    size = PER_CHANNEL if scheme.group_size is None or scheme.group_size >= columns else scheme.group_size
    why = f"weight [{rows}, {columns}], {grouping(scheme.bits, size)}"
    whole = scheme.group_size is None and tuple(scales.shape) in ((), (1,))
    expect(scales, tuple(scales.shape) if whole else (rows, groups_of(columns, size)), SCALE_TYPES, why)
    zero_points = parts.get("weight_zero_point")
    if zero_points is None and not scheme.symmetric:
        raise SourceError(f"{module}: {scheme.label} says it is asymmetric, but {module}.weight_zero_point is missing")
    if zero_points is not None:
        packed = zero_points.dtype != torch.int8
        count = (words_for(rows, scheme.bits), scales.shape[1]) if packed else tuple(scales.shape)
        expect(zero_points, count, WORD_TYPES if packed else (torch.int8,), why)
    g_idx = parts.get("weight_g_idx")
    if g_idx is not None:
        expect(g_idx, (columns,), (torch.int32, torch.int64), "the group of every input channel")
    return _Storage(module, scheme, shape, size, values, scales, zero_points, g_idx)


@dataclass(frozen=True)
class _Storage:
    module: str
    scheme: IntegerScheme
    shape: tuple[int, int]
    group_size: int
    values: tuple[TensorHandle, ...]
    scales: TensorHandle
    zero_points: TensorHandle | None
    g_idx: TensorHandle | None

    @property
    def method(self) -> str:
        return self.scheme.method

    @property
    def bits(self) -> int:
        return self.scheme.bits

    @property
    def format(self) -> str:
        return f"{self.scheme.label}, {grouping(self.bits, self.group_size)}"

    @property
    def parts(self) -> Sequence[TensorHandle]:
        return tuple(p for p in (*self.values, self.scales, self.zero_points, self.g_idx) if p is not None)

    def input_order(self) -> NDArray[np.int64] | None:
        # Stored by some versions with -1 in it where channels are in their natural order.
        if self.g_idx is None or self.group_size == PER_CHANNEL or int(self.g_idx.load()[0]) == -1:
            return None
        return order_of(self.g_idx, self.group_size)

    def read(self, start: int, stop: int) -> QuantizedTensor:
        rows = self.values[0].rows(start, stop)
        integers = self._unsigned(rows) if rows.dtype == torch.int8 else self._unpacked(rows)
        order = self.input_order()
        scales = self.scales.load()
        whole = scales.dim() < 2
        return integer_tensor(
            self.module,
            integers if order is None else integers[:, order],
            scales.reshape(1, 1).expand(stop - start, 1) if whole else scales[start:stop],
            self._zero_points(start, stop),
            bits=self.bits,
            group_size=self.group_size,
        )

    def _unpacked(self, words: torch.Tensor) -> NDArray[np.uint8]:
        return np.ascontiguousarray(unpack_words(words.numpy(), self.bits, self.shape[1], axis=1))

    def _unsigned(self, integers: torch.Tensor) -> NDArray[np.uint8]:
        """Return signed integers, one to a byte, as 0 .. 2^bits - 1. Raises SourceError for those out of range."""
        half = 1 << (self.bits - 1)
        if self.bits < 8 and bool(((integers < -half) | (integers >= half)).any()):
            raise SourceError(f"{self.module}: holds integers that {self.bits} bits cannot; the checkpoint is damaged")
        return integers.numpy().view(np.uint8) + np.uint8(half)

    def _zero_points(self, start: int, stop: int) -> NDArray[np.uint8] | None:
        if self.zero_points is None:
            return None
        stored = self.zero_points.load()
        if stored.dtype == torch.int8:
            unsigned = self._unsigned(stored)
            return (
                np.broadcast_to(unsigned.reshape(1, 1), (stop - start, 1)) if stored.dim() < 2 else unsigned[start:stop]
            )
        return np.ascontiguousarray(unpack_words(stored.numpy(), self.bits, self.shape[0], axis=0)[:, start:stop].T)
