"""Threads of a program meet after every operation, however many there are and however often they run."""

from __future__ import annotations

import numpy as np
import pytest

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import finish, operand

ELEMENTS = 20_000  # enough to be shared among threads
OPERATIONS, RUNS = 24, 20


def _shifting(threads: int) -> tuple[_cpu.Program, np.ndarray, np.ndarray]:
    """Return a program that adds 1 and moves everything by half the elements, again and again, and its two buffers.

    Each operation reads what other threads have just written.
    """
    program = _cpu.Program(threads)
    there, back, one = np.zeros(ELEMENTS, "f4"), np.zeros(ELEMENTS, "f4"), np.ones((), "f4")
    half = ELEMENTS // 2
    for index in range(OPERATIONS):
        source, target = (there, back) if index % 2 == 0 else (back, there)
        for first, second in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
            inputs = [operand(program, source[first]), operand(program, one)]
            program.add("Add", f"{index}", inputs, [operand(program, target[second])], {})
    finish(program)
    return program, there, back


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_operations_see_what_the_last_one_wrote(threads: int) -> None:
    program, there, _ = _shifting(threads)
    for run in range(1, RUNS + 1):
        program.run()
        assert (there == run * OPERATIONS).all()


def test_programs_take_turns() -> None:
    programs = [_shifting(threads) for threads in (2, 3)]
    for run in range(1, RUNS + 1):
        for program, there, _ in programs:
            program.run()
            assert (there == run * OPERATIONS).all()


def test_programs_come_and_go() -> None:
    for threads in (2, 3, 4) * 4:
        program, there, _ = _shifting(threads)
        program.run()
        assert (there == OPERATIONS).all()
        del program
