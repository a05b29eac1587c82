"""Run stages of a graph over whole sequences, differentiably, with weights that the caller provides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import multiply, product_dtype
from inferencex.convert.calibrate.blocks import Stage, static_nodes
from inferencex.convert.calibrate.sharing import inner_name
from inferencex.convert.passes.editing import attribute
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.attention import visible_keys
from inferencex.runtime.backends.reference.fused import gated_activation

Values = dict[str, Tensor]
# Is given the name of a value that exists only inside of a node, and its rows: what the second linears of experts read.
Capture = Callable[[str, Tensor], None]
# Is given the name of a weight that multiplies, the expert (0 where there are none), the rows it reads `[R, K]` and
# their products with it `[R, N]`, to which nothing has been added yet.
Tap = Callable[[str, int, Tensor, Tensor], None]
# Is given an Attention node, and its keys `[T, G * Dk]` and values `[T, G * Dv]`.
Attended = Callable[[ir.Node, Tensor, Tensor], None]


def step_inputs(graph: ir.Graph, token_ids: Tensor) -> Values:
    """Return the graph's inputs for whole sequences, int64 `[S, L]`, that begin at position 0; all rows give logits."""
    sequences, length = token_ids.shape
    tokens = sequences * length
    every = {
        "token_ids": token_ids.reshape(-1),
        "positions": torch.arange(length).repeat(sequences),
        "logit_rows": torch.arange(tokens),
        "prompt_lengths": torch.full((tokens,), length),
    }
    return {str(value.name): every[str(value.name)] for value in graph.inputs}


