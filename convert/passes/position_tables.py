"""Refuse sequences longer than the tables of positions that a model holds."""

from __future__ import annotations

import onnx_ir as ir
import torch

from inferencex.convert.passes.editing import attribute, dims
from inferencex.convert.passes.rope import PositionValues
from inferencex.formats.errors import OptionError
from inferencex.runtime.backends.reference import interpreter


def check_position_tables(model: ir.Model, *, max_positions: int) -> None:
    """Check that every table that is read by position, learned or computed, has a row for the last position.

    Raises OptionError naming the table and the longest sequence it serves.
    """
    positions = PositionValues(model.graph)
    of_positions = set(positions.nodes)
    last = torch.tensor([max_positions - 1])
    values = {"positions": last, "prompt_lengths": torch.full_like(last, max_positions)}
    for node in model.graph:
        table, index = node.inputs[:2] if node.op_type == "Gather" else (None, None)
        if table is not None and index in positions.values and int(attribute(node, "axis", 0)) == 0:
            rows, furthest = dims(table)[0], int(values[str(index.name)].max())
            if 0 <= rows <= furthest:
                raise OptionError(
                    f"sequences of {max_positions} tokens need row {furthest} of {table.name}, which has {rows} rows; "
                    f"give --max-model-len {max_positions - furthest + rows - 1} or less"
                )
        if node in of_positions:
            interpreter.run_nodes([node], values)
