"""Where splits leave their sums: in memory that is reserved once, whatever a step's contexts are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits, decode_groups
from inferencex.runtime.backends.triton.kernels import decode_tiles
from inferencex.runtime.backends.triton.kernels.attention_step import HeadShape
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums, floats_of
from tests.runtime.backends.triton.kernels.paged_sequences import Layer, Step, make_step

SPLIT = 32
RAGGED = ((70, 1), (9, 4), (1, 1), (64, 1), (100, 1), (31, 1))
DECODED = [context for context, new in RAGGED if new == 1]
LAYERS = {
    "all keys": Layer(),
    "window": Layer().with_options(window=40),
    "chunk": Layer().with_options(chunk=24),
    "chunk of whole splits": Layer().with_options(chunk=64),
    "uneven": Layer(3, 1, 20, 12),
    "int8": Layer(pages=torch.int8),
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split contexts of tens of tokens: the interpreter is slow."""
    monkeypatch.setattr(decode_tiles, "split_keys", lambda *shape: SPLIT)


def reserved(layer: Layer, limits: DecodeLimits, device: str) -> tuple[SplitSums, Tensor]:
    """Return memory of just the size that a layer needs, which spoils what reads before writing, and what is around."""
    floats = floats_of(layer.heads, layer.value_width, SPLIT, limits)
    around = torch.full((floats + 128,), float("nan"), device=device)
    return SplitSums(around[64:-64], limits), around


def grouped(step: Step, limits: DecodeLimits, device: str) -> dict[str, Any]:
    """Return what changes of a step when its launches are limited."""
    contexts = step.inputs.context_lengths[step.inputs.decode_sequences.long()].cpu().numpy()
    groups, keys_before = decode_groups(contexts, limits)
    return {"decode_groups": groups, "keys_before": torch.from_numpy(keys_before).to(device)}


@pytest.mark.parametrize("name", LAYERS)
def test_sums_fit_the_keys_of_a_step_and_change_no_bit(device: str, name: str) -> None:
    """Ragged contexts in memory for exactly their keys, and sequence by sequence."""
    layer = LAYERS[name]
    step = make_step(layer, RAGGED, device)
    expected = step.run()
    torch.testing.assert_close(expected.cpu(), step.expected, rtol=0, atol=2e-5)
    memory, around = reserved(layer, DecodeLimits(sum(DECODED), len(DECODED)), device)
    assert torch.equal(step.run(sums=memory), expected)
    assert torch.isnan(around[:64]).all() and torch.isnan(around[-64:]).all()


@pytest.mark.parametrize("limits", [DecodeLimits(100, 8), DecodeLimits(400, 2)])
@pytest.mark.parametrize("name", ["window", "uneven"])
def test_groups_change_no_bit(device: str, name: str, limits: DecodeLimits) -> None:
    """One launch after the other in memory for the keys of some, when sequences share more than there is."""
    layer = LAYERS[name]
    step = make_step(layer, RAGGED, device)
    changes = grouped(step, limits, device)
    assert len(changes["decode_groups"]) > 1
    memory, around = reserved(layer, limits, device)
    assert torch.equal(step.run(sums=memory, **changes), step.run())
    assert torch.isnan(around[:64]).all() and torch.isnan(around[-64:]).all()


def test_sequences_that_share_blocks(device: str) -> None:
    """All of them read the blocks of one, and have the sums of each: more keys than the pool has."""
    layer = Layer()
    step = make_step(layer, ((90, 1), (90, 1), (90, 1), (90, 1)), device)
    shared = step.inputs.block_tables[:1].expand(4, -1).contiguous()
    same = replace(step, q=step.q[:1].expand(4, -1).contiguous())
    limits = DecodeLimits(180, 4)
    changes = grouped(step, limits, device)
    assert changes["decode_groups"] == (2, 2)
    memory, _ = reserved(layer, limits, device)
    result = same.run(sums=memory, block_tables=shared, **changes)
    alone = make_step(layer, ((90, 1),), device).run()
    assert torch.equal(result, alone.expand(4, -1))


