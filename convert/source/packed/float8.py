"""Weights of FP8 (E4M3) numbers with a scale for the tensor, each output channel, each group, or each block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.base import (
    SCALE_TYPES,
    PackedStorage,
    Parts,
    expect,
    float8_tensor,
    grouping,
    require,
)
from inferencex.formats.errors import SourceError
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

METHOD = "fp8"
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Float8Format:
    """What config.json says about a checkpoint of method `fp8`.

    block: rows and columns that share a scale, None for whole tensors. It is that of `weight_scale_inv`; programs that
           write `weight_scale` have one for a tensor, and say nothing of blocks.
    """

    block: tuple[int, int] | None
    method: str = METHOD
    part_names: tuple[str, ...] = ("weight", "weight_scale_inv", "weight_scale")
    defining: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    dropped: tuple[str, ...] = ("activation_scale", "input_scale", "k_scale", "v_scale", "kv_scale")
    quantizes_activations: bool = True

    def open(self, module: str, parts: Parts) -> PackedStorage:
        """Check the tensors of one module against each other. Raises SourceError."""
        in_blocks = "weight_scale_inv" in parts
        weight, scales = require(module, parts, ("weight", self.defining[0 if in_blocks else 1]), "FP8")
        return open_float8(module, "FP8", METHOD, weight, scales, self.block if in_blocks else None)


def read_float8(settings: Mapping[str, Any], where: str) -> Float8Format:
    """Read `quantization_config` of method `fp8`. Raises SourceError for numbers or blocks that are not known."""
    number = str(settings.get("fmt", "e4m3")).lower()
    if number not in ("e4m3", "float8_e4m3fn"):
        raise SourceError(f"{where}: numbers of kind {number!r} are not read, only e4m3")
    expert_dtype = str(settings.get("expert_dtype", "fp8")).lower()
    if expert_dtype != "fp8":
        raise SourceError(f"{where}: experts of kind {expert_dtype!r} are not read, only fp8")
    block = settings.get("weight_block_size", (128, 128) if "weight_block_size" not in settings else None)
    return Float8Format(None if block is None else block_of(block, f"{where}: weight_block_size"))


def block_of(value: object, what: str) -> tuple[int, int]:
    """Return a block's rows and columns. Raises SourceError when `value` is no pair of positive numbers."""
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise SourceError(f"{what} is {value!r}, expected two positive numbers")
    return (int(sizes[0]), int(sizes[1]))


def open_float8(
    module: str,
    label: str,
    method: str,
    weight: TensorHandle,
    scales: TensorHandle,
    block: tuple[int, int] | None,
) -> PackedStorage:
    """Check a weight and its scales. Without a block, one scale each for the tensor or for output channels is found.

    Raises SourceError.
    """
    if len(weight.shape) != 2:
        raise SourceError(f"{weight.name}: has shape {list(weight.shape)}, expected [N, K]")
    rows, columns = weight.shape
    expect(weight, (rows, columns), (E4M3,), label)
    kinds = (*SCALE_TYPES, torch.float8_e8m0fnu)
    if block is not None:
        shape = (-(-rows // block[0]), -(-columns // block[1]))
        expect(scales, shape, kinds, f"a scale for each block of {list(block)} of {list(weight.shape)}")
    elif tuple(scales.shape) not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        expect(scales, (rows, 1), kinds, "a scale for each output channel, or one for all")
    else:
        expect(scales, tuple(scales.shape), kinds, "scales")
    return _Storage(module, label, method, weight, scales, block)


@dataclass(frozen=True)
class _Storage:
    module: str
    label: str
    method: str
    weight: TensorHandle
    scales: TensorHandle
    block: tuple[int, int] | None
    bits: int = 8

    @property
    def group_size(self) -> int:
        columns = self.shape[1]
        return PER_CHANNEL if self.block is None or self.block[1] >= columns else self.block[1]

    @property
    def format(self) -> str:
        if self.block is None:
            return f"{self.label}, E4M3, {grouping(8, PER_CHANNEL)}"
        return f"{self.label}, E4M3, 8 bits, blocks of {self.block[0]} x {self.block[1]}"

    @property
    def shape(self) -> tuple[int, int]:
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def parts(self) -> Sequence[TensorHandle]:
        return (self.weight, self.scales)

    def input_order(self) -> None:
        return None

    def read(self, start: int, stop: int) -> QuantizedTensor:
        scales = self.scales.load().to(torch.float32)
        if self.block is not None:
            # Rows of a block share its scale: DequantizeLinear has blocks along one axis, so each row gets a copy.
            scales = scales[torch.arange(start, stop) // self.block[0]]
        else:
            scales = scales.reshape(-1, 1).expand(self.shape[0], 1)[start:stop]
        return float8_tensor(self.module, self.weight.rows(start, stop), scales, self.group_size)
