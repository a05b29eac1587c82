"""A whole model as functions of its weights: what refinement differentiates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import product_dtype
from inferencex.convert.calibrate.blocks import make_stage, static_nodes
from inferencex.convert.calibrate.executor import BlockExecutor, step_inputs
from inferencex.convert.calibrate.sharing import multiplied_weights
from inferencex.formats.errors import QuantizationError


def as_read(nodes: Iterable[ir.Node], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as the nodes read them: matrices that multiply in the dtype of products, tables of
    rows as they are, all else in float32.
    """
    nodes = list(nodes)
    multiplied = {str(weight.name) for node in nodes for weight in multiplied_weights(node)}
    looked_up = {str(node.inputs[0].name) for node in nodes if node.op_type == "Gather" and node.inputs[0] is not None}

    def read(name: str, weight: Tensor) -> Tensor:
        if not weight.is_floating_point() or (name in looked_up and name not in multiplied):
            return weight
        return weight.to(product_dtype() if name in multiplied else torch.float32)

    return {name: read(name, weight) for name, weight in weights.items()}


class WholeModel:
    """Runs a graph in two parts: up to what its head multiplies, and the head.

    fixed:  the weights that are never given, as nodes read them (`as_read`)
    """

    def __init__(self, graph: ir.Graph, fixed: Mapping[str, Tensor]) -> None:
        self._graph, self._fixed = graph, dict(fixed)
        self._executor = BlockExecutor(graph)
        still = set(static_nodes(graph))
        nodes = [node for node in graph if node not in still]
        linears = [index for index, node in enumerate(nodes) if multiplied_weights(node)]
        if not linears or nodes[linears[-1]].op_type != "Gemm":
            raise QuantizationError("the graph has no linear that makes its logits; --effort best cannot refine it")
        head = linears[-1]
        source = nodes[head].inputs[0]
        assert source is not None
        self._hidden = str(source.name)
        self._body = make_stage(graph, nodes, 0, head)
        self._head = make_stage(graph, nodes, head, len(nodes))
        others = set(self._head.inputs) - {self._hidden}
        if others:
            raise QuantizationError(
                f"the head reads {', '.join(sorted(others))} beside the last layer's output; "
                "--effort best cannot refine such a model"
            )
        (self._logits,) = (str(value.name) for value in graph.outputs)

    @property
    def head_weights(self) -> frozenset[str]:
        """The weights that `logits` reads, which are never given."""
        return frozenset(self._head.weights)

    def hidden(self, weights: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """Return what the head multiplies, float32 `[S * L, hidden]`, for int64 `[S, L]`."""
        values = step_inputs(self._graph, token_ids)
        return self._executor.run(self._body, values, {**self._fixed, **weights}, len(token_ids))[self._hidden]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[rows, vocab]` for `[rows, hidden]`."""
        return self._executor.run(self._head, {self._hidden: hidden}, self._fixed, 1)[self._logits]
