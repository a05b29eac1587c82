"""Linears on quantized activations, compared with exact integer sums scaled in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, run_operation
from tests.runtime.backends.cpu.stored_weights import EPSILON, Spec, StoredWeight, stored_weight

Array = NDArray[Any]
Floats = NDArray[np.float32]

ISAS = _cpu.available_isas()
ROWS = (1, 2, 3, 7, 8, 12, 31, 33, 64)
GROUPS = (1, 3, 8, 16, 32, 48, 64, 100, 128, 172, 256, -1)
SPECS = [
    Spec(
        f"int{4 if i % 3 else 8}",
        group=group,
        zero_points=zero_points,
        signed=i % 3 != 1,
        scales="float16" if i % 2 else "float32",
    )
    for i, (group, zero_points) in enumerate((g, z) for g in GROUPS for z in (False, True))
] + [
    Spec("int3", group=64, signed=False, zero_points=True),
    Spec("int3", group=7, scales="float32"),
    Spec("int5", group=64, signed=False, zero_points=True),
    Spec("int5", group=5),
    Spec("int6", group=100, signed=False, zero_points=True),
    Spec("int6", scales="float32"),
    Spec("f4e2m1", group=16),
    Spec("f4e2m1", group=32, scales="float32"),
    Spec("f4e2m1", group=5),
]


@dataclass(frozen=True)
class Rows:
    """Rows of quantized activations: the operands, and for every block its features, integers and scales."""

    values: NDArray[np.int8]
    scales: Floats
    sums: NDArray[np.int32]
    blocks: list[slice]

    @property
    def operands(self) -> list[Argument]:
        return [self.values, self.scales, self.sums]

    def take(self, rows: slice) -> Rows:
        """Return some of the rows, in memory of their own."""
        return Rows(self.values[rows].copy(), self.scales[rows].copy(), self.sums[rows].copy(), self.blocks)

    def integers(self, block: int) -> NDArray[np.float64]:
        """Return the integers of a block's features, `[M, features]`."""
        width = self.blocks[block].stop - self.blocks[block].start
        start = block * (self.values.shape[1] // len(self.blocks))
        return self.values[:, start : start + width].astype(np.float64)


def blocks_of(features: int, group: int, whole: bool = False) -> list[slice]:
    """Cut features into blocks: whole groups up to 32 features, longer ones into as even pieces as possible."""
    if whole:
        return [slice(0, features)]
    group = features if group == -1 else min(group, features)
    block = -(-group // -(-group // 32))
    starts = [s for g in range(0, features, group) for s in range(g, min(g + group, features), block)]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], features], strict=True)]


