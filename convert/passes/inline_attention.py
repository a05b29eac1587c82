"""Recognize attention that a model computes itself: softmax of scaled products plus a mask and perhaps ALiBi.

The score is taken apart into `multiplier * (q @ k^T) + addends`. The addends may depend on positions alone; they are
evaluated for a short sequence and must amount to a causal mask, plus for each head a slope times the key's position
(softmax does not see what is constant along a row). What does not fit stays as it is, and is refused later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.capture import ops
from inferencex.convert.capture.translations import CAPTURE_DOMAIN
from inferencex.convert.passes.editing import (
    Editor,
    attribute,
    dims,
    drop_dead,
    is_weight,
    producer,
    rank,
    scalar_of,
    shape_of,
    sole_user,
)
from inferencex.convert.passes.masks import mask_of
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.reference import interpreter

_TRANSPARENT = {"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze"}
_PROBE_TOKENS = 45
_LARGEST_TABLE = 4096  # masks that models hold as tables are read whole up to this many tokens
_HIDDEN = -9e3  # an addend below this hides a key
_TOLERANCE = 1e-4


@dataclass
class _Score:
    """`multiplier * product + sum of factor * addend`."""

    product: ir.Node
    multiplier: float = 1.0
    addends: list[tuple[ir.Value, float]] = field(default_factory=list)
    chosen: list[tuple[ir.Value, bool]] = field(default_factory=list)  # conditions, and whether true shows the key
    factors: list[ir.Value] = field(default_factory=list)  # 0 where a large negative addend hides the key, else 1


def _take_apart(value: ir.Value | None) -> _Score | None:
    """Find the product of queries and keys under additions and scalings."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    if node.op_type == "MatMul":
        return _Score(node) if not any(is_weight(v) for v in node.inputs) and rank(node.outputs[0]) >= 3 else None
    if node.op_type in _TRANSPARENT:
        return _take_apart(node.inputs[0])
    if node.op_type == "Max" and (scalar_of(node.inputs[1]) or 0.0) < _HIDDEN:
        return _take_apart(node.inputs[0])  # keeps hidden scores finite
    if node.op_type in ("Mul", "Div"):
        for index in (0, 1) if node.op_type == "Mul" else (0,):
            factor = scalar_of(node.inputs[1 - index])
            inner = _take_apart(node.inputs[index]) if factor is not None else None
            if inner is not None and factor is not None:
                factor = factor if node.op_type == "Mul" else 1.0 / factor
                inner.multiplier *= factor
                inner.addends = [(v, f * factor) for v, f in inner.addends]
                return inner if not inner.chosen else None
        if node.op_type == "Mul":
            for index in (0, 1):
                inner, factor_value = _take_apart(node.inputs[index]), node.inputs[1 - index]
                if inner is not None and factor_value is not None and not inner.addends and not inner.chosen:
                    inner.factors.append(factor_value)
                    return inner
    if node.op_type in ("Add", "Sub"):
        for index in (0, 1) if node.op_type == "Add" else (0,):
            inner, other = _take_apart(node.inputs[index]), node.inputs[1 - index]
            if inner is not None and other is not None and _take_apart(other) is None:
                inner.addends.append((other, 1.0 if node.op_type == "Add" else -1.0))
                return inner
    if node.op_type == "Where" and node.inputs[0] is not None:
        for index in (1, 2):
            inner, hidden = _take_apart(node.inputs[index]), scalar_of(node.inputs[3 - index])
            if inner is not None and hidden is not None and hidden < _HIDDEN:
                inner.chosen.append((node.inputs[0], index == 1))
                return inner
    return None


class _Positional:
    """Evaluates values that depend on positions and the number of tokens alone."""

    def __init__(self, graph: ir.Graph, tokens: int) -> None:
        self.inputs = {"positions": torch.arange(tokens)[None], "prompt_lengths": torch.full((1, tokens), tokens)}
        self.tokens = tokens

    def evaluate(self, value: ir.Value) -> Tensor | None:
        nodes: list[ir.Node] = []
        return self._run(nodes, value) if self._collect(value, nodes, set()) else None

    def _collect(self, value: ir.Value | None, nodes: list[ir.Node], seen: set[ir.Value]) -> bool:
        if value is None or value in seen or value.name in self.inputs:
            return True
        if is_weight(value):
            return False
        seen.add(value)
        node = value.producer()
        if node is None:
            return value.const_value is not None
        if node.op_type != "Shape" and not all(self._collect(v, nodes, seen) for v in node.inputs):
            return False
        if node not in nodes:
            nodes.append(node)
        return len(nodes) < 200

    def _run(self, nodes: list[ir.Node], value: ir.Value) -> Tensor | None:
        environment: dict[str, Tensor] = dict(self.inputs)

        def special(node: ir.Node, inputs: list[Tensor | None], attributes: dict[str, Any]) -> Any:
            if node.domain == CAPTURE_DOMAIN and node.op_type == "CausalMask":
                return ops.causal_mask(inputs[0], attributes["window"], attributes["chunk"])
            return None

        for node in nodes:
            if node.op_type == "Shape" and node.inputs[0] is not None:
                shape = [d if d > 0 else self.tokens for d in dims(node.inputs[0])]
                start, end = attribute(node, "start", 0), attribute(node, "end", None)
                environment[str(node.outputs[0].name)] = torch.tensor(shape[start:end])
                continue
            try:
                interpreter.run_nodes([node], environment, special)
            except (RuntimeError, KeyError, BackendError):
                return None
        return environment[str(value.name)]


