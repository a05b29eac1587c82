"""What a graph computes, in the terms in which other formats describe decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.graph import Node, Value


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE: angles are `position * frequencies`, float64 `[rotated / 2]`; `factor` multiplies sines and cosines."""

    frequencies: NDArray[np.float64]
    factor: float
    interleaved: bool


@dataclass(frozen=True)
class DecoderFacts:
    """What all layers of a decoder have in common.

    layers, heads, kv_heads, head_size:  of attention
    scale, window, softcap:              of attention's scores; 0 where there is no window or bound
    epsilon:                             of the normalizations
    rotation:                            None where positions do not rotate anything
    """

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int
    softcap: float
    epsilon: float
    rotation: Rotation | None


def decoder_facts(bundle: Bundle) -> DecoderFacts:
    """Read them from the graph. Raises ExportError where layers differ, naming in what."""
    nodes = [node for node in bundle.graph if node.op_type == "Attention"]
    norms = [node for node in bundle.graph if node.op_type.endswith(("RMSNormalization", "LayerNormalization"))]
    if not nodes or not norms:
        raise ExportError(f"{bundle.path}: its graph has no attention or no normalization; it is no decoder")
    heads = _same(nodes, "num_heads")
    key = nodes[0].inputs[1]
    width = key.shape[-1] if key is not None and key.shape is not None else None
    kv_heads = _same(nodes, "num_kv_heads")
    if not isinstance(width, int):
        raise ExportError(f"{bundle.path}: the graph does not say how wide keys are")
    return DecoderFacts(
        layers=len({node.attributes.get_int("layer") for node in nodes}),
        heads=int(heads),
        kv_heads=int(kv_heads),
        head_size=width // int(kv_heads),
        scale=float(_same(nodes, "scale")),
        window=int(_same(nodes, "window", 0)),
        softcap=float(_same(nodes, "softcap", 0.0)),
        epsilon=float(_same(norms, "epsilon")),
        rotation=_rotation(bundle),
    )


def _same(nodes: list[Node], attribute: str, default: Any = None) -> Any:
    values = {node.attributes.get(attribute, default) for node in nodes}
    if len(values) != 1:
        raise ExportError(f"layers differ in {attribute} of {nodes[0].op_type} ({sorted(map(str, values))})")
    return values.pop()


def _rotation(bundle: Bundle) -> Rotation | None:
    rotations = [node for node in bundle.graph if node.op_type == "RotaryEmbedding"]
    if not rotations:
        return None
    tables = {tuple(value.name for value in node.inputs[1:3] if value is not None) for node in rotations}
    if len(tables) != 1:
        raise ExportError(f"{bundle.path}: its layers rotate by different angles")
    cos, sin = rotations[0].inputs[1:3]
    if cos is None or sin is None:
        raise ExportError(f"{bundle.path}: the graph's rotation has no tables")
    cosines, sines = evaluated(bundle, cos), evaluated(bundle, sin)
    factor = float(cosines[0, 0])
    frequencies = np.arctan2(sines[1].astype(np.float64), cosines[1].astype(np.float64))
    return Rotation(frequencies, factor, bool(_same(rotations, "interleaved", 0)))


def evaluated(bundle: Bundle, value: Value) -> NDArray[Any]:
    """Compute a value that depends on nothing but constants of the graph.

    Raises ExportError when it depends on the graph's inputs.
    """
    nodes: dict[str, Node] = {}
    leaves: dict[str, Value] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if node is None:
            if not current.is_initializer:
                raise ExportError(f"{bundle.path}: {value.name!r} depends on the input {current.name!r}")
            leaves[current.name] = current
        elif node.outputs[0].name not in nodes:
            nodes[node.outputs[0].name] = node
            pending.extend(read for read in node.inputs if read is not None)
    feeds = {name: leaf.numpy() if leaf.constant is not None else bundle.tensor(name) for name, leaf in leaves.items()}
    if not nodes:
        return feeds[value.name]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = onnx.helper.make_graph(
        [node.proto for node in bundle.graph if node.outputs[0].name in nodes],
        "constant",
        inputs,
        [onnx.helper.make_empty_tensor_value_info(value.name)],
    )
    opsets = [onnx.helper.make_opsetid("", bundle.graph.opset_imports[""])]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    (result,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(result)
