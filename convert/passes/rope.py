"""Recognize rotary position embeddings by what they compute, and fold their angles into tables.

Models write RoPE (Su et al. 2021) in many ways: rotated halves, even and odd pairs, partial, on split tensors, with
scaled or stretched frequencies. Instead of one pattern per way, the pass finds the region between a projection and
the point where all products with position-dependent values are joined, runs it on random numbers, and accepts it as a
`RotaryEmbedding` only if that operator computes the same. The angles' values are then evaluated for every position.

Where angles also depend on the prompt's length (`longrope`, `dynamic`), they stay computed in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.passes.editing import Editor, attribute, constant_of, dims, drop_dead, is_weight
from inferencex.convert.passes.rope_angles import find_angles, mark_table
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.operators import OPERATORS

_MOVES = {
    "Neg",
    "Slice",
    "Concat",
    "Reshape",
    "Transpose",
    "Split",
    "Unsqueeze",
    "Squeeze",
    "Gather",
    "Identity",
    "Expand",
}
_JOINS = _MOVES | {"Add", "Sub", "Mul"}
_CROSSED = _JOINS | {"RMSNormalization", "LayerNormalization", "Clip"}  # may stand between RoPE and attention
_PROBE_POSITIONS = (0, 1, 2, 5, 11, 23, 40)
_TOLERANCE = 2e-5


@dataclass(frozen=True)
class _Angles:
    """Where to read cosines or sines: `value` flattened to `[T, m]`, columns `::step`, `width / 2` of them."""

    value: ir.Value
    step: int


@dataclass(frozen=True)
class _Fit:
    """A region that is a rotary embedding of `width` of the `head_dim` features of each head."""

    heads: int
    head_dim: int
    width: int
    interleaved: bool
    cos: _Angles
    sin: _Angles


class PositionValues:
    """What depends on the step's positions (and prompt lengths) alone, and how to compute it."""

    def __init__(self, graph: ir.Graph) -> None:
        self.inputs = {str(v.name): v for v in graph.inputs if v.name in ("positions", "prompt_lengths")}
        self.values: set[ir.Value] = set(self.inputs.values())
        self.with_lengths: set[ir.Value] = {v for n, v in self.inputs.items() if n == "prompt_lengths"}
        self.nodes: list[ir.Node] = []
        for node in graph:
            sources = [v for v in node.inputs if v is not None]
            known = [v for v in sources if v in self.values]
            if known and all(v in self.values or (constant_of(v) is not None and not is_weight(v)) for v in sources):
                self.nodes.append(node)
                self.values.update(node.outputs)
                if any(v in self.with_lengths for v in known):
                    self.with_lengths.update(node.outputs)

    def evaluate(self, positions: Tensor) -> dict[str, Tensor]:
        """Compute every such value for `positions [T]`; prompt lengths are taken as 1."""
        environment = {"positions": positions, "prompt_lengths": torch.ones_like(positions)}
        interpreter.run_nodes(self.nodes, environment)
        return environment


class _Region:
    """The nodes between a projection `x` and a joined value `y`."""

    def __init__(self, x: ir.Value, y: ir.Value, positions: PositionValues) -> None:
        self.x, self.y = x, y
        self.nodes: list[ir.Node] = []
        self.frontier: dict[ir.Value, None] = {}
        self.closed = self._collect(y, positions, set())

    def _collect(self, value: ir.Value, positions: PositionValues, seen: set[ir.Value]) -> bool:
        if value is self.x or value in seen:
            return True
        if value in positions.values:
            self.frontier[value] = None
            return True
        if constant_of(value) is not None:
            return True
        node = value.producer()
        if node is None or node.op_type not in _JOINS or node.domain != "" or len(self.nodes) > 64:
            return False
        if not all(v is None or self._collect(v, positions, seen) for v in node.inputs):
            return False
        if node not in self.nodes:
            self.nodes.append(node)
        seen.update(node.outputs)
        return True

    def signature(self) -> tuple[object, ...]:
        """Describe the computation so that equal regions of other layers need no second look."""
        names: dict[ir.Value, object] = {self.x: "x"}
        entries: list[object] = [tuple(dims(self.x)), tuple(dims(self.y))]
        for node in self.nodes:
            inputs: list[object] = []
            for value in node.inputs:
                if value is None or value in names:
                    inputs.append(None if value is None else names[value])
                    continue
                array = constant_of(value)
                inputs.append(("const", array.tobytes(), array.shape) if array is not None else ("angle", value.name))
            attributes = tuple((name, str(a.value)) for name, a in sorted(node.attributes.items()))
            entries.append((node.op_type, tuple(inputs), attributes))
            names.update({v: (len(entries), i) for i, v in enumerate(node.outputs)})
        return tuple(entries)

    def run(self, x: Tensor, angles: dict[str, Tensor]) -> Tensor:
        """Compute `y` from `x` and evaluated position values."""
        environment = {str(v.name): angles[str(v.name)] for v in self.frontier} | {str(self.x.name): x}
        interpreter.run_nodes(self.nodes, environment)
        return environment[str(self.y.name)]


