"""Linears and feed-forward layers of experts, compared with the dialect's reference and with float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from inferencex.formats.dialect import reference
from inferencex.formats.dialect.schemas import DOMAIN, OPSET, VERSION
from inferencex.runtime.backends.cpu.native import _cpu
from tests.runtime.backends.cpu.operations import Argument, finish, operand, run_operation
from tests.runtime.backends.cpu.stored_weights import EPSILON, SPECS, Spec, StoredWeight, stored_weight

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
ISAS = _cpu.available_isas()
FEW_SPECS = (Spec("f32"), Spec("bf16"), Spec("int8"), Spec("int4", group=32, signed=False, zero_points=True))
INTEGER_SPECS = (
    Spec("int8"),
    Spec("int8", group=32),
    Spec("int4", group=32),
    Spec("int4", group=64, signed=False, zero_points=True),
    Spec("int3", group=64, signed=False, zero_points=True),
    Spec("int3", group=32),
    Spec("int5", group=64, signed=False, zero_points=True),
    Spec("int6", group=32),
    Spec("f4e2m1", group=16),
)


def expert_linear(
    x: Floats, ids: Indices, weight: StoredWeight, bias: Argument = None, *, threads: int = 1, **more: Any
) -> Floats:
    experts, channels, features = weight.exact.shape
    isa = more.pop("isa", None)
    y = np.full((len(x), channels), 7, dtype=np.float32)
    attributes = {"experts": experts, "channels": channels, "features": features, "max_tokens": len(x)}
    attributes |= weight.attributes | more
    run_operation("ExpertLinear", [x, ids, *weight.operands, bias], [y], attributes, threads=threads, isa=isa)
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_expert_linear_equals_float64(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(1)
    # Experts of an odd number of elements begin within a byte of 4-bit integers.
    for experts, channels, features in ((3, 33, 7), (5, 40, 64), (4, 75, 301)):
        weight = stored_weight(rng, (experts, channels, features), spec)
        bias = rng.standard_normal((experts, channels), dtype=np.float32)
        for rows in (1, 2, 7, 40):
            x = rng.standard_normal((rows, features), dtype=np.float32)
            ids = rng.integers(0, experts, rows)
            exact = np.einsum("mk,mnk->mn", x.astype(np.float64), weight.exact[ids]) + bias[ids]
            terms = np.einsum("mk,mnk->mn", np.abs(x), np.abs(weight.exact[ids])) + np.abs(bias[ids])
            y = expert_linear(x, ids, weight, bias, threads=2, isa=isa)
            assert np.all(np.abs(y - exact) <= 4 * EPSILON * terms)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", INTEGER_SPECS, ids=str)
def test_expert_linear_on_quantized_activations(spec: Spec, isa: str) -> None:
    rng = np.random.default_rng(2)
    weight = stored_weight(rng, (4, 70, 160), spec).for_integers()
    x = rng.standard_normal((50, 160), dtype=np.float32)
    ids = rng.integers(0, 4, 50)
    y = expert_linear(x, ids, weight, threads=2, isa=isa, integer=1)
    exact = np.einsum("mk,mnk->mn", x.astype(np.float64), weight.exact[ids])
    assert np.linalg.norm(y - exact) < 0.01 * np.linalg.norm(exact)
    for m in (0, 17, 49):
        alone = expert_linear(x[m : m + 1], ids[m : m + 1], weight, isa=isa, integer=1)
        assert np.array_equal(alone, y[m : m + 1])


@pytest.mark.parametrize("spec", FEW_SPECS, ids=str)
def test_a_row_of_an_expert_linear_does_not_depend_on_the_others(spec: Spec) -> None:
    rng = np.random.default_rng(3)
    weight = stored_weight(rng, (4, 70, 300), spec)
    x = rng.standard_normal((220, 300), dtype=np.float32)
    ids = rng.choice(4, 220, p=[0.9, 0.06, 0.03, 0.01])
    whole = expert_linear(x, ids, weight)
    assert np.array_equal(expert_linear(x, ids, weight, threads=3), whole)
    for m in range(0, 220, 9):
        assert np.array_equal(expert_linear(x[m : m + 1], ids[m : m + 1], weight, threads=2), whole[m : m + 1])


@pytest.mark.parametrize("expert", [-1, 3, 2**40, -(2**63)])
def test_a_row_without_expert_is_nan(expert: int) -> None:
    rng = np.random.default_rng(4)
    weight = stored_weight(rng, (3, 40, 64), Spec("bf16"))
    x = rng.standard_normal((4, 64), dtype=np.float32)
    y = expert_linear(x, np.array([0, expert, 2, 1]), weight, threads=2)
    assert np.all(np.isnan(y[1]))
    assert np.all(np.isfinite(y[[0, 2, 3]]))


@dataclass(frozen=True)
class Layer:
    """Experts with random weights; biases are optional."""

    gate_up: StoredWeight
    down: StoredWeight
    gate_up_bias: Floats | None
    down_bias: Floats | None
    gate: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        experts, hidden, inner = self.down.exact.shape
        return {"experts": experts, "hidden": hidden, "inner": inner}


def layer(
    spec: Spec, experts: int = 5, hidden: int = 96, inner: int = 72, *, bias: bool = True, seed: int = 5, **gate: Any
) -> Layer:
    rng = np.random.default_rng(seed)
    return Layer(
        stored_weight(rng, (experts, 2 * inner, hidden), spec),
        stored_weight(rng, (experts, hidden, inner), spec),
        rng.standard_normal((experts, 2 * inner), dtype=np.float32) if bias else None,
        rng.standard_normal((experts, hidden), dtype=np.float32) if bias else None,
        {"activation": "silu", "layout": "concat", "alpha": 1.702, "limit": 7.0} | gate,
    )


@dataclass(frozen=True)
class Tokens:
    """Rows with the experts they chose and those experts' weights."""

    x: Floats
    index: Indices
    weights: Floats

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.x[part], self.index[part], self.weights[part])


