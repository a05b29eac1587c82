"""Operations on rows of the CPU backend (norms, gates, quantization, rotation) against numpy in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import run_operation

Array = NDArray[Any]
Float = NDArray[np.float32]

ISAS = _cpu.available_isas()
ROWS = (1, 2, 7, 8, 33)
WIDTHS = (1, 5, 16, 63, 64, 100, 576)
GROUPS = (1, 8, 24, 32, 60, 64, 128, 200, -1)
EPSILON = 1e-5

erf = np.vectorize(math.erf)
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def random(*shape: int) -> Float:
    """Rows of different magnitude, the same for the same shape."""
    rng = np.random.default_rng(shape)
    magnitude = 10.0 ** rng.uniform(-2, 2, (*shape[:-1], 1))
    return (rng.standard_normal(shape) * magnitude).astype(np.float32)


def apart(x: Float) -> Float:
    """The same rows as a view of a wider array."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan, dtype=np.float32)
    view = wide[..., 1:-2]
    view[...] = x
    return view


def blocks(features: int, group: int, whole: bool = False) -> list[tuple[int, int]]:
    """First and last-plus-one feature of every block of a row."""
    if whole:
        return [(0, features)]
    group = features if group == -1 else min(group, features)
    length = -(-group // -(-group // 32))
    return [
        (start, min(start + length, group_start + group, features))
        for group_start in range(0, features, group)
        for start in range(group_start, min(group_start + group, features), length)
    ]


class Quantized:
    """The three outputs of quantized rows, filled with what no operation writes there."""

    def __init__(self, rows: int, features: int, group: int, whole: bool = False) -> None:
        self.blocks = blocks(features, group, whole)
        count, row_bytes = _cpu.block_layout(features, features if group == -1 else group, whole)
        assert count == len(self.blocks)
        self.stride = row_bytes // count
        self.outputs: list[Array] = [
            np.full((rows, row_bytes), 99, np.int8),
            np.full((rows, count), 99, np.float32),
            np.full((rows, count), 99, np.int32),
        ]

    def check(self, y: Float, static_scale: float | None = None) -> None:
        """Hold them to the definition, exactly, for the float32 rows `y` that they came from."""
        values, scales, sums = self.outputs
        for b, (start, stop) in enumerate(self.blocks):
            block = y[:, start:stop]
            amax = np.abs(block).max(1, keepdims=True)
            q = values[:, b * self.stride : (b + 1) * self.stride]
            assert not q[:, stop - start :].any()
            np.testing.assert_array_equal(q.sum(1, dtype=np.int64), sums[:, b])
            if static_scale is not None:
                inverse = np.float32(1) / np.float32(static_scale)
                np.testing.assert_array_equal(scales[:, b], np.float32(static_scale))
            else:
                amax[amax < 2.0**-100] = 0  # whose inverse would overflow
                inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
                np.testing.assert_array_equal(scales[:, b], amax[:, 0] / np.float32(127))
            expected = np.clip(np.rint(block * inverse), -127 if static_scale is None else -128, 127)
            np.testing.assert_array_equal(q[:, : stop - start], expected)


def same_bits(a: list[Array], b: list[Array]) -> None:
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def normalized(kind: str, x: Array, scale: Array | None, bias: Array | None) -> Array:
    x = x.astype(np.float64)
    y: Array
    if "RMS" in kind:
        y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPSILON)
    else:
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    y = y if scale is None else y * scale
    y = y if bias is None else y + bias
    return y


NORMS = ("RMSNormalization", "AddRMSNormalization", "LayerNormalization", "AddLayerNormalization")


def norm_inputs(kind: str, x: Array, residual: Array, scale: Array | None, bias: Array | None) -> list[Array | None]:
    inputs: list[Array | None] = [x, *([residual] if kind.startswith("Add") else []), scale]
    return inputs if "RMS" in kind else [*inputs, bias]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("threads", [1, 2])
