"""Rewrite complex arithmetic of an exported program as arithmetic on pairs of reals.

Some models rotate queries and keys as complex numbers. ONNX operators have no complex tensors, so a complex value
`[...]` becomes a real one `[..., 2]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from inferencex.formats.errors import CaptureError

_aten = torch.ops.aten
_SAME = {_aten.view_as_complex.default, _aten.view_as_real.default, _aten.view_as_real_copy.default}


def _is_complex(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_complex()


def _axis(node: Node, dim: int) -> int:
    """Shift a negative axis of a complex value past the pair."""
    return dim if dim >= 0 else dim - 1


class _Builder:
    """Inserts real operations before one node, each with the meta value it computes."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)

        def value(arg: Any) -> Any:
            if isinstance(arg, Node):
                return arg.meta["val"]
            return [value(a) for a in arg] if isinstance(arg, (list, tuple)) else arg

        with value_mode(self.before):
            node.meta = {**self.before.meta, "val": target(*[value(a) for a in args], **kwargs)}
        return node

    def pair(self, real: Node, imaginary: Node) -> Node:
        return self.call(_aten.stack.default, [real, imaginary], -1)

    def part(self, value: Node, index: int) -> Node:
        return self.call(_aten.select.int, value, -1, index)


def value_mode(node: Node) -> Any:
    """Return the fake tensor mode that a program's meta values belong to."""
    fake = node.meta["val"]
    return fake.fake_mode


def make_real(program: torch.export.ExportedProgram) -> None:
    """Rewrite `program` in place. Raises CaptureError for a complex operation that has no rule."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            continue
        sources = [a for a in node.args if isinstance(a, Node)]
        touches = node.target in _SAME or _is_complex(node) or any(source.meta.get("was_complex") for source in sources)
        if touches:
            new = _rewrite(graph, node)
            new.meta["was_complex"] = _is_complex(node)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    program.graph_module.recompile()


def _rewrite(graph: Graph, node: Node) -> Node:
    build = _Builder(graph, node)
    args: list[Any] = list(node.args)
    match node.target:
        case target if target in _SAME:
            return args[0]  # type: ignore[no-any-return]
        case _aten.polar.default:
            size, angle = args
            real = build.call(_aten.mul.Tensor, size, build.call(_aten.cos.default, angle))
            return build.pair(real, build.call(_aten.mul.Tensor, size, build.call(_aten.sin.default, angle)))
        case _aten.unsqueeze.default:
            return build.call(node.target, args[0], _axis(node, args[1]))
        case _aten.mul.Tensor if all(isinstance(a, Node) and a.meta.get("was_complex") for a in args):
            (a, b), (c, d) = ((build.part(v, 0), build.part(v, 1)) for v in args)
            real = build.call(_aten.sub.Tensor, build.call(_aten.mul.Tensor, a, c), build.call(_aten.mul.Tensor, b, d))
            imaginary = build.call(
                _aten.add.Tensor, build.call(_aten.mul.Tensor, a, d), build.call(_aten.mul.Tensor, b, c)
            )
            return build.pair(real, imaginary)
        case _aten.mul.Tensor if not all(isinstance(a, Node) and a.meta.get("was_complex") for a in args):
            pair, factor = args if args[0].meta.get("was_complex") else reversed(args)
            if isinstance(factor, Node):
                factor = build.call(_aten.unsqueeze.default, factor, -1)
            return build.call(_aten.mul.Tensor, pair, factor)
        case _aten.transpose.int:
            return build.call(node.target, args[0], _axis(node, args[1]), _axis(node, args[2]))
        case (
            _aten.to.dtype | _aten._to_copy.default | _aten.to.device | _aten.contiguous.default | _aten.to.dtype_layout
        ):
            return args[0]  # type: ignore[no-any-return]
        case _aten.slice.Tensor:
            return build.call(node.target, args[0], _axis(node, args[1] if len(args) > 1 else 0), *args[2:])
    raise CaptureError(f"complex arithmetic by {node.target} is not supported")
