"""Operators without a native kernel, run by ONNX's own reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node
from inferencex.runtime.backends.graph.evaluation import Array, evaluate


def step_function(node: Node) -> Callable[[Sequence[Array | None], Sequence[Array | None]], None]:
    """Return what a program calls in every step: it fills the outputs' arrays from the inputs'."""

    def run(inputs: Sequence[Array | None], outputs: Sequence[Array | None]) -> None:
        for place, result in zip(outputs, evaluate(node, inputs), strict=False):
            if place is None:
                continue
            if place.shape != result.shape:
                raise BackendError(
                    f"operator {node.op_type} gave {node.outputs[0].name!r} the shape {list(result.shape)}; "
                    f"the graph says {list(place.shape)}"
                )
            place[...] = result

    return run
