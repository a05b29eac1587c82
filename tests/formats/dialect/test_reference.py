"""The numpy reference against hand-computed values and against the independent torch implementations."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.backends.reference import fused
from inferencex.runtime.backends.reference.attention import AttentionState
from tests.formats.dialect.nodes import evaluate

Array = NDArray[np.float32]
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu_clamped"]


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def _whole(tokens: int) -> StepBatch:
    """One whole sequence in one step, in one block."""
    return StepBatch(
        token_ids=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.zeros((1, 1), np.int32),
        logit_rows=np.arange(tokens, dtype=np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )


def _attend_in_torch(inputs: dict[str, Array | None], attributes: dict[str, Any]) -> Array:
    tensors = [None if x is None else torch.from_numpy(x) for x in inputs.values()]
    tokens = len(tensors[0])  # type: ignore[arg-type]
    state = AttentionState(1, tokens)
    state.begin(_whole(tokens))
    y: Array = state.run(tensors, attributes).numpy()
    return y


def _attention_inputs(tokens: int, heads: int, groups: int, dk: int, dv: int, **extra: bool) -> dict[str, Array | None]:
    return {
        "q": _random(tokens, heads * dk, seed=1),
        "k": _random(tokens, groups * dk, seed=2),
        "v": _random(tokens, groups * dv, seed=3),
        "sinks": _random(heads, seed=4) if extra.get("sinks") else None,
        "slopes": 0.3 * _random(heads, seed=5) if extra.get("slopes") else None,
    }


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    groups=st.sampled_from([1, 2, 3]),
    per_group=st.sampled_from([1, 2, 4]),
    dk=st.sampled_from([1, 4, 5]),
    dv=st.sampled_from([2, 3, 4]),
    window=st.sampled_from([0, 1, 2, 4, 100]),
    chunk=st.sampled_from([0, 1, 3, 4]),
    softcap=st.sampled_from([0.0, 0.7, 30.0]),
    scale=st.sampled_from([1.0, 0.25]),
    sinks=st.booleans(),
    slopes=st.booleans(),
)
def test_attention_equals_torch(
    tokens: int,
    groups: int,
    per_group: int,
    dk: int,
    dv: int,
    window: int,
    chunk: int,
    softcap: float,
    scale: float,
    sinks: bool,
    slopes: bool,
) -> None:
    heads = groups * per_group
    inputs = _attention_inputs(tokens, heads, groups, dk, dv, sinks=sinks, slopes=slopes)
    attributes = {
        "layer": 3,
        "num_heads": heads,
        "num_kv_heads": groups,
        "scale": scale,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
    }
    (y,) = evaluate("Attention", inputs, attributes)
    assert y.shape == (tokens, heads * dv)
    np.testing.assert_allclose(y, _attend_in_torch(inputs, attributes), atol=2e-5, rtol=1e-4)


def _uniform(tokens: int, **attributes: Any) -> Array:
    """Attend with equal scores over values that are the position: the mean of the positions that are seen."""
    x = np.zeros((tokens, 1), np.float32)
    v = np.arange(tokens, dtype=np.float32)[:, None]
    plain = {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "scale": 1.0}
    sinks = attributes.pop("sinks", None)
    (y,) = evaluate("Attention", {"q": x, "k": x, "v": v, "sinks": sinks}, plain | attributes)
    return np.asarray(y[:, 0])


def test_attention_is_causal() -> None:
    np.testing.assert_allclose(_uniform(5), [0, 0.5, 1, 1.5, 2])


def test_a_window_counts_the_query_itself() -> None:
    np.testing.assert_allclose(_uniform(5, window=1), [0, 1, 2, 3, 4])
    np.testing.assert_allclose(_uniform(5, window=2), [0, 0.5, 1.5, 2.5, 3.5])


def test_chunks_start_at_multiples() -> None:
    np.testing.assert_allclose(_uniform(5, chunk=2), [0, 0.5, 2, 2.5, 4])


def test_a_sink_takes_part_of_the_weight_and_adds_no_value() -> None:
    np.testing.assert_allclose(_uniform(3, sinks=np.zeros(1, np.float32)), [0, 1 / 3, 3 / 4], rtol=1e-6)


def test_alibi_lowers_the_score_of_earlier_keys() -> None:
    inputs = {
        "q": np.zeros((2, 1)),
        "k": np.zeros((2, 1)),
        "v": np.array([[0.0], [1.0]]),
        "s": None,
        "slopes": np.ones(1),
    }
    arrays = {n: None if x is None else x.astype(np.float32) for n, x in inputs.items()}
    (y,) = evaluate("Attention", arrays, {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "scale": 1.0})
    np.testing.assert_allclose(y[1, 0], 1 / (1 + np.exp(-1.0)), rtol=1e-6)


def test_the_softcap_bounds_scores_before_the_softmax() -> None:
    q, v = np.array([[1000.0], [1000.0]], np.float32), np.array([[0.0], [1.0]], np.float32)
    k = np.array([[0.0], [1.0]], np.float32)
    attributes = {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "scale": 1.0, "softcap": 2.0}
    (y,) = evaluate("Attention", {"q": q, "k": k, "v": v}, attributes)
    np.testing.assert_allclose(y[1, 0], 1 / (1 + np.exp(-2.0)), rtol=1e-6)


def test_query_heads_share_keys_in_consecutive_groups() -> None:
    q, k = np.zeros((1, 4), np.float32), np.zeros((1, 2), np.float32)
    v = np.array([[5.0, 7.0]], np.float32)
    (y,) = evaluate(
        "Attention", {"q": q, "k": k, "v": v}, {"layer": 0, "num_heads": 4, "num_kv_heads": 2, "scale": 1.0}
    )
    np.testing.assert_array_equal(y, [[5, 5, 7, 7]])


@pytest.mark.parametrize(("kv_type", "kept"), [(3, [0.5, -63.5, 63.5, 0.0]), (17, [0.46875, -104.0, 224.0, 2.0**-8])])
def test_values_are_kept_in_8_bits(kv_type: int, kept: list[float]) -> None:
    x = np.array([[0.46, -100.1, 230.0, 2.0**-8]], np.float32)
    attributes = {"layer": 0, "num_heads": 1, "num_kv_heads": 1, "scale": 1.0, "kv_type": kv_type}
    attributes |= {"key_scales": [1.0], "value_scales": [0.5]}
    (y,) = evaluate("Attention", {"q": x, "k": x, "v": x}, attributes)
    np.testing.assert_array_equal(y, [kept])


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("alpha", "limit"), [(1.0, 0.0), (1.702, 0.5)])
def test_gated_activation_equals_torch(activation: str, layout: str, alpha: float, limit: float) -> None:
    x = 3 * _random(6, 10)
    attributes = {"activation": activation, "layout": layout, "alpha": alpha, "limit": limit}
    (y,) = evaluate("GatedActivation", {"x": x}, attributes)
    expected = fused.gated_activation(torch.from_numpy(x), **attributes)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("activation", "gate", "expected"),
    [
        ("silu", 1.0, 0.7310586),
        ("gelu", 1.0, 0.8413447),
        ("gelu_tanh", 1.0, 0.8411920),
        ("relu", -2.0, 0.0),
        ("relu2", 3.0, 9.0),
        ("sigmoid", 0.0, 0.5),
        ("silu", -200.0, 0.0),
    ],
)
def test_values_of_the_activations(activation: str, gate: float, expected: float) -> None:
    (y,) = evaluate("GatedActivation", {"x": np.array([[gate, 2.0]], np.float32)}, {"activation": activation})
    np.testing.assert_allclose(y, [[2 * expected]], atol=1e-6)


def test_layouts_of_the_gate() -> None:
    x = np.array([[1.0, 2.0, 10.0, 20.0]], np.float32)
    (concat,) = evaluate("GatedActivation", {"x": x}, {"activation": "relu"})
    (interleaved,) = evaluate("GatedActivation", {"x": x}, {"activation": "relu", "layout": "interleaved"})
    np.testing.assert_array_equal(concat, [[10, 40]])
    np.testing.assert_array_equal(interleaved, [[2, 200]])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"activation": "silu", "layout": "rows"}, "layout is 'rows'"),
    ],
)
def test_unknown_names_are_refused(attributes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate("GatedActivation", {"x": _random(2, 4)}, attributes)


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_add_rms_norm_equals_torch(epsilon: float) -> None:
    x, residual, scale = _random(5, 12), _random(5, 12, seed=1), _random(12)
    got = evaluate("AddRMSNormalization", {"x": x, "r": residual, "s": scale}, {"epsilon": epsilon}, ["y", "sum"])
    expected = fused.add_rms_norm(*map(torch.from_numpy, (x, residual, scale)), epsilon)
    for y, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(y, other.numpy(), atol=1e-5)
    np.testing.assert_array_equal(got[1], x + residual)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
def test_add_layer_norm_equals_torch(epsilon: float, with_bias: bool) -> None:
    x, residual, scale = _random(5, 12), _random(5, 12, seed=1), _random(12)
    bias = _random(12, seed=2) if with_bias else None
    inputs = {"x": x, "r": residual, "s": scale, "b": bias}
    got = evaluate("AddLayerNormalization", inputs, {"epsilon": epsilon}, ["y", "sum"])
    tensors = [None if a is None else torch.from_numpy(a) for a in inputs.values()]
    for y, other in zip(got, fused.add_layer_norm(*tensors, epsilon), strict=True):
        np.testing.assert_allclose(y, other.numpy(), atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_expert_linear_equals_torch(with_bias: bool, dtype: type[np.integer[Any]]) -> None:
    x, weight, bias = _random(7, 6), _random(3, 5, 6), _random(3, 5)
    ids = np.array([2, 0, 0, 2, 1, 2, 0], dtype)
    (y,) = evaluate("ExpertLinear", {"x": x, "ids": ids, "w": weight, "b": bias if with_bias else None}, {})
    expected = fused.expert_linear(
        torch.from_numpy(x),
        torch.from_numpy(ids),
        torch.from_numpy(weight),
        torch.from_numpy(bias) if with_bias else None,
    )
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-5)


def test_expert_linear_of_no_rows() -> None:
    (y,) = evaluate("ExpertLinear", {"x": _random(0, 6), "ids": np.zeros(0, np.int64), "w": _random(3, 5, 6)}, {})
    assert y.shape == (0, 5)


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 5),
    k=st.integers(1, 3),
    activation=st.sampled_from(ACTIVATIONS),
    layout=st.sampled_from(["concat", "interleaved"]),
    limit=st.sampled_from([0.0, 0.4]),
    biases=st.booleans(),
)
def test_experts_equal_torch(tokens: int, k: int, activation: str, layout: str, limit: float, biases: bool) -> None:
    experts, width, inner = 4, 6, 5
    inputs: dict[str, NDArray[Any] | None] = {
        "x": _random(tokens, width),
        "index": np.random.default_rng(tokens).integers(0, experts, (tokens, k)),
        "weights": _random(tokens, k),
        "gate_up": _random(experts, 2 * inner, width),
        "down": _random(experts, width, inner),
        "gate_up_bias": _random(experts, 2 * inner) if biases else None,
        "down_bias": _random(experts, width) if biases else None,
    }
    attributes = {"activation": activation, "layout": layout, "alpha": 1.3, "limit": limit}
    (y,) = evaluate("Experts", inputs, attributes)
    tensors = [None if a is None else torch.from_numpy(a) for a in inputs.values()]
    expected = fused.experts(*tensors, **attributes)
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_result_has_the_dtype_of_the_activations(dtype: Any) -> None:
    x = _random(3, 8).astype(dtype)
    (y,) = evaluate("GatedActivation", {"x": x}, {"activation": "silu"})
    assert y.dtype == dtype
    (exact,) = evaluate("GatedActivation", {"x": x.astype(np.float32)}, {"activation": "silu"})
    np.testing.assert_array_equal(y, exact.astype(dtype))