class _RopeFusion:
    def __init__(self, model: ir.Model, max_positions: int) -> None:
        self.graph = model.graph
        self.edit = Editor(model.graph)
        self.positions = PositionValues(model.graph)
        self.max_positions = max_positions
        self.probe = torch.tensor(_PROBE_POSITIONS)
        self.angles = self.positions.evaluate(self.probe) if self.positions.nodes else {}
        self.fits: dict[tuple[object, ...], _Fit | None] = {}
        self.tables: dict[tuple[object, ...], ir.Value] = {}
        self.full: dict[str, Tensor] | None = None
        self.count = 0

    def run(self) -> int:
        for node in list(self.graph):
            if node.domain == DOMAIN and node.op_type == "Attention":
                for value, heads in ((node.inputs[0], "num_heads"), (node.inputs[1], "num_kv_heads")):
                    if value is not None:
                        self._fuse(value, int(attribute(node, heads)))
        drop_dead(self.graph)
        self.graph.sort()
        return self.count

    # --- finding the region -----------------------------------------------------------------------------------

    def _fuse(self, value: ir.Value, heads: int) -> None:
        for y, rotations in self._joins(value):
            for x in self._roots(rotations):
                region = _Region(x, y, self.positions)
                if not region.closed or not region.frontier:
                    continue
                key = (*region.signature(), heads)
                if key not in self.fits:
                    self.fits[key] = self._fit(region, heads)
                fit = self.fits[key]
                if fit is not None:
                    self._emit(region, fit)
                    return

    def _joins(self, value: ir.Value) -> list[tuple[ir.Value, list[ir.Node]]]:
        """Walk back from attention: values that join products with angles, with those, outermost first."""
        below: dict[ir.Value, dict[ir.Node, None]] = {}

        def walk(current: ir.Value) -> dict[ir.Node, None]:
            if current in below:
                return below[current]
            node = current.producer()
            if node is None or node.domain != "" or node.op_type not in _CROSSED or current in self.positions.values:
                return {}
            if node.op_type == "Mul" and any(v in self.positions.values for v in node.inputs):
                return {node: None}
            rotations: dict[ir.Node, None] = {}
            for source in node.inputs:
                if source is not None:
                    rotations.update(walk(source))
            if rotations:
                below[current] = rotations
            return rotations

        walk(value)
        return [(join, list(rotations)) for join, rotations in reversed(below.items())]

    def _roots(self, rotations: list[ir.Node]) -> list[ir.Value]:
        """List the values that all rotated operands are made of, the furthest back first."""
        paths: list[list[ir.Value]] = []
        for node in rotations:
            operand = next(v for v in node.inputs if v is not None and v not in self.positions.values)
            path: dict[ir.Value, None] = {}

            def walk(current: ir.Value, path: dict[ir.Value, None] = path) -> None:
                if current in path:
                    return
                path[current] = None
                producer = current.producer()
                if producer is not None and producer.op_type in _MOVES and producer.domain == "":
                    for source in producer.inputs:
                        if source is not None and constant_of(source) is None:
                            walk(source)

            walk(operand)
            paths.append(list(path))
        shared = [v for v in paths[0] if all(v in path for path in paths)]
        return list(reversed(shared))

    # --- recognizing it ----------------------------------------------------------------------------------------

    def _layouts(self, x: ir.Value, heads: int) -> list[tuple[str, int, int]]:
        """List `(layout, heads, head_dim)` that `x` may have: flat, tokens first, or heads first."""
        shape = dims(x)
        if len(shape) == 2 and shape[0] == -1 and shape[1] > 0:
            return [("flat", h, shape[1] // h) for h in dict.fromkeys((heads, 1)) if shape[1] % h == 0]
        if len(shape) == 3 and shape[0] == -1:
            return [("tokens", shape[1], shape[2])]
        if len(shape) == 3 and shape[1] == -1:
            return [("heads", shape[0], shape[2])]
        return []

    @staticmethod
    def _pack(x: Tensor, layout: str) -> Tensor:
        """Bring `[T, H, D]` into a layout."""
        return x.flatten(1) if layout == "flat" else x.transpose(0, 1) if layout == "heads" else x

    def _unpack(self, y: Tensor, shape: list[int], heads: int) -> Tensor | None:
        if len(shape) == 2 and y.shape[1] % heads == 0:
            return torch.unflatten(y, 1, (heads, -1))
        if len(shape) == 3 and shape[0] == -1:
            return y
        return y.transpose(0, 1) if len(shape) == 3 and shape[1] == -1 else None

    def _fit(self, region: _Region, heads: int) -> _Fit | None:
        generator = torch.Generator().manual_seed(0)
        for layout, count, head_dim in self._layouts(region.x, heads):
            if head_dim % 2:
                continue
            x = torch.randn(len(self.probe), count, head_dim, generator=generator)
            try:
                y = self._unpack(region.run(self._pack(x, layout), self.angles), dims(region.y), count)
            except RuntimeError:
                continue
            if y is None or y.shape != x.shape:
                continue
            changed = (y != x).any(0).any(0).nonzero()
            if not len(changed):
                continue
            last = int(changed.max()) + 1
            for width in dict.fromkeys((last + last % 2, head_dim)):
                for interleaved in (False, True):
                    fit = self._try(region, layout, x, y, width, interleaved)
                    if fit is not None:
                        return fit
        return None

    def _try(self, region: _Region, layout: str, x: Tensor, y: Tensor, width: int, interleaved: bool) -> _Fit | None:
        """Read the angles off the region's answer to unit pairs, and compare the operator with the region."""
        half = width // 2
        probe = torch.zeros_like(x)
        probe[..., 0 : width : 2 if interleaved else 1] = 1.0
        if not interleaved:
            probe[..., half:] = 0.0
        answer = self._unpack(region.run(self._pack(probe, layout), self.angles), dims(region.y), x.shape[1])
        assert answer is not None
        first = answer[:, 0]
        cos, sin = (
            (first[:, 0:width:2], first[:, 1:width:2]) if interleaved else (first[:, :half], first[:, half:width])
        )
        rotated = OPERATORS[("", "RotaryEmbedding")](
            x.transpose(0, 1)[None], cos[None], sin[None], interleaved=int(interleaved), rotary_embedding_dim=width
        )
        expected = rotated[0].transpose(0, 1)
        if (expected - y).abs().max() > _TOLERANCE * max(1.0, float(y.abs().max())):
            return None
        sources = [self._find(region, table) for table in (cos, sin)]
        if sources[0] is None or sources[1] is None:
            return None
        return _Fit(x.shape[1], x.shape[2], width, interleaved, sources[0], sources[1])

    def _find(self, region: _Region, table: Tensor) -> _Angles | None:
        """Find which position value holds `table [T, width / 2]`, and at which columns."""
        half = table.shape[1]
        for value in region.frontier:
            flat = self.angles[str(value.name)]
            if flat.numel() % len(self.probe) or flat.dim() > 3:
                continue
            lead = [d for d in flat.shape if d != 1][:1]
            if lead != [len(self.probe)]:
                continue
            columns = flat.reshape(len(self.probe), -1).to(torch.float32)
            for step in (1, 2):
                picked = columns[:, 0 : half * step : step]
                if picked.shape == table.shape and torch.equal(picked, table):
                    return _Angles(value, step)
        return None

    # --- writing it --------------------------------------------------------------------------------------------

    def _tables(self, fit: _Fit) -> list[ir.Value]:
        """Return the initializers `[max_positions, width / 2]` of cosines and sines."""
        # The cosine of position 0 is the factor that scaled frequencies (YaRN) have in front of both tables.
        factor = float(self._rows(fit.cos, fit.width)[0, 0])
        return [
            self._table("Cos", fit.cos, fit.width, factor),
            self._table("Sin", fit.sin, fit.width, factor),
        ]

    def _table(self, function: Literal["Cos", "Sin"], angles: _Angles, width: int, factor: float) -> ir.Value:
        key = (angles.value.name, angles.step, width)
        if key not in self.tables:
            rows = self._rows(angles, width)
            self.tables[key] = self.edit.constant(np.ascontiguousarray(rows.numpy()), stem="rope_table")
            mark_table(self.tables[key], find_angles(function, rows, factor, self._arguments(function)))
        return self.tables[key]

    def _rows(self, angles: _Angles, width: int) -> Tensor:
        """Return an angle's cosines or sines for every position, float32 `[max_positions, width / 2]`."""
        columns = self._evaluated()[str(angles.value.name)].reshape(self.max_positions, -1)
        return columns[:, 0 : width // 2 * angles.step : angles.step].to(torch.float32).contiguous()

    def _arguments(self, function: str) -> list[Tensor]:
        """Return what the graph takes cosines or sines of, for every position, float32 `[max_positions, m]`."""
        names = [
            str(node.inputs[0].name) for node in self.positions.nodes if node.op_type == function and node.inputs[0]
        ]
        values = [self._evaluated()[name] for name in dict.fromkeys(names)]
        return [
            value.reshape(self.max_positions, -1)
            for value in values
            if value.dtype == torch.float32 and value.numel() % self.max_positions == 0
        ]

    def _evaluated(self) -> dict[str, Tensor]:
        if self.full is None:
            self.full = self.positions.evaluate(torch.arange(self.max_positions))
        return self.full

    def _computed(self, angles: _Angles, width: int) -> ir.Value:
        """Return a value `[1, T, width / 2]` of angles that stay computed in the graph."""
        key = ("computed", angles.value.name, angles.step, width)
        if key not in self.tables:
            edit = self.edit
            total = int(np.prod([d for d in dims(angles.value) if d > 0]))
            flat = edit.node("Reshape", [angles.value, edit.constant([1, -1, total])], stem="angles")
            bounds = [edit.constant([n]) for n in (0, width // 2 * angles.step, -1, angles.step)]
            part = edit.node("Slice", [flat.outputs[0], *bounds], shape=[1, self._tokens(), width // 2], stem="angles")
            source = angles.value.producer()
            assert source is not None
            self.graph.insert_after(source, [flat, part])
            self.tables[key] = part.outputs[0]
        return self.tables[key]

    def _tokens(self) -> int | ir.SymbolicDim:
        (positions,) = [v for v in self.graph.inputs if v.name == "positions"]
        assert positions.shape is not None
        return positions.shape[0]

    def _emit(self, region: _Region, fit: _Fit) -> None:
        edit, x, y = self.edit, region.x, region.y
        anchor = y.producer()
        assert anchor is not None
        tokens, features = self._tokens(), fit.heads * fit.head_dim
        nodes: list[ir.Node] = []

        def add(
            op_type: str, inputs: list[ir.Value | None], shape: list[int | ir.SymbolicDim], **attributes: object
        ) -> ir.Value:
            nodes.append(edit.node(op_type, inputs, attributes, shape=shape, stem="rope"))
            return nodes[-1].outputs[0]

        value = x
        if dims(x)[0] != -1:
            value = add("Transpose", [value], [tokens, fit.heads, fit.head_dim], perm=[1, 0, 2])
        value = add("Reshape", [value, edit.constant([1, -1, features])], [1, tokens, features])
        by_length = fit.cos.value in self.positions.with_lengths or fit.sin.value in self.positions.with_lengths
        if by_length:
            inputs = [value, self._computed(fit.cos, fit.width), self._computed(fit.sin, fit.width)]
        else:
            inputs = [value, *self._tables(fit), self._row()]
        value = add(
            "RotaryEmbedding",
            list(inputs),
            [1, tokens, features],
            interleaved=int(fit.interleaved),
            num_heads=fit.heads,
            rotary_embedding_dim=0 if fit.width == fit.head_dim else fit.width,
        )
        shape = dims(y)
        if len(shape) == 3 and shape[0] != -1:
            value = add(
                "Reshape", [value, edit.constant([-1, fit.heads, fit.head_dim])], [tokens, fit.heads, fit.head_dim]
            )
            value = add("Transpose", [value], list(y.shape or []), perm=[1, 0, 2])
        else:
            value = add("Reshape", [value, edit.constant(shape)], list(y.shape or []))
        self.graph.insert_before(anchor, nodes)
        edit.substitute(y, value)
        self.count += 1

    def _row(self) -> ir.Value:
        """Return positions as `[1, T]`."""
        key = ("positions",)
        if key not in self.tables:
            (positions,) = [v for v in self.graph.inputs if v.name == "positions"]
            node = self.edit.node(
                "Reshape",
                [positions, self.edit.constant([1, -1])],
                shape=[1, self._tokens()],
                dtype=ir.DataType.INT64,
                stem="position_ids",
            )
            self.graph.insert_before(next(iter(self.graph)), [node])
            self.tables[key] = node.outputs[0]
        return self.tables[key]


def fuse_rope(model: ir.Model, *, max_positions: int) -> int:
    """Fuse in place; tables get `max_positions` rows. Returns how many rotary embeddings were found."""
    return _RopeFusion(model, max_positions).run()
