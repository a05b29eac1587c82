"""Linears that share an input, and what stands before them that can absorb a factor per input channel.

`y = W x = (W diag(s)) (x / s)`: the weights that read `x` take the factors into their columns, and what computes `x`
divides by them without a further operation: a norm through its scale, a linear through its rows, a gated activation
through the rows of its upper half, attention through the rows of its value projection. All of it is read off the
graph; nothing here knows the name of a layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from inferencex.convert.passes.editing import attribute, constant_of, is_weight, static_dims
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.runtime.backends.reference import interpreter

_NORMS = {
    ("", "RMSNormalization"),
    ("", "LayerNormalization"),
    (DOMAIN, "AddRMSNormalization"),
    (DOMAIN, "AddLayerNormalization"),
}
_ROW_MOVES = {"Identity", "Gather", "Reshape"}
_MOVES = {"Identity", "Reshape", "Transpose", "Split", "Squeeze", "Unsqueeze", "Flatten"}
_HOMOGENEOUS = {"Relu"}  # f(x * s) = f(x) * s for s > 0


@dataclass(frozen=True)
class Absorber:
    """Tensors whose rows divide an input by its factors.

    tensors:  names of initializers; row `rows[c]` of each is divided by the factor of channel `c`
    rows:     int64 `[K]`; channels with the same row must have the same factor
    axis:     which axis the rows are counted along: 0, or 1 for stacks of experts
    """

    tensors: tuple[str, ...]
    rows: NDArray[np.int64]
    axis: int = 0

    @property
    def ties(self) -> NDArray[np.int64] | None:
        """Ids of the channels, equal where they share a row; None when each has its own."""
        return self.rows if len(np.unique(self.rows)) < len(self.rows) else None


@dataclass(frozen=True)
class SharedInput:
    """A value that linears read, `[rows, K]`.

    value:     its name; the value between the two linears of a layer of experts is called `NAME.inner`
    channels:  K
    readers:   names of the weights that multiply it, with input channels along their last axis; those of experts,
               `[E, N, K]`, see the rows that are routed to them
    quantized: those of the readers that are to be quantized
    absorber:  what can divide it by factors, or None
    """

    value: str
    channels: int
    readers: tuple[str, ...]
    quantized: tuple[str, ...]
    absorber: Absorber | None = None


def inner_name(node: ir.Node) -> str:
    """Name the value between the two linears of an `Experts` node."""
    return f"{node.outputs[0].name}.inner"


def multiplied_weights(node: ir.Node) -> list[ir.Value]:
    """List the parameters that a node multiplies its input with."""
    if node.domain == "" and node.op_type == "Gemm":
        places: tuple[int, ...] = (1,)
    elif node.domain == DOMAIN:
        places = {"Experts": (3, 4), "ExpertLinear": (2,)}.get(node.op_type, ())
    else:
        places = ()
    return [value for place in places if is_weight(value := node.inputs[place]) and value is not None]


def shared_inputs(model: ir.Model, quantized: Collection[str]) -> list[SharedInput]:
    """List the inputs of the weights called `quantized`, in the order of the graph.

    A weight that several linears share has no input of its own, and is left out.
    """
    found: dict[str, SharedInput] = {}
    for node in model.graph:
        for weight, value in _reads(node):
            if weight in quantized and value not in found and len(model.graph.initializers[weight].uses()) == 1:
                channels = static_dims(model.graph.initializers[weight])[-1]
                found[value] = _shared(node, value, channels, quantized)
    return list(found.values())


def _reads(node: ir.Node) -> list[tuple[str, str]]:
    """List the weights of a node, each with the value it multiplies."""
    if node.domain == "" and node.op_type == "Gemm" and is_weight(node.inputs[1]):
        return [(_name(node.inputs[1]), _name(node.inputs[0]))]
    if node.domain == DOMAIN and node.op_type == "Experts":
        return [(_name(node.inputs[3]), _name(node.inputs[0])), (_name(node.inputs[4]), inner_name(node))]
    if node.domain == DOMAIN and node.op_type == "ExpertLinear":
        return [(_name(node.inputs[2]), _name(node.inputs[0]))]
    return []


def _shared(node: ir.Node, value: str, channels: int, quantized: Collection[str]) -> SharedInput:
    if value == inner_name(node):
        down = (_name(node.inputs[4]),)
        return SharedInput(value, channels, down, down, _inside_experts(node))
    source = node.inputs[0]
    assert source is not None
    readers = [weight for use in source.uses() for weight, read in _reads(use.node) if read == value]
    absorber = _norm(source) or _linear_before(source)
    distinct = tuple(dict.fromkeys(readers))
    once = tuple(n for n in distinct if n in quantized and len(node.graph.initializers[n].uses()) == 1)  # type: ignore[union-attr]
    return SharedInput(value, channels, distinct, once, absorber)


def _inside_experts(node: ir.Node) -> Absorber | None:
    """Let the upper half of the first linear of each expert absorb the factors of the second."""
    if attribute(node, "activation") == "swiglu_clamped" or not _private(node.inputs[3]):
        return None
    inner = static_dims(_value(node.inputs[3]))[1] // 2
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    if bias is not None and not _private(bias):
        return None
    names = (_name(node.inputs[3]), *([_name(bias)] if bias is not None else []))
    return Absorber(names, _upper_half(inner, str(attribute(node, "layout", "concat"))), axis=1)


def _upper_half(inner: int, layout: str) -> NDArray[np.int64]:
    return 2 * np.arange(inner) + 1 if layout == "interleaved" else inner + np.arange(inner)


def _norm(source: ir.Value) -> Absorber | None:
    """Let the scale (and bias) of the norm that computes `source` absorb, if every reader can take the factors."""
    source_of_rows = _before_row_moves(source)
    node = source_of_rows.producer()
    if node is None or (node.domain, node.op_type) not in _NORMS or source_of_rows is not node.outputs[0]:
        return None
    first = 2 if node.op_type.startswith("Add") else 1
    scale = node.inputs[first] if len(node.inputs) > first else None
    bias = node.inputs[first + 1] if len(node.inputs) > first + 1 else None
    if not _private(scale) or (bias is not None and not _private(bias)):
        return None
    channels = static_dims(_value(scale))
    width = source.shape[-1] if source.shape else None
    if len(channels) != 1 or channels[0] != width or not _takes_factors(source):
        return None
    return Absorber((_name(scale), *([_name(bias)] if bias is not None else [])), np.arange(channels[0]))


def _before_row_moves(value: ir.Value) -> ir.Value:
    """Walk back over what picks or relabels rows and leaves channels alone."""
    while True:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type not in _ROW_MOVES or is_weight(node.inputs[0]):
            return value
        if node.op_type == "Gather" and attribute(node, "axis", 0) != 0:
            return value
        before = node.inputs[0]
        if before is None or not before.shape or not value.shape or before.shape[-1] != value.shape[-1]:
            return value
        # Another reader of what is moved would see divided rows without knowing: only one path is understood.
        if len(before.uses()) != 1 or before.is_graph_output():
            return value
        value = before


def _takes_factors(value: ir.Value) -> bool:
    """Tell whether every reader of a value is a linear whose columns can be scaled."""
    if value.is_graph_output():
        return False
    for use in value.uses():
        reads = [weight for weight, read in _reads(use.node) if read == value.name]
        weight = use.node.graph.initializers.get(reads[0]) if reads and use.node.graph is not None else None
        if use.idx != 0 or weight is None or not _private(weight):
            return False
    return True


def _linear_before(source: ir.Value) -> Absorber | None:
    """Let the rows of a linear absorb, when only bilinear operations stand between it and `source`."""
    if not _takes_factors(source):
        return None
    traced = _trace(source)
    if traced is None:
        return None
    linear, rows = traced
    bias = linear.inputs[2] if len(linear.inputs) > 2 else None
    if not _private(linear.inputs[1]) or (bias is not None and not _private(bias)):
        return None
    return Absorber((_name(linear.inputs[1]), *([_name(bias)] if bias is not None else [])), rows)


def rows_behind(value: ir.Value | None) -> tuple[str, NDArray[np.int64]] | None:
    """Return the weight of the linear that a value is proportional to, and the row each of its channels comes from."""
    traced = None if value is None else _trace(value)
    return None if traced is None else (_name(traced[0].inputs[1]), traced[1])


def _trace(value: ir.Value) -> tuple[ir.Node, NDArray[np.int64]] | None:
    """Find the linear that `value` is proportional to, channel by channel, and the row each channel comes from."""
    node = value.producer()
    if node is None:
        return None
    if node.domain == "" and node.op_type == "Gemm":
        if not is_weight(node.inputs[1]) or attribute(node, "transB", 0) != 1 or attribute(node, "alpha", 1.0) != 1.0:
            return None
        return node, np.arange(static_dims(_value(node.inputs[1]))[0])
    if node.domain == DOMAIN and node.op_type == "GatedActivation":
        if attribute(node, "activation") == "swiglu_clamped":
            return None
        traced = _trace_private(node.inputs[0])
        if traced is None:
            return None
        return traced[0], traced[1][_upper_half(len(traced[1]) // 2, str(attribute(node, "layout", "concat")))]
    if node.domain == DOMAIN and node.op_type == "Attention":
        traced = _trace_private(node.inputs[2])
        if traced is None:
            return None
        heads, kv_heads = int(attribute(node, "num_heads")), int(attribute(node, "num_kv_heads"))
        of_head = np.arange(heads) * kv_heads // heads
        return traced[0], traced[1].reshape(kv_heads, -1)[of_head].reshape(-1)
    if node.domain == "" and node.op_type in _HOMOGENEOUS:
        return _trace_private(node.inputs[0])
    if node.domain == "" and node.op_type == "Mul":
        width = value.shape[-1] if value.shape else None
        for side in node.inputs:
            if side is not None and side.shape and side.shape[-1] == width:
                traced = _trace_private(side)
                if traced is not None:
                    return traced
        return None
    if node.domain == "" and node.op_type in (*_MOVES, "Gather"):
        return _through_move(node, value)
    return None


def _trace_private(value: ir.Value | None) -> tuple[ir.Node, NDArray[np.int64]] | None:
    """Do as `_trace` when nobody else reads `value`."""
    return None if value is None or len(value.uses()) != 1 or value.is_graph_output() else _trace(value)


def _through_move(node: ir.Node, value: ir.Value) -> tuple[ir.Node, NDArray[np.int64]] | None:
    """Follow channels through an operation that only moves numbers, by moving their indices."""
    others = node.inputs[1:]
    if node.op_type == "Gather":
        if attribute(node, "axis", 0) != 0 or is_weight(node.inputs[0]):
            return None
        return _trace_private(node.inputs[0])  # rows are picked; channels stay
    if any(other is not None and constant_of(other) is None for other in others):
        return None
    data = node.inputs[0]
    traced = _trace_private(data)
    if traced is None or data is None or data.shape is None:
        return None
    # One token stands for all: the dimension of tokens is the symbolic one.
    shape = [size if isinstance(size, int) else 1 for size in data.shape]
    if int(np.prod(shape)) != len(traced[1]):
        return None
    environment = {str(data.name): torch.from_numpy(traced[1].astype(np.float64)).reshape(shape)}
    interpreter.run_nodes([node], environment)
    return traced[0], environment[str(value.name)].reshape(-1).to(torch.int64).numpy()


def _private(value: ir.Value | None) -> bool:
    """Tell whether a value is a parameter that one node alone reads."""
    return value is not None and is_weight(value) and len(value.uses()) == 1 and not value.is_graph_output()


def _value(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def _name(value: ir.Value | None) -> str:
    return str(_value(value).name)
