"""Tables in mapped files: rows come from the file and leave it out of memory, and are those that the memory holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, Typed, finish, operand
from tests.runtime.backends.cpu.stored_weights import SPECS, Spec, StoredWeight, stored_weight

Array = NDArray[Any]
MapArrays = Callable[[Sequence[Argument]], tuple[list[Argument], np.ndarray, int]]


@pytest.fixture
def map_arrays(tmp_path: Path) -> Iterator[MapArrays]:
    """Write arrays to a file; return them mapped, all of the mapped file, and a descriptor of it."""
    path, descriptors = tmp_path / "weights", []

    def map_all(arguments: Sequence[Argument]) -> tuple[list[Argument], np.ndarray, int]:
        offsets = {}
        with path.open("wb") as file:
            file.write(bytes(64))  # as a header does
            for place, argument in enumerate(arguments):
                if argument is not None:
                    offsets[place] = file.tell()
                    array = argument.array if isinstance(argument, Typed) else argument
                    assert isinstance(array, np.ndarray)
                    file.write(array.tobytes())
                    file.write(bytes(-file.tell() % 64))
        mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        views: list[Argument] = [None] * len(arguments)
        for place, offset in offsets.items():
            argument = arguments[place]
            array = argument.array if isinstance(argument, Typed) else argument
            assert isinstance(array, np.ndarray)
            view = mapped[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            views[place] = replace(argument, array=view) if isinstance(argument, Typed) else view
        descriptors.append(os.open(path, os.O_RDONLY))
        return views, mapped, descriptors[-1]

    yield map_all
    for descriptor in descriptors:
        os.close(descriptor)


def look_up(
    table: Sequence[Argument], mapped: Array, descriptor: int, indices: Array, width: int, attributes: dict[str, Any]
) -> Array:
    y = np.zeros((len(indices), width), np.float32)
    program = _cpu.Program(2)
    program.expect(0, [mapped], [descriptor])
    inputs = [operand(program, argument) for argument in (*table, indices)]
    program.add("Embedding", "rows", inputs, [operand(program, y)], attributes)
    finish(program)
    program.run()
    return y


def large_table(spec: Spec, width: int) -> tuple[StoredWeight, dict[str, Any]]:
    bits = {"f32": 32, "f16": 16, "bf16": 16, "f8e4m3": 8, "int8": 8, "int4": 4, "f4e2m1": 4}.get(spec.format)
    rows = (8 << 20) // (width * (bits or int(spec.format[-1]))) + 3  # a little more than 1 MiB
    table = stored_weight(np.random.default_rng(width), (rows, width), spec)
    return table, {"bits": bits or 0, "signed": 1, "group": -1, **table.attributes}


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.scales or spec.format[0] in "fb"], ids=str)
@pytest.mark.parametrize("width", [100, 577])
def test_rows_of_a_file_are_those_in_memory(spec: Spec, width: int, map_arrays: MapArrays) -> None:
    if spec.format == "f8e4m3" and not spec.scales:
        pytest.skip("tables of FP8 have scales")
    table, attributes = large_table(spec, width)
    count = len(table.exact)
    indices = np.array([0, 1, 2, count - 1, count - 2, count // 2, -1, count], np.int64)
    views, mapped, descriptor = map_arrays(table.operands)
    y = look_up(views, mapped, descriptor, indices, width, attributes)
    in_memory = look_up(views, mapped, -1, indices, width, attributes)
    np.testing.assert_array_equal(y, in_memory)
    np.testing.assert_array_equal(y[:6], table.exact.astype(np.float32)[indices[:6]])


def test_scales_and_zero_points_of_a_file_are_those_in_memory(map_arrays: MapArrays) -> None:
    spec = Spec("int6", group=2, signed=False, zero_points=True, scales="float32")
    table = stored_weight(np.random.default_rng(0), (30011, 98), spec)  # all three parts are large, no row is even
    indices = np.random.default_rng(1).integers(0, 30011, 300)
    views, mapped, descriptor = map_arrays(table.operands)
    y = look_up(views, mapped, descriptor, indices, 98, {"bits": 0, **table.attributes})
    np.testing.assert_array_equal(y, table.exact.astype(np.float32)[indices])


def test_a_file_that_cannot_be_read_is_read_in_memory(map_arrays: MapArrays, tmp_path: Path) -> None:
    table, attributes = large_table(Spec("f16"), 64)
    views, mapped, _ = map_arrays(table.operands)
    (tmp_path / "short").write_bytes(bytes(10))
    short = os.open(tmp_path / "short", os.O_RDONLY)
    y = look_up(views, mapped, short, np.arange(4000, 4010), 64, attributes)
    os.close(short)
    np.testing.assert_array_equal(y, table.exact.astype(np.float32)[4000:4010])


def _resident(array: Array) -> int:
    """Return how many bytes of the mapping that an array is are in memory."""
    begin = array.__array_interface__["data"][0]
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{begin:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what of a mapping is in memory")
def test_rows_that_are_read_stay_out_of_memory(map_arrays: MapArrays) -> None:
    table, attributes = large_table(Spec("f32"), 256)
    views, mapped, descriptor = map_arrays(table.operands)
    indices = np.arange(0, len(table.exact), 3)
    y = look_up(views, mapped, descriptor, indices, 256, attributes)
    np.testing.assert_array_equal(y, table.exact.astype(np.float32)[indices])
    assert _resident(mapped) <= mapped.nbytes // 8


def test_as_many_descriptors_as_files_are_needed(map_arrays: MapArrays) -> None:
    _, mapped, descriptor = map_arrays([np.zeros(100, np.float32)])
    with pytest.raises(_cpu.BlueprintError, match="2 descriptors were given for 1 files"):
        _cpu.Program(1).expect(0, [mapped], [descriptor, descriptor])


@pytest.mark.parametrize("most_mapped", [0, 1 << 16, 1 << 40])
def test_weights_are_repacked_while_their_pages_are_given_back(map_arrays: MapArrays, most_mapped: int) -> None:
    rng = np.random.default_rng(3)
    weights = [stored_weight(rng, (96, 128), Spec("int4", group=32, signed=False, zero_points=True)) for _ in range(6)]
    views, mapped, descriptor = map_arrays([part for weight in weights for part in weight.operands])
    x, ys = rng.standard_normal((3, 128), dtype=np.float32), [np.zeros((3, 96), np.float32) for _ in weights]
    program = _cpu.Program(2)
    program.expect(1 << 20, [mapped], [descriptor], most_mapped=most_mapped)
    for place, (weight, y) in enumerate(zip(weights, ys, strict=True)):
        inputs = [operand(program, item) for item in (x, *views[3 * place : 3 * place + 3], None)]
        attributes = {"channels": 96, "features": 128, **weight.attributes}
        program.add("FloatLinear", str(place), inputs, [operand(program, y)], attributes)
    finish(program)
    program.run()
    for weight, y in zip(weights, ys, strict=True):
        np.testing.assert_allclose(y, x.astype(np.float64) @ weight.exact.T, rtol=1e-4, atol=1e-4)
