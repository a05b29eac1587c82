"""Execute a recorded program as it is: what the source model computes, with its weights read one at a time.

The program's operators are those transformers ran. It knows nothing of the passes, the packing or the bundle, so a
bundle that agrees with it was converted right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from inferencex.convert.source.parameter import ParameterSource

_LARGE_ELEMENTS = 1 << 26  # a linear with more weights than this runs in slices of its output features


class _Unloaded:
    """A parameter that is read where it is used."""

    def __init__(self, source: ParameterSource) -> None:
        self.source = source

    def load(self) -> Tensor:
        value = self.source.load()
        return value.to(torch.float32) if value.is_floating_point() else value


def _linear(x: Tensor, weight: _Unloaded, bias: Any = None) -> Tensor:
    """Apply a linear whose weight `[N, K]` is too large to hold in float32."""
    rows, width = weight.source.shape
    step = max(1, _LARGE_ELEMENTS // width)
    parts = [
        torch.nn.functional.linear(x, weight.source.rows(start, min(start + step, rows)).to(torch.float32))
        for start in range(0, rows, step)
    ]
    y = torch.cat(parts, dim=-1)
    return y if bias is None else y + (bias.load() if isinstance(bias, _Unloaded) else bias)


def _embedding(weight: _Unloaded, indices: Tensor) -> Tensor:
    """Look rows up in a table, reading only those."""
    found, inverse = torch.unique(indices, return_inverse=True)
    rows = torch.cat([weight.source.rows(int(i), int(i) + 1) for i in found]).to(torch.float32)
    return rows[inverse]


def source_logits(
    program: ExportedProgram,
    prefix: str,
    parameters: Mapping[str, ParameterSource],
    token_ids: Tensor,
) -> Tensor:
    """Run one sequence, int64 `[T]`, and return its logits, float32 `[T, vocab]`.

    `prefix` is what parameter names begin with inside the program. At most one weight is in memory at a time.
    """
    tokens = len(token_ids)
    inputs = {
        "token_ids": token_ids[None],
        "positions": torch.arange(tokens)[None],
        "logit_rows": torch.arange(tokens),
        "prompt_lengths": torch.full((1, tokens), tokens),
    }
    values = _placeholders(program, prefix, parameters, inputs)
    nodes = list(program.graph_module.graph.nodes)
    last_user = {source: node for node in nodes for source in node.all_input_nodes}
    environment: dict[Node, Any] = {}
    with torch.inference_mode():
        for node in nodes:
            if node.op == "placeholder":
                environment[node] = values[node.name]
                continue
            if node.op == "get_attr":
                environment[node] = getattr(program.graph_module, str(node.target))
                continue
            if node.op == "output":
                (logits,) = torch.fx.node.map_arg(node.args[0], lambda n: environment[n])
                result: Tensor = logits[0].to(torch.float32)
                return result
            environment[node] = _call(node, environment)
            for source in node.all_input_nodes:
                if last_user[source] is node:
                    environment.pop(source, None)
    raise ValueError("the program has no output")


def _placeholders(
    program: ExportedProgram,
    prefix: str,
    parameters: Mapping[str, ParameterSource],
    inputs: Mapping[str, Tensor],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind == InputKind.USER_INPUT:
            values[name] = inputs[name]
            continue
        target = str(spec.target)
        source = parameters.get(target.removeprefix(prefix))
        if source is not None:
            values[name] = _Unloaded(source)
        elif spec.kind == InputKind.BUFFER:
            values[name] = dict(program.named_buffers())[target]
        else:
            values[name] = program.constants[target]
    return values


def _call(node: Node, environment: Mapping[Node, Any]) -> Any:
    aten = torch.ops.aten
    args: Any = torch.fx.node.map_arg(node.args, lambda n: environment[n])
    kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: environment[n])
    if node.target is aten.embedding.default and isinstance(args[0], _Unloaded):
        return _embedding(args[0], args[1])
    if node.target is aten.linear.default and isinstance(args[1], _Unloaded):
        shape = args[1].source.shape
        if shape[0] * shape[1] > _LARGE_ELEMENTS:
            return _linear(*args)
    args, kwargs = torch.utils._pytree.tree_map_only(_Unloaded, lambda u: u.load(), (args, kwargs))
    return node.target(*args, **kwargs)  # type: ignore[operator]
