"""Make an exported program ready for translation: no asserts, no no-ops, static shapes, explicit positions.

An exported program records what PyTorch did, including casts to the dtype a tensor already has and shapes computed
from the number of tokens. Removing them here, where every value's shape and dtype is known, is cheaper than after
translation and spares the decomposition of the whole program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from inferencex.convert.capture import ops
from inferencex.formats.errors import CaptureError

_aten = torch.ops.aten
_COPIES = {
    _aten.to.dtype,
    _aten.to.device,
    _aten.to.dtype_layout,
    _aten.to.other,
    _aten.type_as.default,
    _aten._to_copy.default,
    _aten.contiguous.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.detach_.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
    _aten.dropout.default,
    _aten.dropout_.default,
}
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.view_as.default}
_ARANGES = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_ONES = {_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default}
_INDEXING = {
    _aten._to_copy.default,
    _aten.embedding.default,
    _aten.gather.default,
    _aten.index.Tensor,
    _aten.index_select.default,
    _aten.scatter.src,
    _aten.scatter.value,
}
_ASSERTS = {
    _aten._assert_tensor_metadata.default,
    _aten._assert_async.msg,
    _aten._assert_scalar.default,
    _aten.sym_constrain_range_for_size.default,
    _aten.sym_constrain_range.default,
}


def static_shape(shape: Any) -> list[int] | None:
    """Write a shape with at most one symbolic dimension as integers, -1 for the symbolic one; else None."""
    dims = [dim if isinstance(dim, int) else -1 for dim in shape]
    return dims if dims.count(-1) <= 1 else None


def is_mutation(node: Node) -> bool:
    """Tell whether a node writes to one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _all_ones(value: Any) -> bool:
    """Tell whether a node is a tensor filled with ones, possibly cast."""
    while isinstance(value, Node) and value.op == "call_function":
        if value.target in _ONES:
            return True
        if value.target in (_aten.full.default, _aten.full_like.default, _aten.new_full.default):
            return bool(value.args[-1] == 1 or value.args[1] == 1)
        if value.target not in _COPIES:
            return False
        value = value.args[0]
    return False


def mixes_dtypes(program: torch.export.ExportedProgram) -> bool:
    """Tell whether some operator reads numbers of different dtypes, so that translation must insert casts."""
    for node in program.graph_module.graph.nodes:
        if (
            node.op != "call_function"
            or node.target in _INDEXING
            or getattr(node.target, "namespace", "") == "inferencex"
        ):
            continue
        values = [source.meta.get("val") for source in node.all_input_nodes]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype != torch.bool}
        numbers = [argument for argument in node.args if isinstance(argument, (int, float)) or _is_symbolic(argument)]
        integral = not any(dtype.is_floating_point for dtype in dtypes)
        result = node.meta.get("val")
        if len(dtypes) > 1 or (dtypes and numbers and integral and _is_floating(result)):
            return True
    return False


def _is_symbolic(argument: Any) -> bool:
    return isinstance(argument, Node) and not isinstance(argument.meta.get("val"), torch.Tensor)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check_asserts(program: torch.export.ExportedProgram, max_tokens: int) -> None:
    """Judge the conditions on the number of tokens under which `program` was recorded.

    Some are artefacts of reasoning about shapes and always hold; others mean that the model's code takes another
    branch for other lengths, so that the recorded one would be wrong there. Raises CaptureError for the latter,
    naming the first length that fails.
    """
    lengths = [n for n in (*range(1, 130), 255, 256, 257, 1000, 1023, 1024, 4096, max_tokens) if n < max_tokens]
    for node in program.graph_module.graph.nodes:
        if node.op != "call_function" or node.target is not _aten._assert_scalar.default:
            continue
        condition = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
        if not isinstance(condition, torch.SymBool):
            continue
        expression = condition.node.expr
        for length in lengths:
            if not expression.subs({symbol: length for symbol in expression.free_symbols}):
                raise CaptureError(
                    f"the model's code depends on the number of tokens: it was recorded for {expression}, which is "
                    f"false for {length} tokens"
                )