def test_norms_match_float64(kind: str, threads: int, isa: str) -> None:
    adds = kind.startswith("Add")
    for rows, n in itertools.product(ROWS, WIDTHS):
        x, residual = apart(random(rows, n)), random(rows, n)
        scale, bias = (random(1, n)[0], random(2, n)[1]) if n % 2 else (None, None)
        y, total = apart(np.zeros((rows, n), np.float32)), np.zeros((rows, n), np.float32) if adds else None
        outputs = [y, total, None, None, None]
        inputs = norm_inputs(kind, x, residual, scale, bias)
        run_operation(kind, inputs, outputs, {"epsilon": EPSILON}, threads=threads, isa=isa)
        summed = x + residual if adds else x
        if total is not None:
            np.testing.assert_array_equal(total, summed)
        expected = normalized(kind, summed, scale, None if "RMS" in kind else bias)
        magnitude = np.abs(expected).max() + 1
        # A row whose values are all alike loses digits of its variance.
        np.testing.assert_allclose(y, expected, rtol=0, atol=(4e-6 if n > 1 else 1e-3) * magnitude)
        assert y.base is not None and np.isnan(y.base).sum() == y.base.size - y.size


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", NORMS)
def test_norms_quantize_what_they_would_write(kind: str, isa: str) -> None:
    adds = kind.startswith("Add")
    for group, n in itertools.product(GROUPS, (8, 100, 577)):
        x, residual, scale, bias = random(3, n), random(3, n) / 2, random(1, n)[0], random(2, n)[1]
        inputs = norm_inputs(kind, x, residual, scale, bias)
        attributes = {"epsilon": EPSILON, "group": group}
        y, total = np.zeros_like(x), np.zeros_like(x) if adds else None
        both, alone = Quantized(3, n, group), Quantized(3, n, group)
        run_operation(kind, inputs, [y, total, *both.outputs], attributes, isa=isa)
        both.check(y)
        run_operation(kind, inputs, [None, None, *alone.outputs], attributes, isa=isa)
        same_bits(both.outputs, alone.outputs)


