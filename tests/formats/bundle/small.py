"""Small models: one with a 4-bit weight and what it takes to write it as a bundle, and ones of any tensors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from inferencex.formats.bundle import BundleWriter, Manifest
from inferencex.formats.packing import QuantizedTensor, pack_int4

CHANNELS, HIDDEN, GROUP_SIZE = 10, 7, 4


def small_quantized(seed: int = 0) -> QuantizedTensor:
    """Return an asymmetric 4-bit weight [7, 10] in groups of 4, with a ragged last group and odd sizes."""
    rng = np.random.default_rng(seed)
    return QuantizedTensor(
        values=pack_int4(rng.integers(0, 16, (HIDDEN, CHANNELS)).astype(np.uint8)),
        scales=rng.uniform(0.01, 0.1, (HIDDEN, 3)).astype(np.float16),
        zero_points=pack_int4(rng.integers(0, 16, (HIDDEN, 3)).astype(np.uint8)),
        bits=4,
        group_size=GROUP_SIZE,
        symmetric=False,
        shape=(HIDDEN, CHANNELS),
    )


def plain_weight() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((33, HIDDEN)).astype(np.float32)


def small_model() -> ir.Model:
    """Return x[T, 10] -> Gemm(4-bit `up`) -> Gemm(plain `down`, bias inside the graph) -> y[T, 33]."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", CHANNELS]))
    up, scales, zero_points, down, bias = (
        ir.Value(name=name) for name in ("up", "up.scales", "up.zero_points", "down", "bias")
    )
    bias.const_value = ir.tensor(np.arange(33, dtype=np.float32), name="bias")
    dequantize = ir.node(
        "DequantizeLinear",
        [up, scales, zero_points],
        attributes={"axis": 1, "block_size": GROUP_SIZE, "output_dtype": 1},
        name="up_dequantized",
    )
    first = ir.node("Gemm", [x, dequantize.outputs[0]], attributes={"transB": 1})
    second = ir.node("Gemm", [first.outputs[0], down, bias], attributes={"transB": 1})
    second.outputs[0].name = "y"
    second.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    second.outputs[0].shape = ir.Shape(["T", 33])
    graph = ir.Graph(
        [x],
        second.outputs,
        nodes=[dequantize, first, second],
        initializers=[up, scales, zero_points, down, bias],
        opset_imports={"": 23},
        name="small",
    )
    return ir.Model(graph, ir_version=11)


def fill(writer: BundleWriter) -> None:
    """Write the small model into `writer`, up to the seal."""
    writer.add_quantized("up", small_quantized(), method="rtn")
    writer.add_tensor("down", plain_weight(), ir.DataType.FLOAT, (33, HIDDEN))
    writer.write_graph(small_model())
    writer.add_side_file("config.json", b'{"model_type": "small"}')
    writer.seal(Manifest(source={"id": "small"}, tools={"inferencex": "0"}))


def gather_model(**shapes: tuple[ir.DataType, tuple[int, ...]]) -> ir.Model:
    """Return a model with one initializer for each tensor named, all of them outputs."""
    values = [ir.Value(name=name) for name in shapes]
    nodes = [ir.node("Identity", [value]) for value in values]
    outputs = []
    for index, (node, (dtype, shape)) in enumerate(zip(nodes, shapes.values(), strict=True)):
        node.outputs[0].name = f"y{index}"
        node.outputs[0].type = ir.TensorType(dtype)
        node.outputs[0].shape = ir.Shape(shape)
        outputs.append(node.outputs[0])
    graph = ir.Graph([], outputs, nodes=nodes, initializers=values, opset_imports={"": 23}, name="gather")
    return ir.Model(graph, ir_version=11)