class BlockExecutor:
    """Executes stages of one graph. Safe to use from several threads.

    Linears multiply in the dtype of the weight they are given, attention in `dtype` (default: that of products); all
    else is float32. A weight of the mapping that is
    not given is an error of the caller's.
    """

    def __init__(self, graph: ir.Graph, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype or product_dtype()
        self._graph = graph
        self._static: Values = {}
        with torch.no_grad():
            interpreter.run_nodes(static_nodes(graph), self._static)
            for name, value in graph.initializers.items():
                if value.const_value is not None and name not in self._static:
                    self._static[name] = interpreter.to_tensor(value.const_value)
        self._bound: dict[ir.Node, interpreter.Bound] = {}

    def run(
        self,
        stage: Stage,
        values: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        sequences: int,
        capture: Capture | None = None,
        tap: Tap | None = None,
        attended: Attended | None = None,
    ) -> Values:
        """Run a stage on the values of some sequences of equal length and return its outputs by name.

        Of the values that pass by the stage, those that are given are returned.

        values:   what the stage reads, `[sequences * length, ...]`
        weights:  the stage's weights by name
        capture:  is shown what the second linears of experts read, row after row of the routing
        tap:      is shown what every weight multiplies, and the products
        attended: is shown what every Attention node is given
        """
        environment: Values = dict(values)
        for node in stage.nodes:
            inputs = [self._lookup(v, environment, weights) for v in node.inputs]
            if attended is not None and node.domain == DOMAIN and node.op_type == "Attention":
                keys, values_ = inputs[1:3]
                assert keys is not None and values_ is not None
                attended(node, keys, values_)
            outputs = self._run_node(node, inputs, sequences, capture, tap)
            for output, result in zip(node.outputs, outputs, strict=False):
                environment[str(output.name)] = result
        return {name: environment[name] for name in stage.outputs if name in environment}

    def _lookup(
        self, value: ir.Value | None, environment: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> Tensor | None:
        if value is None:
            return None
        name = str(value.name)
        for place in (environment, weights, self._static):
            if name in place:
                return place[name]
        raise KeyError(f"value {name!r} is neither computed nor given")

    def _run_node(
        self,
        node: ir.Node,
        inputs: list[Tensor | None],
        sequences: int,
        capture: Capture | None,
        tap: Tap | None,
    ) -> Sequence[Tensor]:
        if node.domain == "" and node.op_type == "Gemm":
            return (_linear(node, inputs, tap),)
        if node.domain == "" and node.op_type == "Gather" and inputs[0] is not None and inputs[0].dim() == 2:
            table, index = inputs[0], inputs[1]
            assert index is not None
            if attribute(node, "axis", 0) == 0:
                return (table[index].to(torch.float32) if table.is_floating_point() else table[index],)
        if node.domain == DOMAIN and node.op_type == "Attention":
            return (_attention(node, inputs, sequences, self._dtype),)
        if node.domain == DOMAIN and node.op_type == "Experts":
            return (_experts(node, inputs, capture, tap),)
        if node.domain == DOMAIN and node.op_type == "ExpertLinear":
            x, ids, weight, bias = (*inputs, None)[:4]
            assert x is not None and ids is not None and weight is not None
            return (_by_expert(x, ids, weight, bias, _tap_of(node, 2, tap)),)
        if node not in self._bound:
            self._bound[node] = interpreter.bind(node)
        return self._bound[node](inputs)


_TapOfWeight = Callable[[int, Tensor, Tensor], None]


def _tap_of(node: ir.Node, place: int, tap: Tap | None) -> _TapOfWeight | None:
    """Return what is shown the products with the weight at a place among the inputs of a node."""
    weight = node.inputs[place]
    if tap is None or weight is None:
        return None
    return functools.partial(tap, str(weight.name))


def _linear(node: ir.Node, inputs: Sequence[Tensor | None], tap: Tap | None) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    assert x is not None and weight is not None
    y = multiply(x, weight if attribute(node, "transB", 0) else weight.T)
    show = _tap_of(node, 1, tap)
    if show is not None:
        show(0, x, y)
    alpha, beta = float(attribute(node, "alpha", 1.0)), float(attribute(node, "beta", 1.0))
    y = y if alpha == 1.0 else alpha * y
    return y if bias is None else y + beta * bias


def _by_expert(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, show: _TapOfWeight | None = None) -> Tensor:
    """Apply to each row of `x [M, K]` the linear of its expert, `ids [M]`: `[M, N]`."""
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids, minlength=weight.shape[0]).tolist()
    parts = []
    for expert, rows in enumerate(torch.split(order, counts)):
        if len(rows):
            read = x[rows]
            part = multiply(read, weight[expert])
            if show is not None:
                show(expert, read, part)
            parts.append(part if bias is None else part + bias[expert])
    y = torch.cat(parts)
    return y[torch.argsort(order)]


def _experts(node: ir.Node, inputs: Sequence[Tensor | None], capture: Capture | None, tap: Tap | None) -> Tensor:
    x, index, factors, gate_up, down, gate_up_bias, down_bias = (*inputs, None, None)[:7]
    assert x is not None and index is not None and factors is not None and gate_up is not None and down is not None
    tokens, k = index.shape
    ids = index.reshape(-1)
    rows = x[:, None, :].expand(tokens, k, x.shape[1]).reshape(tokens * k, x.shape[1])
    gate: dict[str, Any] = {name: a.value for name, a in node.attributes.items()}
    inner = gated_activation(_by_expert(rows, ids, gate_up, gate_up_bias, _tap_of(node, 3, tap)), **gate)
    if capture is not None:
        capture(inner_name(node), inner)
    outer = _by_expert(inner, ids, down, down_bias, _tap_of(node, 4, tap)) * factors.reshape(-1, 1)
    return outer.reshape(tokens, k, outer.shape[1]).sum(1)


def _attention(node: ir.Node, inputs: Sequence[Tensor | None], sequences: int, dtype: torch.dtype) -> Tensor:
    """Attend within each of `sequences` whole sequences of equal length."""
    q, k, v, sinks, slopes = (*inputs, None, None)[:5]
    assert q is not None and k is not None and v is not None
    heads, kv_heads = int(attribute(node, "num_heads")), int(attribute(node, "num_kv_heads"))
    length = q.shape[0] // sequences

    def by_head(x: Tensor, count: int) -> Tensor:
        return x.reshape(sequences, length, count, -1).transpose(1, 2)  # [S, H, L, D]

    q, k, v = by_head(q, heads), by_head(k, kv_heads), by_head(v, kv_heads)
    scale, softcap = float(attribute(node, "scale")), float(attribute(node, "softcap", 0.0))
    window, chunk = int(attribute(node, "window", 0)), int(attribute(node, "chunk", 0))
    hidden_keys = ~visible_keys(torch.arange(length), length, window, chunk)
    if sinks is None and slopes is None and not softcap:
        y = _plain_attention(q * scale, k, v, hidden_keys, dtype)
    else:
        at = torch.arange(length)
        scores = q @ k.repeat_interleave(heads // kv_heads, 1).transpose(-1, -2) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        if slopes is not None:
            scores = scores + slopes[:, None, None] * (at[None, :] - at[:, None])
        scores = scores.masked_fill(hidden_keys, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[None, :, None, None].expand(sequences, -1, length, 1)], dim=-1)
        y = torch.softmax(scores, dim=-1)[..., :length] @ v.repeat_interleave(heads // kv_heads, 1)
    return y.transpose(1, 2).reshape(sequences * length, -1)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, hidden_keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Attend `q [S, H, L, D]`, scaled, over `k [S, G, L, D]`, `v [S, G, L, Dv]`; float32 `[S, H, L, Dv]`.

    In the dtype of products, all query heads of a key head in one product: on processors three times as fast as
    torch's fused attention, forward and backward.
    """
    sequences, heads, length, width = q.shape
    kv_heads = k.shape[1]
    folded = q.to(dtype).reshape(sequences, kv_heads, -1, width)
    scores = (folded @ k.to(dtype).transpose(-1, -2)).reshape(sequences, kv_heads, -1, length, length)
    mask = torch.zeros(length, length, dtype=dtype).masked_fill_(hidden_keys, float("-inf"))
    weights = torch.softmax(scores + mask, dim=-1).reshape(sequences, kv_heads, -1, length)
    return (weights @ v.to(dtype)).reshape(sequences, heads, length, -1).to(torch.float32)
