from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

from inferencex.convert.capture import capture, ops, routes
from inferencex.convert.passes import optimize
from inferencex.convert.passes.editing import is_weight
from inferencex.formats.errors import CaptureError
from tests.architectures import zoo


def test_the_interface_of_a_recording() -> None:
    config = zoo.tiny_config("llama")
    captured = capture(config)
    names = [str(v.name) for v in captured.model.graph.inputs]
    assert names[:3] == ["token_ids", "positions", "logit_rows"]
    tokens = captured.model.graph.inputs[0].shape
    assert tokens is not None and tokens[0] == 1 and not isinstance(tokens[1], int)
    (logits,) = captured.model.graph.outputs
    assert logits.shape is not None and logits.shape[-1] == config.vocab_size
    assert logits.dtype == ir.DataType.FLOAT


def test_initializers_have_the_names_of_the_checkpoint_and_no_values() -> None:
    captured = capture(zoo.tiny_config("llama", tie_word_embeddings=False))
    parameters = {name for name, _ in captured.module.named_parameters()}
    recorded = {n: v for n, v in captured.model.graph.initializers.items() if n in parameters}
    assert set(recorded) == parameters
    assert captured.aliases == {}
    optimized = optimize(captured, max_positions=16).model
    weights = [v for v in optimized.graph.initializers.values() if is_weight(v)]
    assert weights and all(v.const_value is None for v in weights)


def test_tied_weights_are_recorded_under_one_name() -> None:
    captured = capture(zoo.tiny_config("llama", tie_word_embeddings=True))
    assert captured.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    graph = optimize(captured, max_positions=16).model.graph
    assert "lm_head.weight" not in graph.initializers
    users = {use.node.op_type for use in graph.initializers["model.embed_tokens.weight"].uses()}
    assert users == {"Gather", "Gemm"}


def test_executing_the_recording_is_executing_the_model() -> None:
    """The opaque operators compute the real thing."""
    model: Any = zoo.tiny_model("llama")
    captured = capture(model.config)
    state = dict(model.state_dict())
    tokens, rows = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), torch.tensor([0, 5, 7])
    inputs = (tokens, torch.arange(8)[None], rows, torch.full((1, 8), 8))
    specs = captured.program.graph_signature.input_specs
    user = iter(inputs)
    flat = []
    for spec in specs:
        if spec.kind == torch.export.graph_signature.InputKind.USER_INPUT:
            flat.append(next(user))
        elif spec.target is not None and spec.target.removeprefix("model.") in state:
            flat.append(state[spec.target.removeprefix("model.")])
        else:
            stored = {**captured.program.state_dict, **captured.program.constants}
            flat.append(stored[spec.target] if spec.target is not None else stored[spec.arg.name])
    got = captured.program.graph_module(*flat)[0]
    expected = zoo.reference_logits(model, tokens[0].tolist())
    np.testing.assert_allclose(got[0].detach().numpy(), expected[rows], atol=1e-4, rtol=1e-4)


REFUSED: list[tuple[str, str]] = [
    ("mamba", "mamba"),
    ("rwkv", "rwkv"),
    ("lfm2", "tokens"),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_an_unsupported_model_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        optimize(capture(zoo.tiny_config(name)), max_positions=16)
    assert "\n" not in str(raised.value)
    assert 20 < len(str(raised.value)) < 500


def test_a_configuration_that_transformers_refuses_is_named() -> None:
    config = zoo.tiny_config("llama")
    config.hidden_act = "no such activation"
    with pytest.raises(CaptureError, match="transformers cannot build a causal language model of type 'llama'"):
        capture(config)


def test_a_model_that_is_no_language_model_is_named() -> None:
    with pytest.raises(CaptureError, match="'vit'"):
        capture(transformers.ViTConfig())


def test_the_callers_configuration_is_left_alone() -> None:
    """A model built from the same configuration still runs by itself."""
    model: Any = zoo.tiny_model("llama")
    before = model.config.to_dict()
    capture(model.config)
    assert model.config.to_dict() == before
    assert zoo.reference_logits(model, [1, 2, 3]).shape[0] == 3


def test_a_model_that_attends_both_ways_is_refused() -> None:
    config = zoo.tiny_config("llama", is_causal=False)
    with pytest.raises(CaptureError, match=r"both directions|not causal"):
        optimize(capture(config), max_positions=16)


def test_attention_called_without_mask_and_not_as_causal_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(CaptureError, match="both directions"):
        routes.attention_route(torch.nn.Module(), q, q, q, None, is_causal=False)
    mask = ops.causal_mask(torch.arange(3)[None], 0, 0)
    assert routes.attention_route(torch.nn.Module(), q, q, q, mask, is_causal=False)[0].shape == (1, 3, 2, 4)


# Prints the peak of the process's resident memory in KiB, its processor time in seconds, and the parameters.
CAPTURE_8B = """
import time
import transformers
from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize

config = transformers.LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)
captured = capture(config)
optimize(captured, max_positions=8192)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0], int(time.process_time()), sum(p.numel() for p in captured.module.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_an_8b_model_is_recorded_in_little_memory_and_time() -> None:
    """Its weights would take 30 GiB in float32; measured in a process of its own, whose peak nothing else raised."""
    command = [sys.executable, "-c", CAPTURE_8B]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    peak_kib, seconds, parameters = map(int, done.stdout.split())
    assert parameters > 8e9
    assert seconds < 60
    assert peak_kib < 2 << 20
