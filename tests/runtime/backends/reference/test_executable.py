from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.operators import OPERATORS
from tests.runtime.backends.reference import steps
from tests.runtime.backends.reference.steps import VOCAB, Model, initializer

WIDTH = 6


def _step(model: ir.Model, tokens: int = 5, **kwargs: bool) -> np.ndarray:
    sequences = steps.random_sequences(tokens)
    return steps.compiled(model, **kwargs).step(steps.batch([(0, 0, tokens)], sequences, steps.tables([tokens])))


def test_an_operator_without_torch_code_runs_through_onnx() -> None:
    m = Model()
    assert ("", "Softsign") not in OPERATORS
    x = m.embed(WIDTH)
    model = m.finish(m.node("Softsign", x, shape=["tokens", WIDTH]), WIDTH)
    plain = Model()
    expected = _step(plain.finish(plain.embed(WIDTH), WIDTH))
    np.testing.assert_allclose(_step(model), expected / (1 + np.abs(expected)), rtol=1e-6)


@pytest.mark.parametrize(("op_type", "domain"), [("Softsgn", ""), ("Mystery", "somewhere.else")])
def test_an_unknown_operator_is_named(op_type: str, domain: str) -> None:
    m = Model()
    y = m.node(op_type, m.embed(WIDTH), shape=["tokens", WIDTH], domain=domain)
    with pytest.raises(BackendError, match=f"{domain or 'ai.onnx'}::{op_type}"):
        _step(m.finish(y, WIDTH))


def test_an_unknown_input_of_the_graph_is_named() -> None:
    m = Model()
    m.graph.inputs.append(
        ir.Value(name="attention_mask", shape=ir.Shape(["tokens"]), type=ir.TensorType(ir.DataType.INT64))
    )
    with pytest.raises(BackendError, match="attention_mask"):
        _step(m.finish(m.embed(WIDTH), WIDTH))


@pytest.mark.parametrize("keep", [True, False])
def test_weights_are_kept_or_dropped_and_the_result_is_the_same(keep: bool) -> None:
    m = Model()
    packed = initializer(m.graph, "packed", np.arange(-12, 12, dtype=np.int8).reshape(4, WIDTH))
    scale = m.weight(4, 2)
    weight = m.node("DequantizeLinear", packed, scale, shape=[4, WIDTH], axis=1, block_size=3)
    y = m.node("Gemm", m.embed(WIDTH), weight, shape=["tokens", 4], transB=1)
    model = m.finish(y, 4)
    executable = steps.compiled(model, keep_weights=keep)
    sequences = steps.random_sequences(5)
    results = [executable.step(steps.batch([(0, 0, 5)], sequences, steps.tables([5]))) for _ in range(2)]
    assert np.array_equal(results[0], results[1])
    assert executable.static.is_kept(str(weight.name)) == keep
    values = {str(v.name): v.const_value.numpy() for v in m.graph.initializers.values() if v.const_value is not None}
    scales, embedding = values[str(scale.name)], next(v for v in values.values() if len(v) == VOCAB)
    dense = np.arange(-12, 12).reshape(4, WIDTH) * np.repeat(scales, 3, axis=1)
    np.testing.assert_allclose(results[0], embedding[sequences[0]] @ dense.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [0, 3, 4])
def test_large_weights_are_used_some_rows_at_a_time(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups and linears on weights that are not kept read row blocks, with the result of reading all at once."""
    m = Model()
    values = initializer(m.graph, "packed", np.arange(-60, 60, dtype=np.int8).reshape(20, WIDTH))
    scale = m.weight(20, -(-WIDTH // groups)) if groups else m.weight(20)
    blocks = {"axis": 1, "block_size": groups} if groups else {"axis": 0}
    weight = m.node("DequantizeLinear", values, scale, shape=[20, WIDTH], **blocks)
    y = m.node("Gemm", m.embed(WIDTH), weight, m.weight(20), shape=["tokens", 20], transB=1)
    model = m.finish(y, 20)
    sequences = steps.random_sequences(5)
    batch = steps.batch([(0, 0, 5)], sequences, steps.tables([5]))
    whole = steps.compiled(model, keep_weights=True).step(batch)
    monkeypatch.setattr("inferencex.runtime.backends.reference.static_values.LARGE_ELEMENTS", 20)
    parts = steps.compiled(model, keep_weights=False)
    np.testing.assert_allclose(parts.step(batch), whole, rtol=1e-5, atol=1e-5)
    assert not parts.static.is_kept(str(weight.name))


def test_facts_are_read_off_the_graph() -> None:
    m = Model()
    executable = steps.compiled(m.finish(m.embed(WIDTH), WIDTH))
    assert executable.facts.vocab_size == WIDTH
    assert executable.facts.max_model_len == 64
    assert executable.facts.num_layers == executable.facts.bytes_per_token == 0


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([1.5, -2.0], np.float16), torch.float16),
        (np.array([1, -2], np.int8), torch.int8),
        (np.array([True, False]), torch.bool),
    ],
)
def test_tensors_keep_their_dtype(array: np.ndarray, dtype: torch.dtype) -> None:
    tensor = interpreter.to_tensor(ir.tensor(array))
    assert tensor.dtype == dtype
    assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (ir.DataType.BFLOAT16, [1.5, -2.0], torch.bfloat16),
        (ir.DataType.INT4, [-8, 7, 3], torch.int8),
        (ir.DataType.UINT4, [0, 15, 3], torch.uint8),
        (ir.DataType.FLOAT8E4M3FN, [1.5, -2.0], torch.float8_e4m3fn),
    ],
)
def test_packed_and_small_dtypes(dtype: ir.DataType, values: list[float], expected: torch.dtype) -> None:
    tensor = interpreter.to_tensor(ir.tensor(values, dtype=dtype))
    assert tensor.dtype == expected
    assert tensor.to(torch.float32).tolist() == values
