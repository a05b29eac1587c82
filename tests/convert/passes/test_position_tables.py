from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from inferencex.convert.passes.position_tables import check_position_tables
from inferencex.formats.errors import OptionError
from tests.convert.passes.graphs import Builder

WIDTH, ROWS = 4, 20


def _model(learned: bool, offset: int = 0) -> ir.Model:
    """An embedding of positions, `offset` rows into its table."""
    b = Builder()
    index = b.input("positions", ["tokens"], dtype=ir.DataType.INT64)
    if offset:
        index = b.node("Add", index, b.constant(np.array(offset)), shape=["tokens"], dtype=ir.DataType.INT64)
    table = b.parameter("table", ROWS, WIDTH) if learned else b.constant(np.zeros((ROWS, WIDTH), np.float32))
    return b.model(b.node("Gather", table, index, shape=["tokens", WIDTH]))


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("offset", [0, 2])
def test_the_longest_sequence_that_fits_is_named_and_accepted(learned: bool, offset: int) -> None:
    model = _model(learned, offset)
    for asked in (ROWS - offset + 1, 1000):
        with pytest.raises(OptionError, match=f"has {ROWS} rows") as caught:
            check_position_tables(model, max_positions=asked)
        (named,) = re.findall(r"--max-model-len (\d+) or less", str(caught.value))
        assert int(named) == ROWS - offset
    check_position_tables(model, max_positions=ROWS - offset)


def test_tables_read_by_token_are_not_tables_of_positions() -> None:
    b = Builder()
    b.input("positions", ["tokens"], dtype=ir.DataType.INT64)
    ids = b.input("token_ids", ["tokens"], dtype=ir.DataType.INT64)
    model = b.model(b.node("Gather", b.parameter("embed", ROWS, WIDTH), ids, shape=["tokens", WIDTH]))
    check_position_tables(model, max_positions=1000)