class _Tidier:
    def __init__(self, program: torch.export.ExportedProgram, positions: str) -> None:
        self.program = program
        self.graph = program.graph_module.graph
        self.positions = next(node for node in self.graph.nodes if node.op == "placeholder" and node.name == positions)
        self.tokens = self.positions.meta["val"].shape[1]

    def run(self) -> None:
        self._fold_scalars()
        for node in list(self.graph.nodes):
            if node.op == "call_function":
                self._visit(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.program.graph_module.recompile()

    def _fold_scalars(self) -> None:
        """Compute scalars that depend on constants alone; some come from functions that ONNX does not have."""
        known: dict[Node, torch.Tensor] = {}
        for spec in self.program.graph_signature.input_specs:
            constant = self.program.constants.get(str(spec.target))
            if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(constant, torch.Tensor) and constant.dim() == 0:
                node = next(n for n in self.graph.nodes if n.name == spec.arg.name)
                known[node] = constant
        for node in list(self.graph.nodes):
            value = node.meta.get("val")
            sources = node.all_input_nodes
            if node.op != "call_function" or not sources or not all(source in known for source in sources):
                continue
            mutates = is_mutation(node) and node.target not in _COPIES
            if mutates or not isinstance(value, torch.Tensor) or value.dim():
                continue
            known[node] = node.target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
            with self.graph.inserting_before(node):
                scalar = self.graph.call_function(
                    _aten.scalar_tensor.default, (known[node].item(),), {"dtype": known[node].dtype}
                )
            scalar.meta = dict(node.meta)
            known[scalar] = known[node]
            self._replace(node, scalar)

    def _visit(self, node: Node) -> None:
        if node.target is ops.LINEAR:
            node.target, node.args = _aten.linear.default, tuple(a for a in node.args if a is not None)
        target = node.target
        if any(user.op == "output" for user in node.users):
            if target in _COPIES:  # the program's signature refers to the node by name, so it stays as a copy
                node.target, node.kwargs = _aten._to_copy.default, {"dtype": node.meta["val"].dtype}
                node.args = node.args[:1]
            return
        if target in _ASSERTS or (not node.users and getattr(target, "__name__", "") in {"_assert_scalar", "ge", "le"}):
            self.graph.erase_node(node)
        elif target in _COPIES:
            self._drop_copy(node)
        elif target in _RESHAPES:
            self._fix_reshape(node)
        elif target is _aten.expand.default:
            self._fix_expand(node)
        elif target in _ARANGES:
            self._arange_to_positions(node)
        elif target is _aten.cumsum.default and _all_ones(node.args[0]):
            self._count_to_positions(node)

    def _replace(self, node: Node, by: Node) -> None:
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def _drop_copy(self, node: Node) -> None:
        source = node.args[0]
        if not isinstance(source, Node):
            return
        wanted = node.meta["val"].dtype
        if source.meta["val"].dtype == wanted:
            self._replace(node, source)
        elif node.target is not _aten._to_copy.default:
            with self.graph.inserting_before(node):
                cast = self.graph.call_function(_aten._to_copy.default, (source,), {"dtype": wanted})
            cast.meta = dict(node.meta)
            self._replace(node, cast)

    def _fix_reshape(self, node: Node) -> None:
        shape = static_shape(node.meta["val"].shape)
        source = node.args[0]
        if not isinstance(source, Node):
            return
        if shape is not None and shape == static_shape(source.meta["val"].shape):
            self._replace(node, source)
        elif shape is not None:
            node.target = _aten.reshape.default  # a view may be impossible where the original was a copy
            node.args = (source, shape)

    def _fix_expand(self, node: Node) -> None:
        source = node.args[0]
        if not isinstance(source, Node):
            return
        before, after = source.meta["val"].shape, node.meta["val"].shape
        if len(before) == len(after) and all(self._same(a, b) for a, b in zip(before, after, strict=True)):
            self._replace(node, source)

    @staticmethod
    def _same(a: Any, b: Any) -> bool:
        return str(a) == str(b)

    def _is_tokens(self, size: Any) -> bool:
        value = size.meta["val"] if isinstance(size, Node) else size
        return self._same(value, self.tokens) and not isinstance(value, int)

    def _arange_to_positions(self, node: Node) -> None:
        bounds = (0, *node.args, 1) if node.target is _aten.arange.default else (*node.args, 1)
        start, stop, step = bounds[:3]
        if not self._is_tokens(stop):
            return
        if start != 0 or step != 1:
            raise CaptureError(
                f"a range over tokens starts at {start} with step {step}; only plain positions are supported"
            )
        dtype = node.meta["val"].dtype
        with self.graph.inserting_before(node):
            row = self.graph.call_function(_aten.select.int, (self.positions, 0, 0))
            row.meta = {**node.meta, "val": self.positions.meta["val"][0]}
            if dtype != torch.int64:
                cast = self.graph.call_function(_aten._to_copy.default, (row,), {"dtype": dtype})
                cast.meta = dict(node.meta)
                row = cast
        self._replace(node, row)

    def _count_to_positions(self, node: Node) -> None:
        if not self._is_tokens(node.meta["val"].shape[-1]) or node.meta["val"].dim() != 2:
            return
        with self.graph.inserting_before(node):
            count = self.graph.call_function(_aten.add.Tensor, (self.positions, 1))
            count.meta = {**node.meta, "val": self.positions.meta["val"]}
        if node.meta["val"].dtype != torch.int64:
            with self.graph.inserting_before(node):
                cast = self.graph.call_function(_aten._to_copy.default, (count,), {"dtype": node.meta["val"].dtype})
            cast.meta = dict(node.meta)
            count = cast
        self._replace(node, count)


def tidy(program: torch.export.ExportedProgram, *, positions: str) -> None:
    """Clean `program` in place; `positions` names its input of token positions, int64 `[1, T]`.

    Ranges over the tokens and running counts of them become `positions`: in a ragged batch the index of a row says
    nothing about where its token stands in its sequence.
    """
    _Tidier(program, positions).run()