def tokens(rows: int, choices: int, hidden: int, experts: int, seed: int = 6) -> Tokens:
    """Return random tokens, most of which choose expert 0."""
    rng = np.random.default_rng(seed)
    p = np.array([0.6] + [0.4 / (experts - 1)] * (experts - 1))
    index = np.stack([rng.choice(experts, choices, replace=False, p=p) for _ in range(rows)])
    weights = rng.uniform(0.1, 1, (rows, choices)).astype(np.float32)
    return Tokens(rng.standard_normal((rows, hidden), dtype=np.float32), index, weights)


def run_layer(layer: Layer, tokens: Tokens, *, threads: int = 1, isa: str | None = None, **more: Any) -> Floats:
    y = np.full(tokens.x.shape, 7, dtype=np.float32)
    inputs: list[Argument] = [tokens.x, tokens.index, tokens.weights, *layer.gate_up.operands, *layer.down.operands]
    inputs += [layer.gate_up_bias, layer.down_bias]
    attributes = {**layer.sizes, **layer.gate, **layer.gate_up.attributes, "max_tokens": len(tokens.x), **more}
    run_operation("Experts", inputs, [y], attributes, threads=threads, isa=isa)
    return y


def expected_of(layer: Layer, tokens: Tokens) -> Floats:
    """Return what the dialect's reference computes on the dequantized weights."""
    names = ["x", "index", "weights", "gate_up", "down", "gate_up_bias", "down_bias"]
    weights = [layer.gate_up.exact.astype(np.float32), layer.down.exact.astype(np.float32)]
    arrays = [tokens.x, tokens.index, tokens.weights, *weights, layer.gate_up_bias, layer.down_bias]
    given = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    node = onnx.helper.make_node(
        "Experts", [name if name in given else "" for name in names], ["y"], domain=DOMAIN, **layer.gate
    )
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, tokens.x.shape)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, VERSION)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "experts", values, [y]), opset_imports=opsets)
    (found,) = ReferenceEvaluator(model, new_ops=reference.new_ops()).run(None, given)
    return np.asarray(found)


def assert_close(y: Floats, expected: Floats) -> None:
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_experts_equal_the_reference(spec: Spec, isa: str) -> None:
    for rows, choices, hidden, inner in ((1, 4, 96, 72), (2, 1, 33, 31), (7, 2, 64, 32), (40, 3, 65, 45)):
        experts = layer(spec, hidden=hidden, inner=inner)
        chosen = tokens(rows, choices, hidden, 5)
        assert_close(run_layer(experts, chosen, threads=2, isa=isa), expected_of(experts, chosen))


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2", "swiglu_clamped"])
@pytest.mark.parametrize("bias", [True, False])
def test_gates_of_experts(activation: str, layout: str, bias: bool) -> None:
    experts = layer(Spec("bf16"), bias=bias, activation=activation, layout=layout)
    chosen = tokens(9, 2, 96, 5)
    assert_close(run_layer(experts, chosen, threads=2), expected_of(experts, chosen))


def test_many_tokens() -> None:
    experts = layer(Spec("int4", group=32))
    chosen = tokens(512, 2, 96, 5)
    assert_close(run_layer(experts, chosen, threads=2), expected_of(experts, chosen))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", INTEGER_SPECS, ids=str)
