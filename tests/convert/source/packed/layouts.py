"""The published layouts of quantized weights, written from their descriptions with Python's own integers.

Nothing here is shared with what reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Integers:
    """A weight `[N, K]` as integers 0 .. 2^bits - 1: `weight = (integer - zero_point) * scale`, float64.

    groups: the group of every input channel
    """

    bits: int
    group_size: int
    values: NDArray[np.int64]
    scales: NDArray[np.float64]
    zero_points: NDArray[np.int64]
    groups: NDArray[np.int64]

    def weight(self) -> NDArray[np.float64]:
        """Return what the integers stand for."""
        return (self.values - self.zero_points[:, self.groups]) * self.scales[:, self.groups]


def round_to_integers(
    weight: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    groups: NDArray[np.int64] | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> Integers:
    """Round a weight to integers in groups of input channels; `group_size` -1 is one group."""
    w = weight.detach().double().numpy()
    rows, columns = w.shape
    size = columns if group_size == -1 else group_size
    if groups is None:
        groups = np.arange(columns) // size
    count = int(groups.max()) + 1
    top = (1 << bits) - 1
    scales = np.zeros((rows, count))
    zero_points = np.full((rows, count), 1 << (bits - 1), dtype=np.int64)
    for g in range(count):
        part = w[:, groups == g]
        if symmetric:
            scale = np.abs(part).max(axis=1) / ((1 << (bits - 1)) - 0.5)
        else:
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scale = (high - low) / top
            zero_points[:, g] = np.clip(np.round(-low / scale), 0, top)
        scales[:, g] = torch.from_numpy(scale).to(scale_dtype).double().numpy()
    if not symmetric:
        zero_points[0, 0] = 0  # the value that "less one" makes overflow
    values = np.clip(np.round(w / scales[:, groups]) + zero_points[:, groups], 0, top).astype(np.int64)
    return Integers(bits, size, values, scales, zero_points, groups)


def words_of(integers: Sequence[int] | NDArray[np.int64], bits: int) -> list[int]:
    """Return integers as a stream of bits, cut into signed 32-bit words."""
    stream = sum(int(value) << (index * bits) for index, value in enumerate(integers))
    count = -(-len(integers) * bits // 32)
    unsigned = [(stream >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in unsigned]


def packed_along(values: NDArray[np.int64], bits: int, axis: int) -> torch.Tensor:
    """Pack a matrix along one axis."""
    lines = values.T if axis == 0 else values
    words = torch.tensor([words_of(line, bits) for line in lines], dtype=torch.int32)
    return (words.T if axis == 0 else words).contiguous()


def awq(module: str, q: Integers, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """AutoAWQ, version gemm."""

    def words(matrix: NDArray[np.int64]) -> torch.Tensor:
        shuffled = [[row[i + c] for i in range(0, len(row), 8) for c in AWQ_ORDER] for row in matrix]
        return packed_along(np.array(shuffled), 4, axis=1)

    return {
        f"{module}.qweight": words(q.values.T),
        f"{module}.qzeros": words(q.zero_points.T),
        f"{module}.scales": torch.from_numpy(q.scales.T.copy()).to(dtype),
    }


def gptq(module: str, q: Integers, *, version: int, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """AutoGPTQ and GPTQModel; version 1 subtracts one from every field of the words that hold zero points."""
    zero_points = packed_along(q.zero_points.T, q.bits, axis=1)
    if version == 1:
        period = [0] * {2: 1, 3: 3, 4: 1, 8: 1}[q.bits]
        for start in range(0, 32 * len(period), q.bits):
            period[start // 32] |= 1 << (start % 32)
        rows = [
            [(int(word) - period[i % len(period)]) & 0xFFFFFFFF for i, word in enumerate(row)] for row in zero_points
        ]
        zero_points = torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in rows], dtype=torch.int32)
    return {
        f"{module}.qweight": packed_along(q.values.T, q.bits, axis=0),
        f"{module}.qzeros": zero_points,
        f"{module}.scales": torch.from_numpy(q.scales.T.copy()).to(dtype),
        f"{module}.g_idx": torch.from_numpy(q.groups.astype(np.int32)),
    }


def pack_quantized(
    module: str, q: Integers, *, symmetric: bool, dtype: torch.dtype, g_idx: bool = False
) -> dict[str, torch.Tensor]:
    """compressed-tensors, format pack-quantized: signed integers plus half the range, densely packed."""
    tensors = {
        f"{module}.weight_packed": packed_along(q.values, q.bits, axis=1),
        f"{module}.weight_scale": torch.from_numpy(q.scales).to(dtype),
        f"{module}.weight_shape": torch.tensor(q.values.shape, dtype=torch.int64),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = packed_along(q.zero_points, q.bits, axis=0)
    if g_idx:
        tensors[f"{module}.weight_g_idx"] = torch.from_numpy(q.groups.astype(np.int32))
    return tensors


def int_quantized(module: str, q: Integers, *, symmetric: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """compressed-tensors, format int-quantized: one signed integer to a byte."""
    half = 1 << (q.bits - 1)
    tensors = {
        f"{module}.weight": torch.from_numpy((q.values - half).astype(np.int8)),
        f"{module}.weight_scale": torch.from_numpy(q.scales).to(dtype),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = torch.from_numpy((q.zero_points - half).astype(np.int8))
    return tensors


@dataclass
class Float8:
    """A weight `[N, K]` as E4M3 numbers and scales of blocks of rows and columns."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def weight(self) -> NDArray[np.float64]:
        """Return what the numbers stand for."""
        rows, columns = self.values.shape
        wide: NDArray[np.float64] = self.scales.double().numpy()
        spread = wide.repeat(self.block[0], axis=0)[:rows].repeat(self.block[1], axis=1)[:, :columns]
        return self.values.double().numpy() * spread


def round_to_float8(weight: torch.Tensor, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32) -> Float8:
    """Round a weight to E4M3, with a scale for each block."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = (part.detach().abs().max() / 448).to(scale_dtype).float()
    spread = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    values = (weight.detach() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Float8(values, scales.to(scale_dtype), block)


def config_of(method: str, **settings: Any) -> dict[str, Any]:
    """Return a `quantization_config`."""
    return {"quant_method": method, **settings}


def compressed_config(format: str, **weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of a compressed-tensors checkpoint with one group."""
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "input_activations": None}
    return config_of(
        "compressed-tensors",
        format=format,
        quantization_status="compressed",
        config_groups={"group_0": group},
        ignore=["lm_head"],
    )
