"""What a row of attention does not depend on: its neighbours, the bucket, how a prompt was cut in chunks or tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferencex.runtime.backends.triton.kernels import decode_tiles
from tests.runtime.backends.triton.kernels.paged_sequences import Layer, make_step

LAYERS = {
    "all keys": Layer(),
    "window": Layer().with_options(window=20),
    "chunk": Layer().with_options(chunk=24),
    "int8": Layer(pages=torch.int8),
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split contexts of tens of tokens: the interpreter is slow."""
    monkeypatch.setattr(decode_tiles, "split_keys", lambda *shape: 32)


@pytest.mark.parametrize("name", LAYERS)
def test_a_sequence_does_not_depend_on_its_neighbours(device: str, name: str) -> None:
    """Decode and prefill give the same bits alone and among others."""
    together = make_step(LAYERS[name], ((70, 1), (40, 6), (31, 1), (5, 5)), device).run()
    for sequence, rows in (((70, 1), slice(0, 1)), ((40, 6), slice(1, 7)), ((31, 1), slice(7, 8))):
        assert torch.equal(make_step(LAYERS[name], (sequence,), device).run(), together[rows])


@pytest.mark.parametrize("name", LAYERS)
def test_decode_does_not_depend_on_the_longest_context(device: str, name: str) -> None:
    """A bucket for long contexts gives the bits of one that has a single split."""
    step = make_step(LAYERS[name], ((30, 1), (17, 1)), device)
    assert torch.equal(step.run(), step.run(longest_context=300))


def test_prefill_does_not_depend_on_chunks_and_tiles(device: str) -> None:
    """The last rows of a prompt are the same whether all of it is new or most of it was there, in tiles of any size."""
    # Products of the interpreter are numpy's, whose sums are in an order that depends on a row's place in a tile.
    tolerance = 0.0 if device == "cuda" else 1e-6
    for layer in LAYERS.values():
        whole = make_step(layer, ((30, 30),), device).run()
        for other in (make_step(layer, ((30, 30),), device, tile_rows=5), make_step(layer, ((30, 13),), device)):
            rows = other.run()
            torch.testing.assert_close(rows, whole[-len(rows) :], rtol=0, atol=tolerance)


@pytest.mark.parametrize("longest", [32, 200])
def test_sequences_without_a_context_give_zeros(device: str, longest: int) -> None:
    """What fills up a batch: no context, no slot, no block."""
    step = make_step(Layer(), ((20, 1), (11, 1)), device)
    alone = step.run()
    inputs = step.inputs
    padded = {
        "slots": torch.cat([inputs.slots, torch.tensor([-1, -1], device=device)]),
        "sequence_offsets": torch.arange(5, dtype=torch.int32, device=device),
        "context_lengths": torch.cat([inputs.context_lengths, torch.zeros(2, dtype=torch.int32, device=device)]),
        "block_tables": torch.cat([inputs.block_tables, torch.full_like(inputs.block_tables, -1)]),
        "decode_sequences": torch.arange(4, dtype=torch.int32, device=device),
        "decode_groups": (4,),
        "keys_before": torch.tensor([0, 20, 0, 0], device=device),  # of those that fill up, it says nothing
        "longest_context": longest,
    }
    wide = replace(step, q=torch.cat([step.q, torch.full_like(step.q, float("nan"))]))
    result = wide.run(**padded)
    assert torch.equal(result[:2], alone)
    assert not result[2:].any()


def test_keys_before_a_window_are_not_read(device: str) -> None:
    """Blocks that left a window may belong to others: their entries in a table are not looked at."""
    layer = Layer(block_size=8).with_options(window=10)
    step = make_step(layer, ((60, 1), (60, 5)), device)
    tables = step.inputs.block_tables.clone()
    tables[:, : (60 - 5 - 10) // 8] = -1
    assert torch.equal(step.run(block_tables=tables), step.run())


def test_later_tokens_do_not_change_earlier_ones(device: str) -> None:
    """Prefill is causal: rows of a chunk that ends earlier have the bits of the longer one's."""
    step = make_step(Layer(), ((40, 40),), device)
    shorter = step.inputs
    result = replace(step, q=step.q[:23]).run(
        slots=shorter.slots[:23],
        sequence_offsets=torch.tensor([0, 23], dtype=torch.int32, device=device),
        context_lengths=torch.tensor([23], dtype=torch.int32, device=device),
        tiles=torch.tensor([[0, 0], [0, 8], [0, 16]], dtype=torch.int32, device=device),
    )
    assert torch.equal(result, step.run()[:23])
