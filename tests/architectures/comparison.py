"""Capture a tiny model, run it on the reference backend over ragged batches, and compare with `transformers`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch
from transformers import PretrainedConfig

from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize
from inferencex.convert.passes.editing import is_weight
from inferencex.convert.passes.weights import expression_of
from inferencex.runtime.backends.base import BackendOptions
from inferencex.runtime.backends.reference.executable import ReferenceExecutable
from tests.architectures.ragged import BLOCK_SIZE, LENGTHS, blocks_needed, ragged_logits, random_sequences
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import reference_logits, tiny_model

MAX_MODEL_LEN = 64
TOLERANCE = 1e-3


def largest_error(name: str, **overrides: object) -> float:
    """Return the largest difference of any logit between `transformers`, each sequence alone, and a ragged batch."""
    model = tiny_model(name, **overrides)
    executable = compile_model(tiny_config(name, **overrides), model.state_dict())
    sequences = random_sequences(vocab_size=250)
    results = ragged_logits(executable, sequences)
    errors = []
    for tokens, logits in zip(sequences, results, strict=True):
        expected = reference_logits(model, tokens)
        assert logits.shape == expected.shape, f"logits are {logits.shape}, expected {expected.shape}"
        assert np.isfinite(logits).all(), "logits are not finite"
        errors.append(float(np.abs(logits - expected).max()))
    return max(errors)


def compile_model(config: PretrainedConfig, weights: Mapping[str, torch.Tensor]) -> ReferenceExecutable:
    """Capture `config`, fill the graph's parameters from `weights`, and return it ready to execute."""
    optimized = optimize(capture(config), max_positions=MAX_MODEL_LEN)
    for initializer, value in optimized.model.graph.initializers.items():
        if is_weight(value):
            tensor = expression_of(value).evaluate(weights.__getitem__)
            value.const_value = ir.tensor(tensor.contiguous().numpy(), name=initializer)
    options = BackendOptions(num_blocks=blocks_needed(LENGTHS), block_size=BLOCK_SIZE)
    return ReferenceExecutable(optimized.model, options, max_model_len=MAX_MODEL_LEN)