def _bias(score: _Score, positional: _Positional, heads: int) -> Tensor | None:
    """Evaluate all addends, float32 `[H, T, T]`, hidden keys at -inf; None when one depends on more than positions."""
    tokens = positional.tokens
    total = torch.zeros(heads, tokens, tokens)
    for addend, factor in score.addends:
        value = positional.evaluate(addend)
        if value is None:
            return None
        value = value.to(torch.float32) * factor
        try:
            total = total + value.reshape((-1, *value.shape[-2:])).expand(heads, tokens, tokens)
        except RuntimeError:
            return None
    for condition, keeps_if_true in score.chosen:
        value = positional.evaluate(condition)
        if value is None:
            return None
        keep = value.to(torch.bool) if keeps_if_true else ~value.to(torch.bool)
        try:
            keep = keep.reshape((-1, *keep.shape[-2:])).expand(heads, tokens, tokens)
        except RuntimeError:
            return None
        total = total.masked_fill(~keep, float("-inf"))
    for factor_value in score.factors:
        value = positional.evaluate(factor_value)
        if value is None:
            return None
        keeps = value.reshape((-1, *value.shape[-2:])).expand(heads, tokens, tokens)
        neutral = (keeps == 1) & (total == 0)
        if not bool((neutral | ((keeps == 0) & (total < _HIDDEN))).all()):
            return None
    return total.masked_fill(total < _HIDDEN, float("-inf"))


