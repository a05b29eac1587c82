"""Memory that a thread makes ready, and gives back: programs that are given up at once, and files that stay whole."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from inferencex.runtime.backends.cpu.native import _cpu


@pytest.fixture
def mapped(tmp_path: Path) -> np.memmap:
    file = tmp_path / "weights"
    np.arange(1 << 20, dtype=np.uint32).tofile(file)
    return np.memmap(file, dtype=np.uint8, mode="r")


def test_a_program_can_be_given_up_while_its_memory_is_made_ready(mapped: np.memmap) -> None:
    for _ in range(20):
        _cpu.Program(2).expect(1 << 28, [mapped])


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 22, 1 << 45])
def test_files_are_as_they_were_when_their_pages_were_given_back(mapped: np.memmap, nbytes: int) -> None:
    program = _cpu.Program(1)
    program.expect(nbytes, [mapped, mapped[5:5], mapped[1:4099]])
    logits = _cpu.operand("f32", [(1, 2), (4, 0)], [(4, 0), (1, 0)], 0)
    program.prepare(1 << 16, 8, {}, logits, 1, 1)
    assert np.array_equal(mapped.view(np.uint32), np.arange(1 << 20, dtype=np.uint32))
    del program
    assert np.array_equal(mapped.view(np.uint32), np.arange(1 << 20, dtype=np.uint32))


def test_what_has_no_file_behind_it_is_refused() -> None:
    program = _cpu.Program(1)
    with pytest.raises(ValueError, match="can be written to"):
        program.expect(1 << 20, [np.ones(1 << 20, np.uint8)])


def test_operations_may_be_added_while_memory_is_made_ready(mapped: np.memmap) -> None:
    values, out = np.arange(8, dtype=np.float32), np.empty(8, np.float32)
    program = _cpu.Program(2)
    program.expect(1 << 26, [mapped])
    operands = [program.constant("f32", [(8, 0)], [(1, 0)], 0, array) for array in (values, out)]
    program.add("Copy", "copied", operands[:1], operands[1:], {})
    logits = _cpu.operand("f32", [(1, 2), (4, 0)], [(4, 0), (1, 0)], 0)
    program.prepare(1 << 16, 8, {}, logits, 1, 1)
    program.run()
    assert np.array_equal(out, values)


def _heap_bytes() -> int:
    """Return what memory is of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux" or not platform.libc_ver()[0], reason="only glibc keeps what is free")
@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="sanitizers have a heap of their own")
def test_what_is_free_between_pieces_of_the_heap_is_given_back(mapped: np.memmap) -> None:
    pieces = [np.ones(64 << 10, np.uint8) for _ in range(1024)]
    del pieces[::2]
    del pieces[:-1]  # the last one holds the heap up
    before = _heap_bytes()
    program = _cpu.Program(1)
    program.expect(1 << 20, [mapped])
    logits = _cpu.operand("f32", [(1, 2), (4, 0)], [(4, 0), (1, 0)], 0)
    program.prepare(1 << 16, 8, {}, logits, 1, 1)
    until = time.monotonic() + 10
    while _heap_bytes() > before - (32 << 20):
        assert time.monotonic() < until, "nothing was given back"
    assert pieces[0].all()
