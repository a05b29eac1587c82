from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.layouts import LAYOUTS, laid_out, onnx_outputs, run
from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]

HOSTILE = np.array([0.0, -0.0, 1e-45, -1e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan, 88.8, -103.9, 0.5, -2.5], "f4")


def _floats(*shape: int, seed: int = 0, scale: float = 3.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _integers(*shape: int, dtype: str, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


def _erf(x: Array) -> Array:
    result: Array = np.vectorize(math.erf, otypes=[np.float64])(x)
    return result


UNARY: dict[str, Callable[[Array], Array]] = {
    "Abs": np.abs, "Neg": np.negative, "Sign": np.sign, "Relu": lambda x: np.maximum(x, 0), "Ceil": np.ceil,
    "Cos": np.cos, "Erf": _erf, "Exp": np.exp, "Floor": np.floor, "Log": np.log, "Reciprocal": lambda x: 1 / x,
    "Round": np.rint, "Sigmoid": lambda x: 1 / (1 + np.exp(-x)), "Sin": np.sin, "Sqrt": np.sqrt, "Tanh": np.tanh,
    "Softplus": lambda x: np.logaddexp(x, 0), "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)), "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "Gelu": lambda x: 0.5 * x * (1 + _erf(x / np.sqrt(2))), "Identity": lambda x: x,
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", UNARY)
@np.errstate(all="ignore")
def test_functions_of_a_float(kind: str, layout: str) -> None:
    x = _floats(45, 37)
    x = np.abs(x) if kind in ("Log", "Sqrt") else x
    (y,) = run(kind, [laid_out(x, layout)], [(x.shape, "f4")])
    np.testing.assert_allclose(y, UNARY[kind](x.astype(np.float64)), rtol=6e-7, atol=2e-7)


@pytest.mark.parametrize("kind", sorted(set(UNARY) - {"HardSwish", "Sin", "Cos"}))
@np.errstate(all="ignore")
def test_functions_of_hostile_floats(kind: str) -> None:
    (y,) = run(kind, [HOSTILE], [(HOSTILE.shape, "f4")])
    expected = UNARY[kind](HOSTILE.astype(np.float64)).astype(np.float32)
    if kind == "Gelu":  # -inf * 0
        expected[np.isneginf(HOSTILE)] = np.nan
    tolerance = {"Sigmoid": 1e-37, "Softplus": 1e-37, "Gelu": 2e-7}.get(kind, 1e-44)
    np.testing.assert_allclose(y, expected, rtol=6e-7, atol=tolerance)


def test_functions_with_a_parameter() -> None:
    x = _floats(5, 7)
    wide, spec = x.astype(np.float64), [(x.shape, "f4")]
    (y,) = run("Elu", [x], spec, {"alpha": 0.5})
    np.testing.assert_allclose(y, np.where(wide > 0, wide, 0.5 * np.expm1(wide)), rtol=1e-6)
    (y,) = run("LeakyRelu", [x], spec, {"alpha": -0.25})
    np.testing.assert_array_equal(y, np.where(x < 0, np.float32(-0.25) * x, x))
    (y,) = run("Gelu", [x], spec, {"approximate": "tanh"})
    exact = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize(("low", "high"), [(-110.0, 90.0), (-2.0, 2.0)])
def test_the_exponential_is_within_two_units_in_the_last_place(low: float, high: float) -> None:
    x = np.linspace(low, high, 20_001, dtype=np.float32)
    (y,) = run("Exp", [x], [(x.shape, "f4")])
    exact = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        finite = exact < np.finfo(np.float32).max
        assert np.all(y[~finite] == np.inf)
        assert np.all(np.abs(y[finite] - exact[finite]) <= 2 * np.spacing(exact[finite].astype(np.float32)))


@pytest.mark.parametrize("dtype", ["i8", "i4"])
@pytest.mark.parametrize("kind", ["Abs", "Neg", "Sign", "Relu"])
@np.errstate(all="ignore")
def test_functions_of_an_integer(kind: str, dtype: str) -> None:
    info = np.iinfo(dtype)
    x = np.array([info.min, -3, 0, 4, info.max], dtype)
    (y,) = run(kind, [x], [(x.shape, dtype)])
    np.testing.assert_array_equal(y, UNARY[kind](x))


def test_predicates_of_one_tensor() -> None:
    (y,) = run("IsNaN", [HOSTILE], [(HOSTILE.shape, "?")])
    np.testing.assert_array_equal(y, np.isnan(HOSTILE))
    (y,) = run("Not", [np.array([True, False])], [((2,), "?")])
    np.testing.assert_array_equal(y, [False, True])


BINARY = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod"]
PREDICATES = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"}
SHAPES = [
    ((37, 45), (37, 45)), ((37, 45), ()), ((), (37, 45)), ((37, 45), (45,)), ((37, 45), (37, 1)), ((37, 1), (1, 45)),
    ((4, 33, 16), (1, 33, 16)), ((4, 33, 16), (1, 33, 1)), ((2, 1, 3, 1, 5, 40), (3, 4, 1, 1)), ((0, 4), (1, 4)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["f4", "i8", "i4"])
@pytest.mark.parametrize("kind", BINARY)
def test_two_tensors_broadcast(kind: str, dtype: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    make = _floats if dtype == "f4" else lambda *shape, seed: _integers(*shape, dtype=dtype, seed=seed)
    a, b = make(*shapes[0], seed=1), make(*shapes[1], seed=2)
    b = np.where(b == 0, b.dtype.type(3), b)
    attributes = {"fmod": 1} if (kind, dtype) == ("Mod", "f4") else {}
    (expected,) = onnx_outputs(kind, [a, b], attributes)
    (y,) = run(kind, [a, b], [(expected.shape, "?" if kind in PREDICATES else dtype)], attributes)
    np.testing.assert_array_equal(y, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shapes_and_layouts_broadcast(data: st.DataObject) -> None:
    target = data.draw(st.lists(st.integers(0, 5), max_size=6))
    inputs = []
    for seed in range(data.draw(st.integers(2, 4))):
        rank = data.draw(st.integers(0, len(target)))
        ones = data.draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
        shape = [1 if one else size for one, size in zip(ones, target[len(target) - rank :], strict=True)]
        inputs.append(laid_out(_floats(*shape, seed=seed), data.draw(st.sampled_from(LAYOUTS))))
    layout = data.draw(st.sampled_from(LAYOUTS))
    wide = [np.broadcast_to(x, target) for x in inputs]
    (y,) = run("Sum", inputs, [(target, "f4")], output_layout=layout)
    expected = wide[0]
    for other in wide[1:]:
        expected = expected + other
    np.testing.assert_array_equal(y, expected)
    chosen = np.array(wide[0] > 0, order="C")
    (y,) = run("Where", [chosen, inputs[0], inputs[1]], [(target, "f4")], output_layout=layout)
    np.testing.assert_array_equal(y, np.where(chosen, wide[0], wide[1]))
    (y,) = run("Sub", [wide[0], inputs[1]], [(target, "f4")], output_layout=layout)
    np.testing.assert_array_equal(y, wide[0] - wide[1])


@pytest.mark.parametrize("kind", ["And", "Or", "Xor", "Equal"])
def test_booleans(kind: str) -> None:
    a, b = np.array([[True], [False]]), np.array([True, False])
    (expected,) = onnx_outputs(kind, [a, b], {})
    # Any byte but 0 is true.
    (y,) = run(kind, [(a * np.uint8(2)).view("?"), b], [((2, 2), "?")])
    np.testing.assert_array_equal(y.view("u1"), expected)


@pytest.mark.parametrize("dtype", ["i8", "i4"])
def test_integer_arithmetic_is_defined_everywhere(dtype: str) -> None:
    info = np.iinfo(dtype)
    a = np.array([info.min, info.min, 5, -5, 5, -5, info.max, 7], dtype)
    b = np.array([-1, 0, 0, 3, -3, -3, 2, -1], dtype)
    spec = [(a.shape, dtype)]
    np.testing.assert_array_equal(run("Div", [a, b], spec)[0], [info.min, 0, 0, -1, -1, 1, info.max // 2, -7])
    np.testing.assert_array_equal(run("Mod", [a, b], spec)[0], [0, 0, 0, 1, -1, -2, 1, 0])
    np.testing.assert_array_equal(run("Mod", [a, b], spec, {"fmod": 1})[0], [0, 0, 0, -2, 2, -2, 1, 0])
    with np.errstate(over="ignore"):
        for kind, function in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply)):
            np.testing.assert_array_equal(run(kind, [a, b], spec)[0], function(a, b))


def test_the_remainder_of_floats_has_the_divisors_sign_unless_asked_otherwise() -> None:
    a, b = np.array([5.5, -5.5, 5.5, 6.0], "f4"), np.array([2.0, 2.0, -2.0, -3.0], "f4")
    np.testing.assert_array_equal(run("Mod", [a, b], [((4,), "f4")])[0], np.mod(a, b))
    np.testing.assert_array_equal(run("Mod", [a, b], [((4,), "f4")], {"fmod": 1})[0], np.fmod(a, b))


def test_extremes_of_nan_are_nan() -> None:
    a, b = np.array([np.nan, 1, 2], "f4"), np.array([1, np.nan, 3], "f4")
    np.testing.assert_array_equal(run("Max", [a, b], [((3,), "f4")])[0], [np.nan, np.nan, 3])
    np.testing.assert_array_equal(run("Min", [a, b, b], [((3,), "f4")])[0], [np.nan, np.nan, 2])


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -0.5, 0.0, 1.7])
def test_powers_of_floats(exponent: float) -> None:
    x = np.abs(_floats(40, 30)) + np.float32(0.01)
    (y,) = run("Pow", [x, np.array(exponent, "f4")], [(x.shape, "f4")])
    np.testing.assert_allclose(y, np.power(x.astype("f8"), exponent), rtol=3e-7)
    (each,) = run("Pow", [x, np.full(x.shape, exponent, "f4")], [(x.shape, "f4")])
    assert each.tobytes() == y.tobytes()
    if exponent == int(exponent):
        (y,) = run("Pow", [x, np.array(exponent, "i8")], [(x.shape, "f4")])
        np.testing.assert_allclose(y, np.power(x.astype("f8"), exponent), rtol=3e-7)


def test_powers_of_integers() -> None:
    base = np.array([2, -3, 7, 0, 1, -1, -1, 5, 10, 3], "i8")
    exponent = np.array([10, 3, 0, 0, -5, -4, -5, -1, 25, 1], "i8")
    with np.errstate(over="ignore"):
        expected = [1024, -27, 1, 1, 1, 1, -1, 0, int(np.power(base[8:9], exponent[8:9])[0]), 3]
    np.testing.assert_array_equal(run("Pow", [base, exponent], [((10,), "i8")])[0], expected)
    (y,) = run("Pow", [np.array([4, 9, -1], "i4"), np.array([0.5, 0.5, 0.5], "f4")], [((3,), "i4")])
    np.testing.assert_array_equal(y, [2, 3, 0])


def test_prelu() -> None:
    x, slope = _floats(3, 4), np.array([0.1, 0.2, 0.3, -1.0], "f4")
    np.testing.assert_array_equal(run("PRelu", [x, slope], [(x.shape, "f4")])[0], np.where(x < 0, x * slope, x))


@pytest.mark.parametrize("limits", [(-1.0, 2.0), (None, 1.0), (0.5, None), (3.0, -3.0), (None, None)], ids=str)
@pytest.mark.parametrize("dtype", ["f4", "i8", "i4"])
def test_clip(dtype: str, limits: tuple[float | None, float | None]) -> None:
    x = _floats(37, 33).astype(dtype)
    low, high = (None if v is None else np.array(v, dtype) for v in limits)
    expected = x if low is None else np.maximum(x, low)
    expected = expected if high is None else np.minimum(expected, high)
    for layout in LAYOUTS:
        (y,) = run("Clip", [laid_out(x, layout), low, high], [(x.shape, dtype)])
        np.testing.assert_array_equal(y, expected)


def test_clip_keeps_nan() -> None:
    low, high = np.array(-1.0, "f4"), np.array([1.0], "f4")
    (y,) = run("Clip", [HOSTILE, low, high], [(HOSTILE.shape, "f4")])
    np.testing.assert_array_equal(y, np.clip(HOSTILE, -1, 1))
    for limits in ([np.array(np.nan, "f4"), high], [low, np.array(np.nan, "f4")]):
        assert np.all(np.isnan(run("Clip", [HOSTILE, *limits], [(HOSTILE.shape, "f4")])[0]))


@pytest.mark.parametrize("dtype", ["f4", "f2", "i8", "i4", "i1", "u1", "?"])
def test_where_takes_any_type(dtype: str) -> None:
    condition = _floats(40, 1) > 0
    a, b = _integers(40, 31, dtype=dtype, seed=1), _integers(31, dtype=dtype, seed=2)
    for layout in LAYOUTS:
        (y,) = run("Where", [condition, laid_out(a, layout), b], [(a.shape, dtype)])
        np.testing.assert_array_equal(y, np.where(condition, a, b))
    each = _integers(40, 31, dtype="?", seed=3)
    for yes, no in ((a, np.flip(a).copy()), (a[0, 0], a), (a, a[0, 0])):
        (y,) = run("Where", [each, np.array(yes), np.array(no)], [(a.shape, dtype)])
        np.testing.assert_array_equal(y, np.where(each, yes, no))


CASTS = ["f4", "f2", "i8", "i4", "i1", "u1", "?"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("to", CASTS)
@pytest.mark.parametrize("source", CASTS)
def test_casts_between_types(source: str, to: str, layout: str) -> None:
    x = np.random.default_rng(0).uniform(0, 100, (37, 33)).astype(source)
    (y,) = run("Cast", [laid_out(x, layout)], [(x.shape, to)], {"to": 0})
    np.testing.assert_array_equal(y, x.astype(to))


def test_casts_to_half_precision_round_to_nearest() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    x = np.concatenate([bits.view("f4"), HOSTILE, np.array([65519.9, 65520.0, 6e-8, 2.9e-8], "f4")])
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(run("Cast", [x], [(x.shape, "f2")])[0], x.astype("f2"))
    (brain,) = run("Cast", [x], [(x.shape, "u2")])
    wide = x.view("u4").astype("u8")
    rounded = ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("u2")
    np.testing.assert_array_equal(brain[~np.isnan(x)], rounded[~np.isnan(x)])
    (back,) = run("Cast", [brain], [(x.shape, "f4")])
    np.testing.assert_array_equal(back, (brain.astype("u4") << 16).view("f4"))
    assert np.all(np.isnan(back[np.isnan(x)]))


def test_every_float16_widens_exactly() -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view("f2")
    np.testing.assert_array_equal(run("Cast", [x], [(x.shape, "f4")])[0], x.astype("f4"))


@pytest.mark.parametrize("to", ["i8", "i4", "i1", "u1"])
def test_floats_out_of_an_integers_range_take_the_nearest(to: str) -> None:
    info = np.iinfo(to)
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.0**63, -(2.0**63), 1.9, -0.9], "f4")
    low, high = info.min, info.max
    (y,) = run("CastLike", [x, np.zeros((), to)], [(x.shape, to)])
    np.testing.assert_array_equal(y, [0, high, low, high, low, high, low, 1, 0])


def test_integers_wrap_around_and_nan_is_true() -> None:
    x = np.array([300, -129, 1 << 40, -1], "i8")
    for to in ("i4", "i1", "u1"):
        np.testing.assert_array_equal(run("Cast", [x], [(x.shape, to)])[0], x.astype(to))
    (y,) = run("Cast", [np.array([np.nan, 0.0, -0.0, 0.1], "f4")], [((4,), "?")])
    np.testing.assert_array_equal(y, [True, False, False, True])


@pytest.mark.parametrize("kind", ["Exp", "Tanh", "Sigmoid", "Gelu", "Softplus", "Mul", "Max", "Pow"])
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    x, other = np.abs(_floats(33, 65)), np.abs(_floats(65, seed=1))
    extra = [other] if kind in ("Mul", "Max", "Pow") else []
    (whole,) = run(kind, [x, *extra], [(x.shape, "f4")])
    for row in (0, 7, 32):
        (alone,) = run(kind, [x[row : row + 1], *extra], [((1, 65), "f4")])
        assert alone.tobytes() == whole[row].tobytes()


@pytest.mark.parametrize("kind", ["Tanh", "Clip", "Add", "Sum", "Where", "Copy", "Cast"])
def test_the_output_may_be_an_input(kind: str) -> None:
    x, other = _floats(40, 41), _floats(40, 1, seed=1)
    inputs: list[Array] = {
        "Tanh": [x], "Clip": [x], "Add": [other, x], "Sum": [other, x, x], "Where": [other > 0, x, other],
        "Copy": [x], "Cast": [x],
    }[kind]  # fmt: skip
    (expected,) = run(kind, inputs, [(x.shape, "f4")])
    shared = x.copy()
    run_operation(kind, [shared if a is x else a for a in inputs], [shared], {}, threads=3)
    assert shared.tobytes() == expected.tobytes()


F = np.float32


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "message"),
    [
        ("Add", [np.zeros((2, 3), F), np.zeros((2, 4), F)], np.zeros((2, 4), F), {}, "does not broadcast"),
        ("Add", [np.zeros(3, F), np.zeros(3, "i8")], np.zeros(3, F), {}, "expected the type f32"),
        ("Add", [np.zeros(3, F)], np.zeros(3, F), {}, "1 inputs, expected 2"),
        ("Add", [np.zeros(3, F), None], np.zeros(3, F), {}, "input 1 is missing"),
        ("Add", [np.zeros(3, F), np.zeros(3, F)], None, {}, "output 0 is missing"),
        ("Add", [np.zeros(3, "?"), np.zeros(3, "?")], np.zeros(3, "?"), {}, "types it does not take"),
        ("Less", [np.zeros(3, F), np.zeros(3, F)], np.zeros(3, F), {}, "of the types bool"),
        ("Exp", [np.zeros(3, "i8")], np.zeros(3, "i8"), {}, "does not take"),
        ("Exp", [np.zeros(3, F)], np.zeros(4, F), {}, "does not broadcast"),
        ("Not", [np.zeros(3, F)], np.zeros(3, "?"), {}, "does not take"),
        ("Gelu", [np.zeros(3, F)], np.zeros(3, F), {"approximate": "sometimes"}, "'none' or 'tanh'"),
        ("Elu", [np.zeros(3, F)], np.zeros(3, F), {"alpha": "one"}, "is not a number"),
        ("Clip", [np.zeros(3, F), np.zeros(3, F)], np.zeros(3, F), {}, "single element"),
        ("Max", [], np.zeros(3, F), {}, "0 inputs"),
        ("Sum", [np.zeros(3, F), np.zeros(3, F), np.zeros(3, "i8")], np.zeros(3, F), {}, "expected the type f32"),
        ("Where", [np.zeros(3, F), np.zeros(3, F), np.zeros(3, F)], np.zeros(3, F), {}, "of the types bool"),
        ("Pow", [np.zeros(3, "?"), np.zeros(3, F)], np.zeros(3, "?"), {}, "types it does not take"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    kind: str, inputs: list[Array | None], output: Array | None, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, [output], attributes)


def test_sizes_that_depend_on_different_things_do_not_broadcast() -> None:
    program = _cpu.Program(1)
    tokens, twice, rows = (
        _cpu.operand("f32", [size, (4, 0)], [(4, 0), (1, 0)], 0) for size in ((1, 1), (2, 1), (1, 2))
    )
    program.add("Add", "fits", [tokens, tokens], [tokens], {})
    for other in (twice, rows):
        with pytest.raises(_cpu.BlueprintError, match=r"f32\[T, 4\]"):
            program.add("Add", "does not", [tokens, other], [tokens], {})
