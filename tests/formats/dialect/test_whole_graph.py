"""Graphs of whole models pass the full check, and `onnx.reference` computes from them what transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from inferencex.convert.capture import capture
from inferencex.convert.passes import editing, optimize, weights
from inferencex.formats import dialect
from tests.architectures import zoo

# RMS and layer norms, gates, experts, sinks, soft-caps, windows, ALiBi, values narrower than keys, a shared head.
MODELS = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "qwen3_moe"]


def _proto(model: torch.nn.Module) -> onnx.ModelProto:
    config: Any = model.config
    optimized = optimize(capture(config), max_positions=64).model
    state = model.state_dict(keep_vars=True)
    for value in optimized.graph.initializers.values():
        if editing.is_weight(value):
            tensor = weights.expression_of(value).evaluate(lambda name: state[name].detach())
            value.const_value = ir.tensor(tensor.to(torch.float32).contiguous().numpy(), name=value.name)
    return ir.serde.serialize_model(optimized)


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_means_the_model(name: str) -> None:
    model = zoo.tiny_model(name)
    proto = _proto(model)
    dialect.register()
    onnx.checker.check_model(proto, full_check=True)
    tokens = np.random.default_rng(0).integers(0, 200, 11)
    rows = np.array([0, 4, 10])
    inputs = {"token_ids": tokens, "positions": np.arange(11), "logit_rows": rows, "prompt_lengths": np.full(11, 11)}
    feeds = {value.name: inputs[value.name] for value in proto.graph.input}
    logits: Any
    (logits,) = ReferenceEvaluator(proto, new_ops=dialect.new_ops()).run(None, feeds)
    expected = zoo.reference_logits(model, tokens.tolist())[rows]
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_graph_that_does_not_fit_together_is_refused() -> None:
    proto = _proto(zoo.tiny_model("llama"))
    attention = next(node for node in proto.graph.node if node.op_type == "Attention")
    heads = next(a for a in attention.attribute if a.name == "num_kv_heads")
    heads.i = 3
    dialect.register()
    with pytest.raises(onnx.shape_inference.InferenceError, match="not a multiple of 3"):
        onnx.checker.check_model(proto, full_check=True)
