"""Store tables of angles as what they are computed from, which takes a thousandth of their room.

A table of RoPE is `factor * cos(position * frequency)` for every position and frequency. Where one is exactly that, the
graph gets the frequencies and standard operators that compute the table; nothing in them depends on a step, so that
backends and other tools evaluate them once. This comes after the last folding of constants, which would undo it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.passes.editing import Editor, drop_dead

SMALLEST_TABLE = 1 << 10
"""Bytes; a smaller table stays as it is, for the nodes would take as much."""

_KEY = "inferencex.rope_angles"
_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class RopeAngles:
    """What a table `[positions, width / 2]` is computed from: `factor * function(position * frequencies)`, float32."""

    function: Literal["Cos", "Sin"]
    frequencies: NDArray[np.float32]
    factor: float

    def table(self, rows: int) -> Tensor:
        """Compute the first `rows` rows."""
        positions = torch.arange(rows).to(torch.float32)[:, None]
        angles = positions * torch.from_numpy(self.frequencies)
        table = angles.cos() if self.function == "Cos" else angles.sin()
        return table if self.factor == 1.0 else table * torch.tensor(self.factor, dtype=torch.float32)


def find_angles(
    function: Literal["Cos", "Sin"], table: Tensor, factor: float, candidates: Sequence[Tensor]
) -> RopeAngles | None:
    """Return what a table is computed from, or None where it is not of this form.

    table:       float32 `[positions, width / 2]`
    candidates:  what the graph takes the cosines or sines of, float32 `[positions, m]`; the columns of the table
                 are its first ones, or every second one
    """
    half = table.shape[1]
    for angles in candidates:
        for step in (1, 2):
            columns = angles[:, 0 : half * step : step]
            if columns.shape != table.shape or len(columns) < 2:
                continue
            found = RopeAngles(function, columns[1:2].contiguous().numpy(), factor)
            if (found.table(len(table)) - table).abs().max() <= _TOLERANCE * max(1.0, abs(factor)):
                return found
    return None


def mark_table(value: ir.Value, angles: RopeAngles | None) -> None:
    """Note on a table's initializer what it is computed from."""
    if angles is not None:
        value.meta[_KEY] = angles


def store_angles(model: ir.Model) -> int:
    """Replace marked tables in place by the nodes that compute them; returns how many."""
    return _AngleStore(model.graph).run()


class _AngleStore:
    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.edit = Editor(graph)
        self.nodes: list[ir.Node] = []
        self.columns: dict[int, ir.Value] = {}
        self.angles: dict[tuple[int, bytes], ir.Value] = {}

    def run(self) -> int:
        count = 0
        for value in list(self.graph.initializers.values()):
            marked = value.meta.get(_KEY)
            if not isinstance(marked, RopeAngles) or value.const_value is None:
                continue
            if value.const_value.nbytes > SMALLEST_TABLE:
                value.replace_all_uses_with(self._computed(marked, value.const_value.shape[0]))
                count += 1
        if count:
            self.graph.insert_before(next(iter(self.graph)), self.nodes)
            drop_dead(self.graph)
        return count

    def _computed(self, angles: RopeAngles, rows: int | Any) -> ir.Value:
        rows, half = int(rows), angles.frequencies.shape[1]
        key = (rows, angles.frequencies.tobytes())
        if key not in self.angles:
            frequencies = self.edit.constant(angles.frequencies, stem="rope_frequencies")
            self.angles[key] = self._add("Mul", [self._column(rows), frequencies], [rows, half])
        table = self._add(angles.function, [self.angles[key]], [rows, half])
        if angles.factor == 1.0:
            return table
        return self._add("Mul", [table, self.edit.constant(float(angles.factor))], [rows, half])

    def _column(self, rows: int) -> ir.Value:
        """Return the positions as float32 `[rows, 1]`."""
        if rows not in self.columns:
            bounds = [self.edit.constant(np.asarray(bound, np.int64)) for bound in (0, rows, 1)]
            positions = self._add("Range", bounds, [rows], dtype=ir.DataType.INT64)
            floats = self._add("Cast", [positions], [rows], to=int(ir.DataType.FLOAT))
            self.columns[rows] = self._add("Unsqueeze", [floats, self.edit.constant([1])], [rows, 1])
        return self.columns[rows]

    def _add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        shape: list[int],
        *,
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: object,
    ) -> ir.Value:
        self.nodes.append(self.edit.node(op_type, inputs, attributes, shape=shape, dtype=dtype, stem="rope"))
        return self.nodes[-1].outputs[0]
