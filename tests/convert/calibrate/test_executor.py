"""Blocks run one after the other are the model; factors folded into its weights leave it what it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferencex.convert.calibrate.factors import absorb
from inferencex.convert.calibrate.work_dir import FinishedBlock
from tests.architectures.families import FAMILIES, Family
from tests.architectures.zoo import reference_logits
from tests.convert.calibrate.graphs import TinyGraph, random_tokens, tiny_graph

_LENGTH = 40


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.id)
def test_blocks_compute_the_model_before_and_after_folding(family: Family) -> None:
    tiny = tiny_graph(family.name, **family.overrides)
    tokens = random_tokens(2, _LENGTH)
    with torch.no_grad():
        logits = tiny.logits(tokens, tiny.weights)
        for sequence, rows in zip(tokens.tolist(), logits, strict=True):
            np.testing.assert_allclose(rows.numpy(), reference_logits(tiny.module, sequence), atol=1e-3)

        changed = tiny.logits(tokens, _folded(tiny))
    scale = float(logits.abs().max())
    assert float((changed - logits).abs().max()) < 1e-4 * max(scale, 1.0)


def _folded(tiny: TinyGraph) -> dict[str, torch.Tensor]:
    """Return the weights of a graph with random factors at every input that something absorbs."""
    finished, random = FinishedBlock(), np.random.default_rng(1)
    for shared in tiny.shared:
        if shared.absorber is not None and shared.absorber.axis == 0:
            by_row = random.uniform(0.5, 2.0, int(shared.absorber.rows.max()) + 1).astype(np.float32)
            finished.factors[shared.value] = factors = by_row[shared.absorber.rows]
            for name in shared.readers:
                finished.plain[name] = tiny.weights[name].numpy() * factors
    for block in tiny.blocks:
        absorb(block, tiny.weights, finished)
    return {**tiny.weights, **{name: torch.from_numpy(array) for name, array in finished.plain.items()}}


def test_every_input_of_a_llama_has_something_that_absorbs() -> None:
    tiny = tiny_graph("llama")
    assert [shared.absorber is not None for shared in tiny.shared] == [True] * 4 * 2


def test_a_block_is_a_layer_and_a_stage_ends_where_linears_read() -> None:
    tiny = tiny_graph("llama")
    assert [len(block.stages) for block in tiny.blocks] == [5, 5, 1]
    assert [len(stage.shared) for stage in tiny.blocks[0].stages] == [1, 1, 1, 1, 0]
    for block in tiny.blocks[:2]:
        carried = set(block.outputs) - {"positions", "logit_rows"}
        assert len(carried) <= 3
