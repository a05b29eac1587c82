"""Where a graph's head is: the last linear layer, which turns hidden states into logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.records import record
from inferencex.runtime.parallel.names import ALL_GATHER, PARALLEL_DOMAIN


class GraphNode(Protocol):
    """A node of either kind of graph, `formats.graph` or `onnx_ir`."""

    @property
    def op_type(self) -> str:
        """The operator."""
        ...

    @property
    def domain(self) -> str:
        """The operator's domain; "" for ONNX's own."""
        ...

    @property
    def inputs(self) -> Sequence[GraphValue | None]:
        """What it reads."""
        ...


class GraphValue(Protocol):
    """A value of either kind of graph."""

    def producer(self) -> GraphNode | None:
        """Return the node that computes it."""
        ...


V = TypeVar("V", bound=GraphValue)

# What models do to logits, and nothing but that: scale, cap, cut off padding of the vocabulary.
_BEHIND_THE_HEAD = {"Add", "Cast", "Clip", "Div", "Identity", "Mul", "Reshape", "Slice", "Sub", "Tanh"}
_QUANTIZERS = {("", "QuantizeLinear"), (DOMAIN, "QuantizeRows")}


@record(frozen=True)
class Head(Generic[V]):
    """The last linear layer.

    node:   the product itself, Gemm or MatMul
    hidden: what it reads, before activations are quantized if they are
    """

    node: GraphNode
    hidden: V


def find_head(logits: V, is_static: Callable[[V], bool]) -> Head[V] | None:
    """Return the head that logits come from; None where the graph does not end in a product with fixed weights."""
    value = logits
    while True:
        node = value.producer()
        if node is not None and (node.domain, node.op_type) == (PARALLEL_DOMAIN, ALL_GATHER):
            value = cast("V", node.inputs[0])  # of the logits, of which every rank computes some
            continue
        if node is None or node.domain != "":
            return None
        read = [cast("V", v) for v in node.inputs if v is not None]
        if node.op_type in ("Gemm", "MatMul"):
            if len(read) < 2 or is_static(read[0]) or not is_static(read[1]):
                return None
            return Head(node, _before_quantization(read[0]))
        computed = [v for v in read if not is_static(v)]
        if node.op_type not in _BEHIND_THE_HEAD or len(computed) != 1:
            return None
        (value,) = computed


def _before_quantization(value: V) -> V:
    """Return what a quantized and dequantized value stands for; any other value as it is."""
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", "DequantizeLinear") or node.inputs[0] is None:
        return value
    middle = node.inputs[0].producer()
    if middle is None or (middle.domain, middle.op_type) not in _QUANTIZERS or middle.inputs[0] is None:
        return value
    return cast("V", middle.inputs[0])
