"""Tiny torch modules recorded as `capture` records a transformers model, optimized, bound to weights and executed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from inferencex.convert.capture import Captured, export
from inferencex.convert.passes import Optimized, editing, optimize, weights
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.reference.executable import ReferenceExecutable
from tests.architectures import ragged

VOCAB, MAX_POSITIONS = 19, 64


class Tiny(nn.Module):
    """A model with one layer: embedding, `mix` (the part that is looked at), head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="tiny", max_position_embeddings=MAX_POSITIONS)
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)

    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        """Compute `[1, T, width]` from the same; `positions` are int64 `[1, T]`."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids), position_ids)))


def record(module: Tiny) -> Captured:
    """Record a module whose parameters are real; the recording sees none of their values."""
    recorded = copy.deepcopy(module).eval()
    with mock.patch.object(export, "empty_model", lambda config, trust_remote_code: recorded):
        return export.capture(module.config)  # type: ignore[arg-type]


def bind(model: ir.Model, module: nn.Module) -> None:
    """Give every weight of a graph the value that its expression computes from the module's parameters."""
    state = module.state_dict(keep_vars=True)
    for value in model.graph.initializers.values():
        if editing.is_weight(value):
            tensor = weights.expression_of(value).evaluate(lambda name: state[name].detach())
            value.const_value = ir.tensor(tensor.to(torch.float32).contiguous().numpy(), name=value.name)


def executable(model: ir.Model) -> ReferenceExecutable:
    options = BackendOptions(num_blocks=ragged.blocks_needed(ragged.LENGTHS), block_size=ragged.BLOCK_SIZE)
    return ReferenceExecutable(model, options, max_model_len=MAX_POSITIONS)


def optimized_and_equal(module: Tiny, tolerance: float = 1e-4) -> Optimized:
    """Optimize a module; assert that a ragged batch run in chunks equals the module on each sequence alone."""
    module = module.eval()
    result = optimize(record(module), max_positions=MAX_POSITIONS)
    bind(result.model, module)
    sequences = ragged.random_sequences(VOCAB)
    got = ragged.ragged_logits(executable(result.model), sequences)
    for tokens, logits in zip(sequences, got, strict=True):
        with torch.no_grad():
            expected = module(torch.tensor([tokens]), torch.arange(len(tokens))[None]).logits[0]
        np.testing.assert_allclose(logits, expected.numpy(), atol=tolerance, rtol=tolerance)
    return result