@pytest.mark.parametrize("isa", ISAS)
def test_norms_of_heads_within_a_wider_row(isa: str) -> None:
    packed = random(5, 12 * 40)
    x = packed[:, 4 * 40 : 10 * 40].reshape(5, 6, 40)
    assert x.base is not None
    y = np.zeros((5, 6, 40), np.float32)
    run_operation("RMSNormalization", [x, None], [y, None, None, None, None], {"epsilon": EPSILON}, isa=isa)
    np.testing.assert_allclose(y, normalized("RMS", x, None, None), rtol=2e-6, atol=1e-6)
    vector = np.zeros(40, np.float32)
    run_operation("RMSNormalization", [x[1, 2]], [vector, None, None, None, None], {"epsilon": EPSILON}, isa=isa)
    np.testing.assert_array_equal(vector, y[1, 2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [*NORMS, "Quantize", "GatedActivation"])
def test_rows_do_not_depend_on_their_company(kind: str, isa: str) -> None:
    n, rows = 300, 33
    x, residual, scale, bias = random(rows, n), random(rows, n), random(1, n)[0], random(2, n)[1]

    def run(part: slice, threads: int) -> list[Array]:
        count = len(range(*part.indices(rows)))
        quantized = Quantized(count, n // 2 if kind == "GatedActivation" else n, 32)
        attributes: dict[str, Any] = {"group": 32}
        inputs: list[Array | None] = [x[part]]
        outputs: list[Array | None] = [*quantized.outputs]
        if kind == "GatedActivation":
            attributes |= {"activation": "silu", "layout": "concat", "alpha": 1.0, "limit": 0.0}
            outputs = [None, *outputs]
        elif kind != "Quantize":
            attributes |= {"epsilon": EPSILON}
            inputs = norm_inputs(kind, x[part], residual[part], scale, bias)
            outputs = [None, None, *outputs]
        run_operation(kind, inputs, outputs, attributes, threads=threads, isa=isa)
        return quantized.outputs

    together = run(slice(None), 1)
    same_bits(together, run(slice(None), 2))
    for row in (0, 1, 17, 32):
        same_bits([part[row : row + 1] for part in together], run(slice(row, row + 1), 2))
    same_bits([part[3:20] for part in together], run(slice(3, 20), 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_quantize_follows_the_definition(threads: int, isa: str) -> None:
    for rows, n, group in itertools.product((1, 7), (1, 8, 20, 100, 576), GROUPS):
        x = random(rows, n)
        quantized = Quantized(rows, n, group)
        run_operation("Quantize", [apart(x)], quantized.outputs, {"group": group}, threads=threads, isa=isa)
        quantized.check(x)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [None, 24])
def test_quantize_with_a_static_scale(group: int | None, isa: str) -> None:
    x = random(9, 100)
    quantized = Quantized(9, 100, group or -1, whole=group is None)
    attributes: dict[str, Any] = {"static_scale": 0.05} | ({} if group is None else {"group": group})
    run_operation("Quantize", [x], quantized.outputs, attributes, isa=isa)
    quantized.check(x, static_scale=0.05)
    assert (np.abs(quantized.outputs[0]) == 127).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_show_in_the_scale(bad: float, static: bool, isa: str) -> None:
    for place in (0, 15, 16, 20, 31):
        x = random(2, 64)
        x[1, 32 + place] = bad
        quantized = Quantized(2, 64, 32)
        attributes: dict[str, Any] = {"group": 32} | ({"static_scale": 0.1} if static else {})
        run_operation("Quantize", [x], quantized.outputs, attributes, isa=isa)
        np.testing.assert_array_equal(np.isnan(quantized.outputs[1]), [[False, False], [False, True]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, 1e-38])
def test_blocks_of_nothing_are_zero(tiny: float, isa: str) -> None:
    x = np.full((1, 40), tiny, np.float32)
    quantized = Quantized(1, 40, 32)
    run_operation("Quantize", [x], quantized.outputs, {"group": 32}, isa=isa)
    assert not any(part.any() for part in quantized.outputs)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_magnitudes_reach_127(isa: str) -> None:
    for amax in (1e-30, 1.1754944e-20, 1.0, 3.3333333, 3.4e38):
        x = (np.linspace(-1, 1, 64) * amax).astype(np.float32)[None]
        quantized = Quantized(1, 64, 32)
        run_operation("Quantize", [x], quantized.outputs, {"group": 32}, isa=isa)
        assert quantized.outputs[0][0, 0] == -127 and quantized.outputs[0][0, 63] == 127


def gated(x: Array, activation: str, layout: str, alpha: float, limit: float) -> Array:
    x = x.astype(np.float64)
    gate, up = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else np.split(x, 2, axis=-1)
    if activation != "swiglu_clamped":
        return ACTIVATIONS[activation](gate) * up
    if limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    clamped: Array = (up + 1) * gate / (1 + np.exp(-alpha * gate))
    return clamped


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("threads", [1, 2])
def test_gates_match_float64(layout: str, threads: int, isa: str) -> None:
    for activation in [*ACTIVATIONS, "swiglu_clamped"]:
        for rows, n, limit in [(1, 1, 0.0), (2, 7, 2.5), (7, 100, 0.0), (1, 1500, 2.5), (5, 640, 2.5)]:
            x = np.random.default_rng(n).standard_normal((rows, 2 * n)).astype(np.float32) * 4
            y = apart(np.zeros((rows, n), np.float32))
            attributes = {"activation": activation, "layout": layout, "alpha": 1.702, "limit": limit}
            run_operation("GatedActivation", [apart(x)], [y, None, None, None], attributes, threads=threads, isa=isa)
            expected = gated(x, activation, layout, 1.702, limit)
            # An activation is right to 5e-7; what it gates is as large as x.
            np.testing.assert_allclose(y, expected, rtol=2e-6, atol=5e-7 * np.abs(x).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations_match_float64_everywhere(activation: str, isa: str) -> None:
    x = np.concatenate([np.linspace(-100, 100, 5001), np.linspace(-6, 6, 5001)]).astype(np.float32)[None]
    y = np.zeros_like(x)
    run_operation("Activation", [x], [y, None, None, None], {"activation": activation}, isa=isa)
    expected = ACTIVATIONS[activation](x.astype(np.float64))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=5e-7)
    nan = np.full((1, 20), np.nan, np.float32)
    run_operation("Activation", [nan], [nan, None, None, None], {"activation": activation}, isa=isa)
    assert np.isnan(nan).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2])
def test_gates_quantize_what_they_would_write(threads: int, isa: str) -> None:
    for group, (rows, n) in itertools.product(GROUPS, [(1, 3000), (3, 100), (2, 577)]):
        x = random(rows, 2 * n)
        attributes: dict[str, Any] = {"activation": "gelu", "layout": "concat", "alpha": 1.0, "limit": 0.0}
        attributes["group"] = group
        y, both, alone = np.zeros((rows, n), np.float32), Quantized(rows, n, group), Quantized(rows, n, group)
        run_operation("GatedActivation", [x], [y, *both.outputs], attributes, threads=threads, isa=isa)
        both.check(y)
        run_operation("GatedActivation", [x], [None, *alone.outputs], attributes, threads=threads, isa=isa)
        same_bits(both.outputs, alone.outputs)


@pytest.mark.parametrize("isa", ISAS)
def test_plain_activation_quantizes_what_it_would_write(isa: str) -> None:
    x = random(3, 700)
    y, quantized = np.zeros_like(x), Quantized(3, 700, 64)
    run_operation("Activation", [x], [y, *quantized.outputs], {"activation": "relu2", "group": 64}, isa=isa)
    quantized.check(y)


def _zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def _quantized(rows: int, row_bytes: int, count: int) -> list[Array | None]:
    return [_zeros(rows, row_bytes, dtype=np.int8), _zeros(rows, count), _zeros(rows, count, dtype=np.int32)]


X, VECTOR, NONE = _zeros(3, 8), _zeros(8), [None, None, None]
Q = _quantized(3, 8, 1)
RMS, ADD, GATE = "RMSNormalization", "AddLayerNormalization", "GatedActivation"


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "attributes", "message"),
    [
        (RMS, [None], [X, None, *NONE], {}, "x"),
        (RMS, [_zeros()], [_zeros(), None, *NONE], {}, "expected rows"),
        (RMS, [_zeros(3, 0)], [_zeros(3, 0), None, *NONE], {}, "positive last dimension"),
        (RMS, [_zeros(3, 16)[:, ::2]], [X, None, *NONE], {}, "contiguous rows"),
        (RMS, [X.astype(np.int64)], [X, None, *NONE], {}, "x is i64"),
        (RMS, [X, _zeros(7)], [X, None, *NONE], {}, "scale is"),
        (RMS, [X, _zeros(1, 8)], [X, None, *NONE], {}, "scale is"),
        (RMS, [X, VECTOR, VECTOR], [X, None, *NONE], {}, "3 inputs"),
        (RMS, [X], [X, None], {}, "2 outputs"),
        (RMS, [X], [_zeros(2, 8), None, *NONE], {}, "y is"),
        (RMS, [X], [X, X, *NONE], {}, "no residual"),
        (RMS, [X], [None, None, *NONE], {}, "neither"),
        (RMS, [X], [X, None, *NONE], {"epsilon": math.nan}, "not finite"),
        (RMS, [X], [X, None, *NONE], {"epsilon": -1.0}, "negative"),
        (RMS, [X], [X, None, *NONE], {"epsilon": "small"}, "wrong type"),
        (RMS, [X], [X, None, *Q[:2], None], {}, "together"),
        (RMS, [X], [X, None, *Q], {"group": 0}, "group is 0"),
        (RMS, [X], [X, None, *Q], {"group": -2}, "group is -2"),
        (RMS, [X], [X, None, *Q], {"group": 4}, "values is"),
        (RMS, [X], [X, None, *_quantized(2, 8, 1)], {}, "values is"),
        (RMS, [X], [X, None, _zeros(3, 16, dtype=np.int8)[:, :8], *Q[1:]], {}, "contiguous i8"),
        (RMS, [X], [X, None, Q[0], _zeros(3, 2), Q[2]], {}, "scales is"),
        (RMS, [X], [X, None, Q[0], Q[1], _zeros(3, 1)], {}, "sums is f32"),
        (ADD, [X], [X, None, *NONE], {}, "residual"),
        (ADD, [X, _zeros(1, 8)], [X, None, *NONE], {}, "residual is"),
        (ADD, [X, X, None, _zeros(9)], [X, None, *NONE], {}, "bias is"),
        (ADD, [X, X], [X, _zeros(3, 9), *NONE], {}, "sum is"),
        ("Quantize", [X], NONE, {}, "no output"),
        ("Quantize", [X], Q, {"static_scale": 0.0}, "positive"),
        ("Quantize", [X], Q, {"static_scale": -1.0}, "positive"),
        ("Quantize", [X], Q, {"static_scale": 1e-45}, "positive"),
        ("Quantize", [X], Q, {"static_scale": math.inf}, "not finite"),
        (GATE, [_zeros(3, 7)], [_zeros(3, 3), *NONE], {}, "even"),
        (GATE, [X], [X, *NONE], {}, "y is"),
        (GATE, [X], [None, *NONE], {}, "neither"),
        (GATE, [X], [_zeros(3, 4), *NONE], {"activation": "softsign"}, "softsign"),
        (GATE, [X], [_zeros(3, 4), *NONE], {"layout": "odd"}, "layout is odd"),
        (GATE, [X], [_zeros(3, 4), *NONE], {"limit": -1.0}, "limit is negative"),
        (GATE, [X], [_zeros(3, 4), *NONE], {"alpha": math.inf}, "alpha is not finite"),
        ("Activation", [X], [X, *NONE], {"activation": "swiglu_clamped"}, "swiglu_clamped"),
        ("Activation", [X, X], [X, *NONE], {}, "2 inputs"),
    ],
)
def test_malformed_operations_are_refused(
    kind: str, inputs: list[Array | None], outputs: list[Array | None], attributes: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"epsilon": EPSILON, "group": 8}
    if kind in (GATE, "Activation"):
        given |= {"activation": "silu", "layout": "concat", "alpha": 1.0, "limit": 0.0}
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation(kind, inputs, outputs, given | attributes)


def test_missing_attributes_are_refused() -> None:
    for kind, outputs in [(RMS, [X, None, *NONE]), (GATE, [_zeros(3, 4), *NONE]), ("Quantize", Q)]:
        with pytest.raises(_cpu.BlueprintError, match="attribute is missing"):
            run_operation(kind, [X], outputs, {})
