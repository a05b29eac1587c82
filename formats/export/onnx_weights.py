"""A bundle's weights in ONNX graphs: integers for MatMulNBits and DequantizeLinear, which share their bytes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from inferencex.formats.bundle import Bundle
from inferencex.formats.export.onnx_graph import GraphBuilder
from inferencex.formats.export.parameters import grouped_scales, unsigned
from inferencex.formats.graph import Value
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, pack_int4

_READ_THROUGH = ("DequantizeLinear", "UnpackBits", "Cast", "Identity")
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 256


def stored_behind(value: Value, bundle: Bundle) -> str | None:
    """Return the stored weight that a value of the graph stands for; None where it is computed from the step."""
    while True:
        if value.is_initializer:
            return value.name if value.name in bundle.stored else None
        node = value.producer()
        if node is None or node.op_type not in _READ_THROUGH or node.inputs[0] is None:
            return None
        value = node.inputs[0]


def block_size(tensor: QuantizedTensor) -> int | None:
    """Return the block of MatMulNBits that says the same as a weight's groups; None where there is none.

    That is the largest power of two that divides them, from 16 to 256.
    """
    if tensor.number != "int" or len(tensor.shape) != 2:
        return None
    channels = tensor.shape[1]
    group = channels if tensor.group_size == PER_CHANNEL else tensor.group_size
    if tensor.group_size != PER_CHANNEL and channels % group:
        return None
    block = min(group & -group, _LARGEST_BLOCK)
    return block if block >= _SMALLEST_BLOCK else None


class Weights:
    """Puts weights into a graph as they are asked for."""

    def __init__(self, bundle: Bundle, builder: GraphBuilder) -> None:
        self.bundle = bundle
        self.builder = builder
        self.widened: list[str] = []
        self._floats: dict[str, str] = {}

    def is_quantized(self, name: str) -> bool:
        """Tell whether a stored weight is quantized."""
        return name in self.bundle.manifest.quantization

    def floats(self, name: str) -> str:
        """Return a weight as float32, in its shape; quantized ones go through DequantizeLinear."""
        if name not in self._floats:
            self._floats[name] = self._quantized(name) if self.is_quantized(name) else self._plain(name)
        return self._floats[name]

    def _plain(self, name: str) -> str:
        stored = self.bundle.stored[name]
        made = self.builder.stored(name, self.bundle.tensor(name), int(stored.dtype), stored.shape)
        if stored.dtype.name in ("FLOAT16", "BFLOAT16"):
            return self.builder.node("Cast", [made], {"to": TensorProto.FLOAT})
        return made

    def _quantized(self, name: str) -> str:
        tensor = self.bundle.quantized(name)
        if tensor.number != "int" or (tensor.group_size != PER_CHANNEL and tensor.shape[-1] % tensor.group_size):
            self.widened.append(name)
            floats = tensor.dequantize()
            return self.builder.stored(f"{name}.dequantized", floats, TensorProto.FLOAT, floats.shape)
        block = block_size(tensor)
        if block is None:
            integers, zero_points, scales = *unsigned(tensor), grouped_scales(tensor)
            axis = {"axis": len(tensor.shape) - 1, "block_size": tensor.shape[-1] // scales.shape[-1]}
        else:
            integers, zero_points, scales = _in_blocks(tensor, block)
            axis = {"axis": 1, "block_size": block}
        values, kind = _packed(integers, tensor.bits)
        points, _ = _packed(zero_points, tensor.bits)
        inputs = [
            self.builder.stored(f"{name}.values", values, kind, integers.shape),
            self.builder.stored(f"{name}.scales", scales.astype(np.float32), TensorProto.FLOAT, scales.shape),
            self.builder.stored(f"{name}.zero_points", points, kind, zero_points.shape),
        ]
        return self.builder.node("DequantizeLinear", inputs, axis)

    def linear_in_blocks(self, name: str, x: str, output: str) -> bool:
        """Add `x [T, K] @ weight.T` as one MatMulNBits; False where a weight does not lie in its blocks."""
        if not self.is_quantized(name):
            return False
        tensor = self.bundle.quantized(name)
        block = block_size(tensor)
        if block is None:
            return False
        rows, channels = tensor.shape
        integers, zero_points, scales = _in_blocks(tensor, block)
        values, _ = _packed(integers, tensor.bits)
        bits = 4 if tensor.bits < 8 else 8
        flat = [rows, channels // block, block * bits // 8]
        # Rows of zero points begin at a byte; where they fill bytes anyway, that is the layout of `_quantized`.
        padded = np.zeros((rows, -(-zero_points.shape[1] * bits // 8) * 8 // bits), dtype=np.uint8)
        padded[:, : zero_points.shape[1]] = zero_points
        points, _ = _packed(padded, tensor.bits)
        same = padded.shape == zero_points.shape
        inputs = [
            x,
            self.builder.stored(f"{name}.blocks", values, TensorProto.UINT8, flat, same_as=f"{name}.values"),
            self.builder.stored(f"{name}.scales", scales.astype(np.float32), TensorProto.FLOAT, scales.shape),
            self.builder.stored(
                f"{name}.points",
                points,
                TensorProto.UINT8,
                [rows, points.size // rows],
                same_as=f"{name}.zero_points" if same else None,
            ),
        ]
        attributes = {"K": channels, "N": rows, "bits": bits, "block_size": block, "accuracy_level": 4}
        self.builder.node("MatMulNBits", inputs, attributes, domain="com.microsoft", outputs=[output])
        return True


def _in_blocks(tensor: QuantizedTensor, block: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.generic]]:
    """Return integers `[N, K]`, zero points and scales `[N, K / block]`."""
    integers, zero_points = unsigned(tensor)
    scales = grouped_scales(tensor)
    repeats = math.prod(tensor.shape[1:]) // block // scales.shape[1]
    return integers, np.repeat(zero_points, repeats, axis=1), np.repeat(scales, repeats, axis=1)


def _packed(values: NDArray[np.uint8], bits: int) -> tuple[NDArray[np.uint8], int]:
    """Return integers of 3 or 4 bits two to a byte, others as they are, and ONNX's type of them."""
    if bits < 8:
        return pack_int4(values), TensorProto.UINT4
    return values, TensorProto.UINT8
