"""Weights of FP4 (E2M1) numbers in groups of 16, as compressed-tensors stores NVFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.base import PackedStorage, Parts, expect, grouping, require
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import QuantizedTensor

GROUP_SIZE = 16


def open_nvfp4(module: str, label: str, method: str, parts: Parts) -> PackedStorage:
    """Check the tensors of a module in the format `nvfp4-pack-quantized`. Raises SourceError."""
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    packed, scales, global_scale = require(module, parts, names, label)
    if len(packed.shape) != 2 or packed.shape[1] * 2 % GROUP_SIZE:
        raise SourceError(
            f"{packed.name}: has shape {list(packed.shape)}, expected [N, K / 2] with K a multiple of {GROUP_SIZE}"
        )
    rows, pairs = packed.shape
    expect(packed, (rows, pairs), (torch.uint8,), "two numbers to a byte")
    expect(scales, (rows, pairs * 2 // GROUP_SIZE), (torch.float8_e4m3fn,), grouping(4, GROUP_SIZE))
    expect(global_scale, (1,), (torch.float32,), "one factor for all scales")
    return _Storage(module, label, method, packed, scales, global_scale)


@dataclass(frozen=True)
class _Storage:
    module: str
    label: str
    method: str
    packed: TensorHandle
    scales: TensorHandle
    global_scale: TensorHandle
    bits: int = 4
    group_size: int = GROUP_SIZE

    @property
    def format(self) -> str:
        return f"{self.label}, E2M1, {grouping(4, GROUP_SIZE)}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.packed.shape[0], self.packed.shape[1] * 2)

    @property
    def parts(self) -> Sequence[TensorHandle]:
        return (self.packed, self.scales, self.global_scale)

    def input_order(self) -> None:
        return None

    def read(self, start: int, stop: int) -> QuantizedTensor:
        factor = float(self.global_scale.load())
        scales = self.scales.rows(start, stop).contiguous().view(torch.uint8).numpy()
        if bool(((scales & 0x7F) == 0x7F).any()) or not 0 < factor < float("inf"):
            raise SourceError(f"{self.module}: its scales are not all positive and finite; the checkpoint is damaged")
        return QuantizedTensor(
            values=self.packed.rows(start, stop).numpy().reshape(-1),
            scales=scales.view(ml_dtypes.float8_e4m3fn),
            zero_points=None,
            bits=4,
            group_size=GROUP_SIZE,
            symmetric=True,
            shape=(stop - start, self.shape[1]),
            number="e2m1",
            tensor_scale=np.asarray(np.float32(1) / np.float32(factor)),
        )
