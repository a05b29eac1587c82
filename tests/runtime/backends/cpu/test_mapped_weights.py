"""Weights in mapped files: packed from what is read of the file, they are those that the memory holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, Typed, finish, operand
from tests.runtime.backends.cpu.stored_weights import SPECS, Spec, StoredWeight, stored_weight
from tests.runtime.backends.cpu.test_integer_linear import Rows, attributes_of, quantized_rows

Array = NDArray[Any]
SHAPES = ((1, 5), (37, 333), (70, 256), (128, 200))
INTEGERS = [spec for spec in SPECS if spec.format.startswith("int") or spec.format == "f4e2m1"]
GATES = [
    {},
    {"activation": "silu", "layout": "concat"},
    {"activation": "silu", "layout": "interleaved"},
]


def in_file(path: Path, operands: Sequence[Argument]) -> tuple[list[Argument], Array]:
    """Write operands to a file; return them mapped, and all of the file."""
    views: list[Argument] = []
    places = []
    with path.open("wb") as file:
        file.write(bytes(64))  # as a header does
        for argument in operands:
            array = argument.array if isinstance(argument, Typed) else argument
            places.append(file.tell())
            if isinstance(array, np.ndarray):
                file.write(array.tobytes())
                file.write(bytes(-file.tell() % 64))
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    for argument, place in zip(operands, places, strict=True):
        array = argument.array if isinstance(argument, Typed) else argument
        if not isinstance(array, np.ndarray):
            views.append(None)
            continue
        view = mapped[place : place + array.nbytes].view(array.dtype).reshape(array.shape)
        views.append(replace(argument, array=view) if isinstance(argument, Typed) else view)
    return views, mapped


def linear(
    kind: str,
    x: Sequence[Argument],
    weight: Sequence[Argument],
    y: Array,
    attributes: dict[str, Any],
    mapped: Array,
    descriptor: int,
    *,
    ready: int = 0,
    isa: str | None = None,
) -> Array:
    program = _cpu.Program(2, isa=isa)
    program.expect(ready, [mapped], [descriptor])
    inputs = [operand(program, argument) for argument in (*x, *weight, None)]
    outputs: list[Argument] = [y, None, None, None] if kind == "IntegerLinear" else [y]
    program.add(kind, "linear", inputs, [operand(program, item) for item in outputs], attributes)
    finish(program)
    program.run()
    return y


@pytest.mark.parametrize("isa", _cpu.available_isas())
@pytest.mark.parametrize("spec", INTEGERS, ids=str)
def test_integer_weights_of_a_file_are_those_in_memory(spec: Spec, isa: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for shape in SHAPES:
        for gate in GATES if shape[0] % 2 == 0 else GATES[:1]:
            weight = stored_weight(rng, shape, spec)
            views, mapped = in_file(tmp_path / "weights", weight.operands)
            x = quantized_rows(rng, 3, shape[1], spec.group)
            ys = _of_file_and_memory(tmp_path / "weights", x, weight, views, mapped, gate, isa)
            assert np.isfinite(ys[0]).all()
            np.testing.assert_array_equal(ys[0], ys[1])


def _of_file_and_memory(
    path: Path, x: Rows, weight: StoredWeight, views: list[Argument], mapped: Array, gate: dict[str, Any], isa: str
) -> list[Array]:
    columns = len(weight.exact) // (2 if gate else 1)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [
            linear(
                "IntegerLinear",
                x.operands,
                operands,
                np.full((len(x.values), columns), np.nan, np.float32),
                attributes_of(weight, **gate),
                mapped,
                opened,
                isa=isa,
            )
            for operands, opened in ((views, descriptor), (weight.operands, -1))
        ]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_weights_of_floats_of_a_file_are_those_in_memory(spec: Spec, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for shape in SHAPES:
        weight = stored_weight(rng, shape, spec)
        views, mapped = in_file(tmp_path / "weights", weight.operands)
        x = rng.standard_normal((3, shape[1]), dtype=np.float32)
        attributes = {"channels": shape[0], "features": shape[1], **weight.attributes}
        descriptor = os.open(tmp_path / "weights", os.O_RDONLY)
        of_file, in_memory = (
            linear("FloatLinear", [x], operands, np.zeros((3, shape[0]), np.float32), attributes, mapped, opened)
            for operands, opened in ((views, descriptor), (weight.operands, -1))
        )
        os.close(descriptor)
        np.testing.assert_array_equal(of_file, in_memory)


def test_values_are_read_from_the_file_and_others_where_it_is_short(tmp_path: Path) -> None:
    """A file whose values are zero past the first 64 rows, and ends there; the mapped one has the true values."""
    rng = np.random.default_rng(3)
    weight = stored_weight(rng, (96, 64), Spec("int8", scales="float32"))
    views, mapped = in_file(tmp_path / "weights", weight.operands)
    (tmp_path / "other").write_bytes(bytes(64 + 64 * 64))
    x = quantized_rows(rng, 2, 64, -1)
    descriptor = os.open(tmp_path / "other", os.O_RDONLY)
    y = np.full((2, 96), np.nan, np.float32)
    linear("IntegerLinear", x.operands, views, y, attributes_of(weight), mapped, descriptor)
    os.close(descriptor)
    in_memory = np.full((2, 96), np.nan, np.float32)
    linear("IntegerLinear", x.operands, weight.operands, in_memory, attributes_of(weight), mapped, -1)
    assert not y[:, :64].any()
    np.testing.assert_array_equal(y[:, 64:], in_memory[:, 64:])


def test_weights_may_lie_on_pages_that_were_made_ready(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    weight = stored_weight(rng, (2048, 512), Spec("int4", group=64, signed=False, zero_points=True))
    views, mapped = in_file(tmp_path / "weights", weight.operands)
    x = quantized_rows(rng, 2, 512, 64)
    descriptor = os.open(tmp_path / "weights", os.O_RDONLY)
    results = [
        linear(
            "IntegerLinear",
            x.operands,
            views,
            np.full((2, 2048), np.nan, np.float32),
            attributes_of(weight),
            mapped,
            descriptor,
            ready=ready,
        )
        for ready in (0, 1 << 19, 1 << 24)
    ]
    os.close(descriptor)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