def quantized_rows(rng: np.random.Generator, rows: int, features: int, group: int, whole: bool = False) -> Rows:
    """Return random integers over their whole range, with random scales."""
    blocks = blocks_of(features, group, whole)
    count, row_bytes = _cpu.block_layout(features, features if group == -1 else group, whole)
    assert count == len(blocks)
    values = np.zeros((rows, row_bytes), np.int8)
    for b, block in enumerate(blocks):
        start = b * (row_bytes // count)
        values[:, start : start + block.stop - block.start] = rng.integers(-127, 128, (rows, block.stop - block.start))
    scales = (rng.uniform(0.5, 2, (rows, count)) / 127).astype(np.float32)
    sums = values.reshape(rows, count, -1).sum(2, dtype=np.int32)
    return Rows(values, scales, sums, blocks)


def attributes_of(weight: StoredWeight, **more: Any) -> dict[str, Any]:
    channels, features = weight.exact.shape
    stored_as = weight.attributes["format"]
    kept = {name: value for name, value in weight.attributes.items() if name != "format"}
    if stored_as not in ("int4", "int8"):
        kept["format"] = stored_as
    bits = 4 if stored_as in ("int4", "int3") else 8
    return {"channels": channels, "features": features, "bits": bits, **kept, **more}


def linear(
    x: Rows, weight: StoredWeight, bias: Argument = None, *, threads: int = 1, isa: str | None = None, **more: Any
) -> Floats:
    channels = weight.exact.shape[0]
    y = np.full((len(x.values), channels // 2 if "activation" in more else channels), 7, dtype=np.float32)
    run_operation(
        "IntegerLinear",
        [*x.operands, *weight.operands, bias],
        [y, None, None, None],
        attributes_of(weight, **more),
        threads=threads,
        isa=isa,
    )
    return y


def assert_rounded(y: Floats, x: Rows, weight: StoredWeight, bias: Array | None = None) -> None:
    """Differences to float64 are a few roundings of the blocks' terms: sums within a block are exact."""
    exact, terms = np.zeros(y.shape), np.zeros(y.shape)
    for b, block in enumerate(x.blocks):
        term = x.integers(b) @ weight.exact[:, block].T * x.scales[:, b : b + 1]
        exact += term
        terms += np.abs(term)
    if bias is not None:
        exact, terms = exact + bias, terms + np.abs(bias)
    assert np.all(np.abs(y - exact) <= (2 + len(x.blocks)) * EPSILON * terms)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_equals_exact_integers(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(1)
    for channels, features in ((1, 5), (37, 333), (70, 256)):
        weight = stored_weight(rng, (channels, features), spec).for_integers()
        x = quantized_rows(rng, max(ROWS), features, spec.group)
        for rows in ROWS:
            part = x.take(slice(rows))
            assert_rounded(linear(part, weight, isa=isa), part, weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS[1::5], ids=str)
def test_is_the_same_in_every_batch(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(2)
    weight = stored_weight(rng, (100, 200), spec)
    x = quantized_rows(rng, 100, 200, spec.group)
    y = linear(x, weight, isa=isa)
    for first, last in ((0, 1), (99, 100), (3, 5), (4, 11), (10, 43), (31, 96)):
        assert np.array_equal(linear(x.take(slice(first, last)), weight, isa=isa), y[first:last])
    for threads in (2, 3):
        assert np.array_equal(linear(x, weight, threads=threads, isa=isa), y)
        assert np.array_equal(linear(x.take(slice(5)), weight, threads=threads, isa=isa), y[:5])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("features", "group", "zero_points"), [(1700, 64, True), (1700, 100, False), (8232, 64, True)])
def test_long_rows_are_the_same_in_every_batch(features: int, group: int, zero_points: bool, isa: str) -> None:
    """Weights longer than what is unpacked at a time, and more rows than are kept near."""
    rng = np.random.default_rng(11)
    weight = stored_weight(rng, (40, features), Spec("int4", group=group, zero_points=zero_points)).for_integers()
    x = quantized_rows(rng, 150, features, group)
    together = linear(x, weight, isa=isa)
    assert_rounded(together[:20], x.take(slice(20)), weight)
    for rows in (slice(0, 1), slice(7, 19), slice(100, 130), slice(149, 150), slice(60, 138)):
        np.testing.assert_array_equal(linear(x.take(rows), weight, isa=isa), together[rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [512, 331])
def test_many_rows(rows: int, threads: int) -> None:
    rng = np.random.default_rng(3)
    weight = stored_weight(rng, (192, 576), Spec("int4", group=64, zero_points=True, signed=False))
    x = quantized_rows(rng, rows, 576, 64)
    assert_rounded(linear(x, weight, threads=threads), x, weight)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("zero_points", [False, True])
def test_static_scales(zero_points: bool, isa: str) -> None:
    rng = np.random.default_rng(4)
    weight = stored_weight(rng, (40, 1000), Spec("int8", zero_points=zero_points))
    x = quantized_rows(rng, 40, 1000, -1, whole=True)
    x.values[rng.random(x.values.shape) < 0.1] = -128  # which integers of a given scale may be
    x.sums[:, 0] = x.values.sum(1, dtype=np.int32)
    for rows in (9, 40):
        part = x.take(slice(rows))
        assert_rounded(linear(part, weight, isa=isa, whole=1), part, weight)


@pytest.mark.parametrize("isa", ISAS)
def test_integers_at_their_ends(isa: str) -> None:
    """Nothing saturates or wraps where all integers are as large as they can be."""
    rng = np.random.default_rng(5)
    for bits, low, zero in ((4, 0, 15), (4, 15, 0), (8, -128, 127), (8, 127, -128)):
        dtype = np.int8 if bits == 8 else np.uint8
        spec = Spec(f"int{bits}", group=128, zero_points=True, signed=bits == 8)
        weight = stored_weight(rng, (33, 256), spec)
        values, scales, zeros = (np.asarray(operand) for operand in weight.operands)
        values[...] = low if bits == 8 else low * 17
        zeros[...] = zero if bits == 8 else zero * 17
        exact = (float(dtype(low)) - float(dtype(zero))) * np.repeat(scales.astype(np.float64), 128, axis=1)
        weight = StoredWeight([values, scales, zeros], weight.attributes, exact)
        for sign in (-127, 127):
            x = quantized_rows(rng, 2, 256, 128)
            x.values[...] = sign
            x.sums[...] = sign * 32
            assert_rounded(linear(x, weight, isa=isa), x, weight)


@pytest.mark.parametrize("isa", ISAS)
def test_bias(isa: str) -> None:
    rng = np.random.default_rng(6)
    weight = stored_weight(rng, (37, 64), Spec("int4", group=32))
    bias = rng.standard_normal(37, dtype=np.float32)
    for rows in (1, 40):
        x = quantized_rows(rng, rows, 64, 32)
        y = linear(x, weight, bias, isa=isa)
        assert np.array_equal(y, linear(x, weight, isa=isa) + bias)
        assert_rounded(y, x, weight, bias)


def quantize(y: Floats, group: int) -> list[Array]:
    """Return the outputs of the operation Quantize."""
    blocks, row_bytes = _cpu.block_layout(y.shape[1], y.shape[1] if group == -1 else group)
    outputs = empty_rows(len(y), blocks, row_bytes)
    run_operation("Quantize", [y], outputs, {"group": group})
    return outputs


def empty_rows(rows: int, blocks: int, row_bytes: int) -> list[Array]:
    return [
        np.full((rows, row_bytes), 55, np.int8),
        np.full((rows, blocks), 55, np.float32),
        np.full((rows, blocks), 55, np.int32),
    ]


@pytest.mark.parametrize("group", [1, 32, 40, 64, 100, 172, 192, -1])
@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("also_y", [False, True])
def test_quantized_results(group: int, rows: int, also_y: bool) -> None:
    rng = np.random.default_rng(7)
    weight = stored_weight(rng, (330, 64), Spec("int4", group=32, zero_points=True))
    x = quantized_rows(rng, rows, 64, 32)
    y = linear(x, weight)
    expected = quantize(y, group)
    for threads in (1, 2):
        found = empty_rows(rows, expected[1].shape[1], expected[0].shape[1])
        again = np.zeros_like(y) if also_y else None
        run_operation(
            "IntegerLinear",
            [*x.operands, *weight.operands],
            [again, *found],
            attributes_of(weight, out_group=group),
            threads=threads,
        )
        for part, wanted in zip(found, expected, strict=True):
            assert np.array_equal(part, wanted)
        assert again is None or np.array_equal(again, y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("features", [1, 50, 96])
def test_gated_results(features: int, layout: str, isa: str) -> None:
    rng = np.random.default_rng(8)
    weight = stored_weight(rng, (2 * features, 72), Spec("int4", group=24, signed=False, zero_points=True))
    bias = rng.standard_normal(2 * features, dtype=np.float32)
    gate = {"activation": "swiglu_clamped", "layout": layout, "alpha": 1.7, "limit": 3.0}
    for rows in (1, 5, 70):
        x = quantized_rows(rng, rows, 72, 24)
        expected = np.zeros((rows, features), np.float32)
        run_operation(
            "GatedActivation", [linear(x, weight, bias, isa=isa)], [expected, None, None, None], gate, isa=isa
        )
        assert np.array_equal(linear(x, weight, bias, isa=isa, threads=2, **gate), expected)
        wanted = quantize(expected, 40)
        found = empty_rows(rows, wanted[1].shape[1], wanted[0].shape[1])
        run_operation(
            "IntegerLinear",
            [*x.operands, *weight.operands, bias],
            [None, *found],
            attributes_of(weight, out_group=40, **gate),
            isa=isa,
        )
        for part, whole in zip(found, wanted, strict=True):
            assert np.array_equal(part, whole)


def test_results_between_other_columns() -> None:
    rng = np.random.default_rng(9)
    weight = stored_weight(rng, (64, 32), Spec("int8", group=16))
    x = quantized_rows(rng, 6, 32, 16)
    wide = np.full((6, 100), 9, np.float32)
    run_operation(
        "IntegerLinear", [*x.operands, *weight.operands], [wide[:, 10:74], None, None, None], attributes_of(weight)
    )
    assert np.array_equal(wide[:, 10:74], linear(x, weight))
    assert np.all(wide[:, :10] == 9) and np.all(wide[:, 74:] == 9)


def test_scales_that_are_not_numbers_reach_the_result() -> None:
    """Activations that are not finite have scale NaN."""
    rng = np.random.default_rng(10)
    weight = stored_weight(rng, (8, 64), Spec("int4", group=32))
    x = quantized_rows(rng, 2, 64, 32)
    x.scales[1, 1] = np.nan
    y = linear(x, weight)
    assert np.all(np.isfinite(y[0])) and np.all(np.isnan(y[1]))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    channels=st.integers(1, 140),
    features=st.integers(1, 400),
    group=st.one_of(st.just(-1), st.integers(1, 300)),
    bits=st.sampled_from([4, 8]),
    signed=st.booleans(),
    zero_points=st.booleans(),
    scales=st.sampled_from(["float16", "float32"]),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    rows: int,
    channels: int,
    features: int,
    group: int,
    bits: int,
    signed: bool,
    zero_points: bool,
    scales: str,
    isa: str,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    spec = Spec(f"int{bits}", group, zero_points, signed or bits == 8, scales)
    weight = stored_weight(rng, (channels, features), spec)
    x = quantized_rows(rng, rows, features, group)
    assert_rounded(linear(x, weight, threads=threads, isa=isa), x, weight)


def good() -> tuple[list[Argument], list[Argument], dict[str, Any]]:
    rng = np.random.default_rng(11)
    weight = stored_weight(rng, (64, 96), Spec("int4", group=32, zero_points=True))
    x = quantized_rows(rng, 2, 96, 32)
    y = np.zeros((2, 64), np.float32)
    return [*x.operands, *weight.operands, None], [y, None, None, None], attributes_of(weight)


@pytest.mark.parametrize(
    ("index", "operand", "message"),
    [
        (0, None, "values"),
        (0, np.zeros((2, 95), np.int8), "values"),
        (0, np.zeros((2, 96), np.uint8), "values"),
        (0, np.zeros((2, 192), np.int8)[:, :96], "values"),
        (0, np.zeros((2, 1, 96), np.int8), "values"),
        (1, np.zeros((2, 4), np.float32), "scales"),
        (1, np.zeros((3, 3), np.float32), "scales"),
        (2, np.zeros((2, 3), np.float32), "sums"),
        (3, np.zeros(64 * 96 // 2 - 1, np.uint8), "weight"),
        (3, None, "weight"),
        (4, np.zeros((64, 2), np.float16), "scales"),
        (4, None, "scales"),
        (5, np.zeros(64, np.uint8), "zero_points"),
        (6, np.zeros(63, np.float32), "bias"),
    ],
)
def test_refuses_hostile_inputs(index: int, operand: Argument, message: str) -> None:
    inputs, outputs, attributes = good()
    inputs[index] = operand
    with pytest.raises(_cpu.BlueprintError, match=f"IntegerLinear test: .*{message}"):
        run_operation("IntegerLinear", inputs, outputs, attributes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "bits is 3"),
        ({"channels": 0}, "channels is 0"),
        ({"channels": 2**31 - 1, "features": 2**31 - 1}, "absurd"),
        ({"features": -5}, "features is -5"),
        ({"group": 0}, "group is 0"),
        ({"whole": 1}, "one scale a channel"),
        ({"activation": "mystery", "layout": "concat"}, "mystery"),
        ({"activation": "silu", "layout": "sideways"}, "sideways"),
        ({"activation": "silu", "layout": "concat"}, "y is"),
        ({"bits": "four"}, "wrong type"),
    ],
)
def test_refuses_hostile_attributes(changes: dict[str, Any], message: str) -> None:
    inputs, outputs, attributes = good()
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("IntegerLinear", inputs, outputs, {**attributes, **changes})


def test_refuses_hostile_results() -> None:
    inputs, outputs, attributes = good()
    with pytest.raises(_cpu.BlueprintError, match="neither y nor"):
        run_operation("IntegerLinear", inputs, [None] * 4, attributes)
    with pytest.raises(_cpu.BlueprintError, match="y is"):
        run_operation("IntegerLinear", inputs, [np.zeros((3, 64), np.float32), None, None, None], attributes)
    with pytest.raises(_cpu.BlueprintError, match="there together"):
        run_operation(
            "IntegerLinear",
            inputs,
            [outputs[0], np.zeros((2, 64), np.int8), None, None],
            {**attributes, "out_group": 32},
        )
    del attributes["channels"]
    with pytest.raises(_cpu.BlueprintError, match="attribute is missing"):
        run_operation("IntegerLinear", inputs, outputs, attributes)
