from __future__ import annotations

import onnx_ir as ir
import pytest

from inferencex.convert.passes.gating import fuse_gated_activations
from inferencex.convert.passes.weights import expression_of
from tests.convert.passes.graphs import TOKENS, Array, Builder, assert_equal, only, text, types

IN, INNER = 6, 5
SPELLINGS = ["silu", "silu, sigmoid first", "gelu", "gelu_tanh", "relu", "relu2", "relu2 as power", "sigmoid"]


def _activate(b: Builder, gate: ir.Value, how: str) -> ir.Value:
    match how:
        case "silu":
            return b.node("Mul", gate, b.node("Sigmoid", gate))
        case "silu, sigmoid first":
            return b.node("Mul", b.node("Sigmoid", gate), gate)
        case "gelu":
            return b.node("Gelu", gate)
        case "gelu_tanh":
            return b.node("Gelu", gate, approximate="tanh")
        case "relu":
            return b.node("Relu", gate)
        case "relu2":
            rectified = b.node("Relu", gate)
            return b.node("Mul", rectified, rectified)
        case "relu2 as power":
            return b.node("Pow", b.node("Relu", gate), b.constant(2.0))
        case "sigmoid":
            return b.node("Sigmoid", gate)
    raise AssertionError(how)


def _linear(b: Builder, x: ir.Value, name: str, bias: bool = False, features: int = INNER) -> ir.Value:
    biases = [b.parameter(f"{name}.bias", features)] if bias else []
    return b.node("Gemm", x, b.parameter(name, features, IN), *biases, transB=1)


def _halves(b: Builder, x: ir.Value, how: str) -> tuple[ir.Value, ir.Value]:
    if how == "split":
        gate, up = b.nodes("Split", x, b.constant([INNER, INNER]), axis=-1, outputs=2)
        return gate, up
    first, last, step = {
        "slices": ((0, INNER), (INNER, 2 * INNER), 1),
        "slices without end": ((0, INNER), (INNER, 2**63 - 1), 1),
        "interleaved": ((0, 2**63 - 1), (1, 2**63 - 1), 2),
    }[how]
    parts = [b.node("Slice", x, *(b.constant([n]) for n in (*bounds, 1, step))) for bounds in (first, last)]
    return parts[0], parts[1]


def _feeds(b: Builder, width: int = IN) -> dict[str, Array]:
    return {"x": 2 * b.random(TOKENS, width)}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("up_first", [False, True])
def test_two_linears_become_one_and_every_activation_is_named(spelling: str, up_first: bool) -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    up, gate = _linear(b, x, "up"), _linear(b, x, "gate")
    activated = _activate(b, gate, spelling)
    model = b.model(b.node("Mul", *((up, activated) if up_first else (activated, up))))
    feeds = _feeds(b)
    expected = b.evaluate(model, feeds)
    assert fuse_gated_activations(model) == 1
    found = {"Gemm": 1, "GatedActivation": 1}
    assert {k: n for k, n in types(model).items() if k != "Split"} == found
    gated = only(model, "GatedActivation")
    assert gated.attributes["activation"].value == spelling.split(",")[0].split(" ")[0]
    assert gated.attributes["layout"].value == "concat"
    assert gated.inputs[0] is only(model, "Gemm").outputs[0]
    assert expression_of(only(model, "Gemm").inputs[1]).parameters == ("gate", "up")  # type: ignore[arg-type]
    assert_equal(b.evaluate(model, feeds), expected)


@pytest.mark.parametrize("split", ["split", "slices", "slices without end", "interleaved"])
def test_a_packed_linear_is_left_alone(split: str) -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    gate, up = _halves(b, _linear(b, x, "gate_up", features=2 * INNER), split)
    model = b.model(b.node("Mul", _activate(b, gate, "silu"), up))
    feeds = _feeds(b)
    expected = b.evaluate(model, feeds)
    assert fuse_gated_activations(model) == 1
    assert types(model) == {"Gemm": 1, "GatedActivation": 1}
    layout = only(model, "GatedActivation").attributes["layout"].value
    assert layout == ("interleaved" if split == "interleaved" else "concat")
    assert_equal(b.evaluate(model, feeds), expected)


def test_biases_are_merged_too() -> None:
    b = Builder()
    x = b.input("x", ["tokens", IN])
    gate, up = _linear(b, x, "gate", bias=True), _linear(b, x, "up", bias=True)
    model = b.model(b.node("Mul", _activate(b, gate, "gelu"), up))
    feeds = _feeds(b)
    expected = b.evaluate(model, feeds)
    assert fuse_gated_activations(model) == 1
    assert only(model, "Gemm").inputs[2] is not None
    assert_equal(b.evaluate(model, feeds), expected)


def test_halves_the_other_way_round_stay() -> None:
    """A model whose second half is the gate: neither layout says that."""
    b = Builder()
    up, gate = _halves(b, b.input("x", ["tokens", 2 * INNER]), "split")
    model = b.model(b.node("Mul", _activate(b, gate, "silu"), up))
    before = text(model)
    assert fuse_gated_activations(model) == 0
    assert text(model) == before


@pytest.mark.parametrize("case", ["other inputs", "bias on one", "other widths", "silu alone", "plain product"])
def test_what_is_no_gate_stays(case: str) -> None:
    b = Builder()
    x, z = b.input("x", ["tokens", IN]), b.input("z", ["tokens", IN])
    gate = _linear(b, x, "gate")
    up = {
        "other inputs": lambda: _linear(b, z, "up"),
        "bias on one": lambda: _linear(b, x, "up", bias=True),
        "other widths": lambda: _linear(b, x, "up", features=1),
    }.get(case, lambda: _linear(b, x, "up"))()
    if case == "silu alone":
        model = b.model(_activate(b, gate, "silu"), _activate(b, up, "silu, sigmoid first"))
    elif case == "plain product":
        model = b.model(b.node("Mul", gate, up))
    else:
        model = b.model(b.node("Mul", _activate(b, gate, "silu"), up))
    before = text(model)
    assert fuse_gated_activations(model) == 0
    assert text(model) == before


def test_a_thirds_split_stays() -> None:
    b = Builder()
    x = b.input("x", ["tokens", 6])
    gate, up, _ = b.nodes("Split", x, b.constant([2, 2, 2]), axis=-1, outputs=3)
    model = b.model(b.node("Mul", _activate(b, gate, "silu"), up))
    assert fuse_gated_activations(model) == 0