def test_experts_on_quantized_activations(spec: Spec, isa: str) -> None:
    stored = layer(spec, hidden=128, inner=160)
    experts = replace(stored, gate_up=stored.gate_up.for_integers(), down=stored.down.for_integers())
    chosen = tokens(60, 2, 128, 5)
    y = run_layer(experts, chosen, threads=2, isa=isa, integer=1)
    expected = expected_of(experts, chosen)
    assert np.linalg.norm(y - expected) < 0.03 * np.linalg.norm(expected)
    assert np.array_equal(run_layer(experts, chosen, threads=3, isa=isa, integer=1), y)
    for m in (0, 31, 59):
        assert np.array_equal(run_layer(experts, chosen[m : m + 1], isa=isa, integer=1), y[m : m + 1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", FEW_SPECS, ids=str)
def test_a_token_does_not_depend_on_the_others(spec: Spec, isa: str) -> None:
    experts = layer(spec)
    chosen = tokens(150, 3, 96, 5)
    whole = run_layer(experts, chosen, isa=isa)
    for threads in (2, 3):
        assert np.array_equal(run_layer(experts, chosen, threads=threads, isa=isa), whole)
    for first, rows in ((0, 1), (149, 1), (5, 2), (20, 13), (40, 60)):
        part = slice(first, first + rows)
        assert np.array_equal(run_layer(experts, chosen[part], threads=2, isa=isa), whole[part])


@pytest.mark.parametrize("integer", [0, 1])
def test_a_token_that_chose_no_expert_is_nan(integer: int) -> None:
    experts = layer(Spec("int8"))
    chosen = tokens(6, 2, 96, 5)
    good = run_layer(experts, chosen, integer=integer)
    chosen.index[2, 1], chosen.index[4, 0] = 5, -1
    y = run_layer(experts, chosen, threads=2, integer=integer)
    assert np.all(np.isnan(y[[2, 4]]))
    kept = [0, 1, 3, 5]
    assert np.array_equal(y[kept], good[kept])
    chosen.index[...] = 99
    assert np.all(np.isnan(run_layer(experts, chosen, threads=2, integer=integer)))


def test_the_same_expert_twice() -> None:
    experts = layer(Spec("bf16"))
    chosen = tokens(4, 2, 96, 5)
    chosen.index[:, 1] = chosen.index[:, 0]
    assert_close(run_layer(experts, chosen), expected_of(experts, chosen))


def test_strided_operands() -> None:
    experts = layer(Spec("bf16"))
    chosen = tokens(20, 2, 96, 5)
    wide = np.zeros((20, 300), dtype=np.float32)
    wide[:, 100:196] = chosen.x
    choices = np.zeros((20, 7), dtype=np.int64)
    choices[:, 3:5] = chosen.index
    strided = Tokens(wide[:, 100:196], choices[:, 3:5], chosen.weights)
    assert np.array_equal(run_layer(experts, strided, threads=2), run_layer(experts, chosen))


def test_layers_share_their_working_memory() -> None:
    """Layers of one program, the second smaller and the third larger than the first."""
    program = _cpu.Program(2)
    expected, found = [], []
    for hidden, inner in ((96, 72), (32, 16), (128, 200)):
        experts, chosen = layer(Spec("bf16"), hidden=hidden, inner=inner), tokens(11, 2, hidden, 5)
        y = np.zeros((11, hidden), dtype=np.float32)
        inputs: list[Argument] = [chosen.x, chosen.index, chosen.weights]
        inputs += [*experts.gate_up.operands, *experts.down.operands, experts.gate_up_bias, experts.down_bias]
        attributes = {**experts.sizes, **experts.gate, **experts.gate_up.attributes, "max_tokens": 11}
        places = [operand(program, y)]
        program.add("Experts", "test", [operand(program, item) for item in inputs], places, attributes)
        expected.append(run_layer(experts, chosen))
        found.append(y)
    finish(program, 11)
    for _ in range(2):
        program.run()
        for y, wanted in zip(found, expected, strict=True):
            assert np.array_equal(y, wanted)
            y[...] = 7


def test_refuses_steps_larger_than_laid_out() -> None:
    program = _cpu.Program(1)
    experts, chosen = layer(Spec("bf16")), tokens(1, 2, 96, 5)
    inputs: list[Argument] = [chosen.x, chosen.index, chosen.weights]
    inputs += [*experts.gate_up.operands, *experts.down.operands]
    places = [operand(program, item) for item in inputs]
    for i, columns in enumerate((96, 2, 2)):
        dtype = "i64" if i == 1 else "f32"
        places[i] = _cpu.operand(dtype, [(1, 1), (columns, 0)], [(columns, 0), (1, 0)], 0)
    y = _cpu.operand("f32", [(1, 1), (96, 0)], [(96, 0), (1, 0)], 0)
    attributes = {**experts.sizes, **experts.gate, **experts.gate_up.attributes, "max_tokens": 16}
    program.add("Experts", "test", places, [y], attributes)
    logits = _cpu.operand("f32", [(0, 0), (0, 0)], [(0, 0), (0, 0)], 0)
    with pytest.raises(_cpu.BlueprintError, match="laid out for 16 rows"):
        program.prepare(1 << 16, 17, {}, logits, 16, 16)


def hostile() -> dict[str, tuple[dict[int, Argument], dict[str, Any], str]]:
    """Inputs to replace in a good blueprint, attributes to replace, and part of the message."""
    index, weights = np.zeros((6, 2), dtype=np.int64), np.zeros((6, 2), dtype=np.float32)
    return {
        "index of other rows": ({1: index[:5]}, {}, "index has another number of rows"),
        "index of int32": ({1: index.astype(np.int32)}, {}, "index has the wrong element type"),
        "index is a vector": ({1: index[:, 0].copy()}, {}, "index has rank 1"),
        "index without choices": ({1: index[:, :0].copy()}, {}, "index has 0 columns"),
        "weights of other choices": ({2: weights[:, :1].copy()}, {}, "weights has size 1"),
        "weights of other rows": ({2: weights[:5]}, {}, "weights has another number of rows"),
        "gate_up is missing": ({3: None}, {}, "weight is missing"),
        "gate_up is too short": ({3: np.zeros((5, 144, 95), dtype=np.int8)}, {}, "weight has 68400 elements"),
        "down is too short": ({6: np.zeros((4, 96, 72), dtype=np.int8)}, {}, "weight has 27648 elements"),
        "down has no scales": ({7: None}, {}, "needs scales"),
        "bias is too short": ({9: np.zeros((5, 143), dtype=np.float32)}, {}, "gate_up_bias has 715 elements"),
        "down bias is too long": ({10: np.zeros((6, 96), dtype=np.float32)}, {}, "down_bias has 576 elements"),
        "no experts": ({}, {"experts": 0}, "experts is 0"),
        "too many experts": ({}, {"experts": 2**40}, "experts is"),
        "other experts": ({}, {"experts": 6}, "weight has 69120 elements"),
        "another width": ({}, {"hidden": 97}, "x has size 96"),
        "absurd width inside": ({}, {"inner": 2**30 - 1}, "weight has 69120 elements|absurd size"),
        "overflowing width inside": ({}, {"inner": 2**40}, "inner is"),
        "no such activation": ({}, {"activation": "tan"}, "no activation called tan"),
        "no such format": ({}, {"format": "int2"}, "format is int2"),
        "quantized for floats": ({}, {"format": "bf16", "integer": 1}, "cannot be quantized|wrong element type"),
        "max_tokens is a string": ({}, {"max_tokens": "1"}, "wrong type"),
        "max_tokens is 0": ({}, {"max_tokens": 0}, "max_tokens is 0"),
    }


@pytest.mark.parametrize("case", hostile())
def test_refuses(case: str) -> None:
    inputs, attributes, message = hostile()[case]
    experts, chosen = layer(Spec("int8")), tokens(6, 2, 96, 5)
    operands: list[Argument] = [chosen.x, chosen.index, chosen.weights]
    operands += [*experts.gate_up.operands, *experts.down.operands, experts.gate_up_bias, experts.down_bias]
    for i, argument in inputs.items():
        operands[i] = argument
    attributes = {**experts.sizes, **experts.gate, "format": "int8", "max_tokens": 6, **attributes}
    y = np.zeros((6, 96), dtype=np.float32)
    with pytest.raises(_cpu.BlueprintError, match=message):
        run_operation("Experts", operands, [y], attributes)


def test_refuses_an_expert_linear_of_other_channels() -> None:
    weight = stored_weight(np.random.default_rng(7), (3, 40, 64), Spec("bf16"))
    x, ids = np.zeros((4, 64), dtype=np.float32), np.zeros(4, dtype=np.int64)
    with pytest.raises(_cpu.BlueprintError, match="y has size 40"):
        attributes = {"experts": 3, "channels": 41, "features": 64, "format": "bf16", "max_tokens": 4}
        run_operation("ExpertLinear", [x, ids, *weight.operands], [np.zeros((4, 40), dtype=np.float32)], attributes)
