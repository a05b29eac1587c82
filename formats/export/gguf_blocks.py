"""Weights in the blocks of 32 that GGML computes with, from a bundle's integers where a block type says the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from inferencex.formats.export.parameters import grouped_scales, unsigned
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor

BLOCK = 32


@dataclass(frozen=True)
class Stored:
    """A tensor as it goes into the file.

    kind:   GGML's type
    shape:  outermost axis first, in elements
    data:   its bytes as rows, or its numbers
    error:  norm of the difference to the bundle's weight over the norm of that weight
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[Any]
    error: float = 0.0


def block_type(tensor: QuantizedTensor) -> GGMLQuantizationType | None:
    """Return the block type that holds the integers of `tensor` as they are; None where there is none.

    Symmetric integers of 3 or 4 bits are Q4_0, asymmetric ones Q4_1, symmetric ones of 8 bits Q8_0. Groups must be made
    of whole blocks and scales must be float16.
    """
    if tensor.number != "int" or len(tensor.shape) != 2 or tensor.shape[1] % BLOCK:
        return None
    if tensor.group_size != PER_CHANNEL and tensor.group_size % BLOCK:
        return None
    scales = grouped_scales(tensor)
    if not np.array_equal(scales.astype(np.float16).astype(np.float32), scales.astype(np.float32)):
        return None
    if tensor.bits == 8:
        return GGMLQuantizationType.Q8_0 if tensor.symmetric else None
    _, zero_points = unsigned(tensor)
    centered = bool((zero_points == 1 << (tensor.bits - 1)).all())
    return GGMLQuantizationType.Q4_0 if centered else GGMLQuantizationType.Q4_1


def stored_blocks(tensor: QuantizedTensor, kind: GGMLQuantizationType) -> Stored:
    """Lay a weight out in blocks of `kind`, which `block_type` gave for it.

    Q4_1 keeps `-zero_point * scale` as float16, which rounds it where the product has more than 11 bits; `error` says
    what that changes.
    """
    rows, channels = tensor.shape
    blocks = channels // BLOCK
    per_group = blocks if tensor.group_size == PER_CHANNEL else tensor.group_size // BLOCK

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(values, per_group, axis=1)[:, :blocks]

    scales = spread(grouped_scales(tensor).astype(np.float16))
    parts = [scales[..., None].view(np.uint8)]
    error = 0.0
    if kind == GGMLQuantizationType.Q8_0:
        parts.append(tensor.integers().reshape(rows, blocks, BLOCK).view(np.uint8))
    else:
        integers, zero_points = unsigned(tensor)
        if kind == GGMLQuantizationType.Q4_0:
            integers = integers + np.uint8(8 - (1 << (tensor.bits - 1)))
        else:
            exact = -spread(zero_points).astype(np.float64) * scales.astype(np.float64)
            minima = exact.astype(np.float16)
            parts.append(minima[..., None].view(np.uint8))
            lost = float(np.square(minima.astype(np.float64) - exact).sum()) * BLOCK
            total = float(np.square(tensor.dequantize(), dtype=np.float64).sum())
            error = float(np.sqrt(lost / total)) if total else 0.0
        halves = integers.reshape(rows, blocks, 2, BLOCK // 2)
        parts.append(halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4)))
    data = np.concatenate(parts, axis=-1).reshape(rows, -1)
    return Stored(kind, tensor.shape, data, error)


def stored_plain(values: NDArray[Any]) -> Stored:
    """Keep numbers as they are: float32, float16 or bfloat16; vectors always as float32, which GGML wants."""
    if values.ndim < 2 or values.dtype == np.float32:
        return Stored(GGMLQuantizationType.F32, values.shape, values.astype(np.float32))
    if values.dtype == np.float16:
        return Stored(GGMLQuantizationType.F16, values.shape, values)
    if values.dtype.name == "bfloat16":
        data = np.ascontiguousarray(values).view(np.uint16).view(np.uint8)
        return Stored(GGMLQuantizationType.BF16, values.shape, data)
    return Stored(GGMLQuantizationType.F32, values.shape, values.astype(np.float32))
