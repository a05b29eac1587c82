from __future__ import annotations

import numpy as np
import pytest

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import operand

Size = tuple[int, int]

MOST = 700
TOKENS, TWICE, ROWS = (1, 1), (2, 1), (1, 2)


class Arena:
    """Hands out room for float32 operands of as many tokens as a step may have."""

    def __init__(self) -> None:
        self.bytes = 0

    def place(self, *dims: Size) -> _cpu.Operand:
        """Return a contiguous operand; only the first dimension depends on the step."""
        strides = [(int(np.prod([size for size, _ in dims[i + 1 :]], dtype=int)), 0) for i in range(len(dims))]
        offset = self.bytes
        self.bytes += 4 * MOST * dims[0][0] * strides[0][0] + 64
        return _cpu.operand("f32", list(dims), strides, offset)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_program_runs_steps_of_any_size(threads: int) -> None:
    rng = np.random.default_rng(0)
    width, matrix = rng.standard_normal(4).astype("f4"), rng.standard_normal((4, 3)).astype("f4")
    one = np.ones((), "f4")
    last = np.array([-1, 0])
    sums, products = np.zeros(2, "f4"), np.zeros((2, 3), "f4")
    program, arena = _cpu.Program(threads), Arena()
    count = arena.place(TOKENS)
    # `count` again, as a column.
    column = _cpu.operand("f32", [TOKENS, (1, 0)], [(1, 0), (0, 0)], 0)
    scaled, doubled = arena.place(TOKENS, (4, 0)), arena.place(TWICE, (4, 0))
    total, product, rows = arena.place(TWICE), arena.place(TOKENS, (3, 0)), arena.place(ROWS, (3, 0))
    at_width, at_matrix, at_one, at_last, at_sums, at_products = (
        operand(program, array) for array in (width, matrix, one, last, sums, products)
    )
    program.add("Range", "count", [at_one, None, at_one], [count], {})
    program.add("Mul", "scaled", [column, at_width], [scaled], {})
    program.add("Concat", "doubled", [scaled, scaled], [doubled], {"axis": 0})
    program.add("ReduceSum", "total", [doubled], [total], {"axes": [1]})
    program.add("MatMul", "product", [scaled, at_matrix], [product], {})
    program.add("Fill", "rows", [], [rows], {"value": 1.0})
    program.add("Gather", "sums", [total, at_last], [at_sums], {"axis": 0})
    program.add("Gather", "products", [product, at_last], [at_products], {"axis": 0})
    nothing = _cpu.operand("f32", [(0, 0), (0, 0)], [(0, 0), (0, 0)], 0)
    program.prepare(arena.bytes, MOST, {}, nothing, 1, 16)
    program.set_profiling(True)
    for tokens in (1, 5, MOST):
        program.run(tokens, 1)
        np.testing.assert_allclose(sums, [tokens * width.sum(), width.sum()], rtol=1e-5)
        np.testing.assert_allclose(products, [tokens * (width @ matrix), width @ matrix], rtol=1e-5)
    costs = {name: (traffic, work) for _, name, _, _, traffic, work in program.profile()}
    steps = 1 + 5 + MOST
    assert costs["scaled"] == (steps * 4 * (1 + 4) + 3 * 4 * 4, steps * 4)
    assert costs["product"][1] == steps * 2 * 4 * 3
    assert costs["rows"] == (3 * 3 * 4, 3 * 3)