def _hidden_by_addend(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda row: row * factor < _HIDDEN


def _hidden_by_choice(keeps_if_true: bool) -> Callable[[Tensor], Tensor]:
    return lambda row: row.to(torch.bool) != keeps_if_true


def _reach(score: _Score, positional: _Positional) -> int | None:
    """Count the keys that the last query sees, opaque masks aside; None when that depends on more than positions."""
    hidden = torch.zeros(positional.tokens, dtype=torch.bool)
    rows: list[tuple[ir.Value, Callable[[Tensor], Tensor]]] = []
    for addend, factor in score.addends:
        if mask_of(addend) is None:
            rows.append((addend, _hidden_by_addend(factor)))
    for condition, keeps_if_true in score.chosen:
        rows.append((condition, _hidden_by_choice(keeps_if_true)))
    rows += [(factor_value, lambda row: row == 0) for factor_value in score.factors]
    for value, hides in rows:
        table = positional.evaluate(value)
        if table is None:
            return None
        hidden |= hides(table.reshape((-1, *table.shape[-2:]))[0, -1]).expand(positional.tokens)
    return positional.tokens - int(hidden.sum())


def _describe(score: _Score, bias: Tensor, own_window: int) -> tuple[int, int, Tensor | None] | None:
    """Describe a bias as `(window, chunk, slopes [H] or None)`, or None when it is something else.

    `own_window` is the window of a mask that the model spells out, 0 for none.
    """
    masks = [mask for mask in (mask_of(addend) for addend, _ in score.addends) if mask is not None]
    windows = [own_window, *(int(attribute(mask, "window")) for mask in masks)]
    chunks = {int(attribute(mask, "chunk")) for mask in masks} - {0}
    if min(windows) < 0 or len(chunks) > 1:
        return None
    window, chunk = min((size for size in windows if size), default=0), max(chunks, default=0)
    tokens = bias.shape[-1]
    visible = ops.visible(torch.arange(tokens), window, chunk)
    if not torch.equal(torch.isfinite(bias), visible.expand_as(bias)):
        return None
    last = bias[:, -1]
    first = tokens - int(visible[-1].sum())
    slopes = (last[:, -1] - last[:, first]) / max(tokens - 1 - first, 1)
    line = slopes[:, None, None] * torch.arange(tokens)
    rest = (bias - line).masked_fill(~visible, 0.0)
    level = rest.diagonal(dim1=1, dim2=2)[:, :, None]
    if ((rest - level).masked_fill(~visible, 0.0).abs() > _TOLERANCE * (1 + line.abs())).any():
        return None
    return window, chunk, slopes if bool((slopes != 0).any()) else None


class _Rewriter:
    def __init__(self, model: ir.Model, context: int) -> None:
        self.graph = model.graph
        self.context = context
        self.edit = Editor(model.graph)
        self.positional = _Positional(model.graph, _PROBE_TOKENS)
        self.far = _Positional(model.graph, min(max(context, 1), _LARGEST_TABLE))  # windows may be wide
        self.count = 0

    def run(self) -> int:
        for node in list(self.graph):
            if node.op_type == "Softmax" and int(attribute(node, "axis", -1)) in (-1, rank(node.outputs[0]) - 1):
                self._visit(node)
        drop_dead(self.graph)
        if self.count:
            self.graph.sort()
        return self.count

    def _visit(self, softmax: ir.Node) -> None:
        score = _take_apart(softmax.inputs[0])
        user = sole_user(softmax.outputs[0])
        while user is not None and user.op_type in _TRANSPARENT:
            user = sole_user(user.outputs[0])
        if score is None or user is None or user.op_type != "MatMul" or producer(user.inputs[1], "Softmax"):
            return
        q, k = score.product.inputs
        v = user.inputs[1]
        if q is None or k is None or v is None or self._heads(q) is None or self._heads(v) is None:
            return
        heads = self._heads(q) or 1
        bias = _bias(score, self.positional, heads)
        reach = _reach(score, self.far) if bias is not None else None
        if bias is None or reach is None:
            return
        found = _describe(score, bias, reach if reach < self.far.tokens else 0)
        if found is None:
            return
        window, chunk, slopes = found
        self._emit(user, q, k, v, score.multiplier, window, chunk, slopes)

    @staticmethod
    def _heads(value: ir.Value) -> int | None:
        """The number of heads of `[1, H, T, D]` or `[H, T, D]`."""
        shape = dims(value)
        if len(shape) == 4 and shape[0] == 1 and shape[1] > 0:
            return shape[1]
        return shape[0] if len(shape) == 3 and shape[0] > 0 else None

    def _rows(self, anchor: ir.Node, value: ir.Value, axis_of_tokens: int) -> tuple[ir.Value, int]:
        """Bring heads of rows, tokens on `axis_of_tokens` (-2 or -1), into `[1, T, H * D]`."""
        edit, shape, heads = self.edit, dims(value), self._heads(value) or 1
        lead = [0] if len(shape) == 4 else []
        h, t = len(lead), len(shape) + axis_of_tokens
        d = len(shape) - 1 if axis_of_tokens == -2 else len(shape) - 2
        features = heads * shape[d]
        sizes, perm = shape_of(value), [*lead, t, h, d]
        moved = edit.node("Transpose", [value], {"perm": perm}, shape=[sizes[i] for i in perm])
        flat = edit.node("Reshape", [moved.outputs[0], edit.constant([1, -1, features])], shape=[1, sizes[t], features])
        return edit.before(anchor, moved, flat), features

    def _emit(
        self,
        anchor: ir.Node,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        scale: float,
        window: int,
        chunk: int,
        slopes: Tensor | None,
    ) -> None:
        edit, output = self.edit, anchor.outputs[0]
        rows = [self._rows(anchor, value, axis)[0] for value, axis in ((q, -2), (k, -1), (v, -2))]
        heads, kv_heads, width = self._heads(q) or 1, self._heads(k) or 1, dims(v)[-1]
        slope_input = (
            None if slopes is None else edit.constant(np.ascontiguousarray(slopes.numpy()), stem="alibi_slopes")
        )
        attributes = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "scale": float(scale),
            "window": window,
            "chunk": chunk,
            "softcap": 0.0,
        }
        tokens = shape_of(q)[-2]
        attention = edit.node(
            "Attention",
            [*rows, None, slope_input],
            attributes,
            domain=DOMAIN,
            shape=[1, tokens, heads * width],
            stem="attention",
        )
        split = edit.node(
            "Reshape", [attention.outputs[0], edit.constant([1, -1, heads, width])], shape=[1, tokens, heads, width]
        )
        nodes = [
            attention,
            split,
            edit.node("Transpose", [split.outputs[0]], {"perm": [0, 2, 1, 3]}, shape=[1, heads, tokens, width]),
        ]
        if rank(output) == 3:
            nodes.append(
                edit.node("Reshape", [nodes[-1].outputs[0], edit.constant([heads, -1, width])], shape=output.shape)
            )
        edit.substitute(output, edit.before(anchor, *nodes))
        self.count += 1


def recognize_attention(model: ir.Model, *, context: int) -> int:
    """Rewrite in place, for sequences of up to `context` tokens; returns how many layers were recognized."""
    return _Rewriter(model, context).run()
