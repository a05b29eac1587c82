from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize
from inferencex.convert.passes.shapes import infer_shapes
from tests.architectures import zoo
from tests.convert.passes.graphs import Builder


def test_a_llama_becomes_what_the_dialect_has_for_it() -> None:
    config = zoo.tiny_config("llama", num_hidden_layers=2, tie_word_embeddings=False)
    result = optimize(capture(config), max_positions=32)
    assert result.ops_before["ReduceMean"] == 5
    assert {name: n for name, n in result.ops_after.items() if name != "Reshape"} == {
        "Gemm": 9,  # per layer: qkv, output, gate and up, down; and the head
        "RotaryEmbedding": 4,
        "inferencex::AddRMSNormalization": 4,
        "Gather": 3,  # embedding, and the sampled rows of the last attention and of the residual stream
        "Split": 2,
        "inferencex::Attention": 2,
        "inferencex::GatedActivation": 2,
        "RMSNormalization": 1,
    }
    assert list(result.ops_after.values()) == sorted(result.ops_after.values(), reverse=True)
    assert result.rewrites["norms"] == 5
    assert result.rewrites["residual norms"] == 4
    assert result.rewrites["merge projections"] == 2
    assert result.rewrites["gated activations"] == 2
    assert result.rewrites["rotary embeddings"] == 4
    assert "experts" not in result.rewrites


@pytest.mark.parametrize("op_type", ["Sigmoid", "Transpose", "Cast", "MatMul"])
def test_missing_shapes_are_filled_in(op_type: str) -> None:
    b = Builder()
    x = b.input("x", ["tokens", 4])
    inputs = [x, b.constant(b.random(4, 4))] if op_type == "MatMul" else [x]
    known: dict[str, dict[str, Any]] = {"Transpose": {"perm": [1, 0]}, "Cast": {"to": ir.DataType.INT64}}
    y = b.node(op_type, *inputs, **known.get(op_type, {}))
    b.graph.outputs.append(y)
    infer_shapes(ir.Model(b.graph, ir_version=11))
    assert str(y.shape) == ("[4,tokens]" if op_type == "Transpose" else "[tokens,4]")
    assert y.dtype == (ir.DataType.INT64 if op_type == "Cast" else ir.DataType.FLOAT)
