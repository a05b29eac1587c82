"""The test material itself: every tiny model runs, is causal, and every part of it shows in its logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.architectures import zoo

DECODERS = [name for name in zoo.names() if zoo.kind(name) == zoo.DECODER]
LENGTHS = (7, 33)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _assert_causal(model: torch.nn.Module) -> None:
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        tokens = [int(token) for token in rng.integers(0, 250, length)]
        logits = zoo.reference_logits(model, tokens)
        changed = zoo.reference_logits(model, [*tokens[:-1], (tokens[-1] + 7) % 250])
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(changed[:-1], logits[:-1], atol=1e-4)
        assert np.abs(changed[-1] - logits[-1]).max() > 1e-2
        assert np.std(logits, axis=0).mean() > 1e-2


def test_most_names_are_decoders() -> None:
    assert len(DECODERS) >= 140


@pytest.mark.parametrize("name", DECODERS[::6])  # `make architectures` runs them all
def test_decoder_is_causal(name: str) -> None:
    _assert_causal(zoo.tiny_model(name))


def test_models_are_reproducible() -> None:
    tokens = [3, 1, 4, 1, 5]
    first, second = (zoo.reference_logits(zoo.tiny_model("llama"), tokens) for _ in range(2))
    np.testing.assert_array_equal(first, second)