@pytest.mark.parametrize("name", ["all keys", "chunk"])
def test_a_recorded_grid_needs_no_memory_beyond_the_keys_there_are(device: str, name: str) -> None:
    """A bucket's grid covers its longest context for every sequence, also for those that fill it up."""
    layer = LAYERS[name]
    step = make_step(layer, ((70, 1), (33, 1)), device)
    alone, inputs = step.run(), step.inputs
    memory, around = reserved(layer, DecodeLimits(103, 5), device)
    padded = {
        "slots": torch.cat([inputs.slots, torch.full((3,), -1, device=device)]),
        "sequence_offsets": torch.arange(6, dtype=torch.int32, device=device),
        "context_lengths": torch.cat([inputs.context_lengths, torch.zeros(3, dtype=torch.int32, device=device)]),
        "block_tables": torch.cat([inputs.block_tables, *[torch.full_like(inputs.block_tables[:1], -1)] * 3]),
        "decode_sequences": torch.arange(5, dtype=torch.int32, device=device),
        "decode_groups": (5,),
        "keys_before": torch.tensor([0, 70, 0, 0, 0], device=device),
        "longest_context": 1000,
        "sums": memory,
    }
    queries = torch.full((3, step.q.shape[1]), float("nan"), dtype=step.q.dtype, device=device)
    result = replace(step, q=torch.cat([step.q, queries])).run(**padded)
    assert torch.equal(result[:2], alone) and not result[2:].any()
    assert torch.isnan(around[:64]).all() and torch.isnan(around[-64:]).all()


def test_layers_of_any_shape_share_the_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as large as the layer needs that leaves most, and what one has left disturbs no other."""
    layers = [Layer(), Layer(6, 2, 24, 40), Layer(1, 1, 16, 8)]
    limits = DecodeLimits(200, 2)
    steps = [make_step(layer, ((120, 1), (80, 1)), device) for layer in layers]
    place, floats = torch.device(device), []
    for layer, step in zip(layers, steps, strict=True):
        shape = HeadShape.of(layer.heads, step.pages, step.q.dtype)
        floats.append(decode_tiles.most_floats(shape, place, limits, 120))
        assert decode_tiles.most_floats(shape, place, limits, SPLIT) == 0, "one split leaves nothing"
    memory = SplitSums.allocate(max(floats), limits, place)
    expected = [step.run() for step in steps]
    for _ in range(2):
        for step, rows in zip(steps, expected, strict=True):
            assert torch.equal(step.run(sums=memory), rows)


def test_many_sequences_and_one_long_context_take_little() -> None:
    """64 sequences of heads of latent attention, one of them of 131072 tokens, in a pool of a million."""
    limits = DecodeLimits.of_pool(10**6, 64, 131072)
    nbytes = 4 * floats_of(128, 512, 1024, limits)
    dense = 4 * 64 * (131072 // 1024) * 128 * (512 + 2)
    assert nbytes < 0.25 * dense
    assert nbytes < 0.008 * 10**6 * 61 * 576 * 2, "of 61 layers of keys in 16 bits"
    assert 4 * floats_of(32, 128, 256, limits) < 0.0015 * 10**6 * 32 * 8 * 256 * 2


def test_launches_that_nothing_was_reserved_for_are_refused(device: str) -> None:
    step = make_step(Layer(), ((70, 1), (40, 1)), device)
    memory, _ = reserved(Layer(), DecodeLimits(110, 1), device)
    with pytest.raises(BackendError, match=r"decode attention of 2 sequences.* for 1 sequences"):
        step.run(sums=memory)
    memory, _ = reserved(Layer(2, 1), DecodeLimits(110, 2), device)
    with pytest.raises(BackendError, match="Load it again if it was tuned since"):
        step.run(sums=memory)
    with pytest.raises(BackendError, match=r"decode_groups of a step are \(1,\), of 2 sequences"):
        step.run(decode_groups=(1,))
