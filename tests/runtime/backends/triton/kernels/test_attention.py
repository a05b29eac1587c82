"""Attention over pages against the reference: ragged steps of prefill and decode, all kinds of heads and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels import decode_tiles, prefill_attention
from inferencex.runtime.backends.triton.kernels.attention import (
    attention,
    rows_per_tile,
)
from inferencex.runtime.backends.triton.kernels.attention_step import Blocks
from tests.runtime.backends.triton.kernels.paged_sequences import Layer, Step, filled_pages, make_step

# Largest error allowed: that of sums in another order; half a unit of weights of 11 bits.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3}

MIXED = ((1, 1), (33, 1), (50, 9), (64, 1), (3, 2))


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split contexts of tens of tokens: the interpreter is slow."""
    monkeypatch.setattr(decode_tiles, "split_keys", lambda *shape: 32)


def check(step: Step) -> None:
    """Compare a step with what is expected of it."""
    got = step.run().cpu().float()
    assert got.shape == step.expected.shape
    difference = (got - step.expected).abs().max().item()
    assert difference <= TOLERANCES[step.layer.dtype] * max(1.0, step.expected.abs().max().item())


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_page_borders(device: str, block_size: int) -> None:
    """Contexts that end before, at and after the border of a page and of a split."""
    lengths = sorted({1, block_size - 1, block_size, block_size + 1, 32, 33})
    sequences = [(length, 1) for length in lengths] + [(length + 3, 4) for length in lengths[1:4]]
    check(make_step(Layer(block_size=block_size, heads=2, kv_heads=1), sequences, device))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 20},
        {"window": 33},
        {"chunk": 32},
        {"chunk": 12},
        {"window": 10, "chunk": 24},
        {"softcap": 2.0},
        {"sinks": True},
        {"slopes": True},
        {"window": 20, "softcap": 3.0, "sinks": True, "slopes": True},
    ],
    ids=str,
)
def test_options(device: str, options: dict[str, Any]) -> None:
    """Windows, chunks, soft caps, sinks and slopes, alone and together, where no key is skipped and where most are."""
    heads = 4
    given = dict(options)
    if "sinks" in given:
        given["sinks"] = torch.linspace(-1, 2, heads, device=device)
    if "slopes" in given:
        given["slopes"] = torch.tensor([2.0 ** -(head + 1) for head in range(heads)], device=device)
    check(make_step(Layer(block_size=8).with_options(**given), MIXED, device))


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (6, 2), (5, 5), (20, 1), (24, 3)])
def test_groups(device: str, heads: int, kv_heads: int) -> None:
    """Groups of 1, 3 and 8 heads, and of more than a tile of decode takes."""
    check(make_step(Layer(heads, kv_heads), ((34, 1), (9, 6), (3, 1)), device))


@pytest.mark.parametrize(
    "key_width,value_width", [(8, 8), (20, 12), (40, 40), (80, 80), (96, 48), (160, 16), (192, 128), (576, 512)]
)
def test_widths(device: str, key_width: int, value_width: int) -> None:
    """Widths that are no powers of two, and values narrower than keys."""
    check(make_step(Layer(2, 1, key_width, value_width, 8), ((35, 1), (21, 5)), device))


@pytest.mark.parametrize("pages", [torch.float32, torch.int8])
def test_heads_a_few_columns_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch, pages: torch.dtype) -> None:
    """Wide heads whose queries are read again for every block of keys, as chips with few registers have it."""
    for module, name in ((decode_tiles, "decode_blocks"), (prefill_attention, "prefill_blocks")):
        monkeypatch.setattr(module, name, lambda *shape: Blocks(16, 16, 4, 1, key_step=32))
    layer = Layer(2, 1, 80, 48, 8, pages=pages)
    check(make_step(layer.with_options(window=22), ((35, 1), (21, 5)), device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "pages,scaled_by_head",
    [
        (None, False),
        (torch.float16, False),
        (torch.int8, False),
        (torch.int8, True),
        (torch.float8_e4m3fn, True),
    ],
    ids=str,
)
def test_pages(device: str, dtype: torch.dtype, pages: torch.dtype | None, scaled_by_head: bool) -> None:
    """Every way that pages keep elements; a width with a tail, for tails are read apart."""
    layer = Layer(4, 2, 40, 48, 16, dtype, pages, scaled_by_head)
    check(make_step(layer, ((35, 1), (32, 1), (24, 9)), device))
    check(make_step(layer.with_options(window=12), ((39, 1), (30, 5)), device))


def test_bfloat16_pages(device: str) -> None:
    """Keys and values of 16 bits under queries of float32, as a pool of bfloat16 has them."""
    check(make_step(Layer(pages=torch.bfloat16), ((40, 1), (18, 5)), device))


def test_splits_as_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts around the border of a split of the true size."""
    monkeypatch.undo()
    check(make_step(Layer(1, 1, dtype=torch.float16), ((256, 1), (520, 1)), device))


@pytest.mark.parametrize("tile_rows", [1, 3, 16, 50, 200])
def test_tiles_of_any_size(device: str, tile_rows: int) -> None:
    """Tiles smaller and larger than what a program takes of a group of three heads."""
    check(make_step(Layer(3, 1), ((40, 40), (20, 3)), device, tile_rows))


def test_a_layer_has_its_rows_per_tile(device: str) -> None:
    """The tile that a layer asks for is filled by the heads of a group."""
    for heads in (1, 3, 8, 128):
        layer = Layer(heads, 1)
        rows = rows_per_tile(torch.device(device), heads, filled_pages(layer, 1, device), torch.float16)
        assert rows >= 1 and rows * heads <= max(128, heads)


def test_queries_and_results_may_be_columns_of_something_wider(device: str) -> None:
    """Rows that are apart from each other, as those of fused projections are."""
    step = make_step(Layer(), ((20, 1), (9, 4)), device)
    wide = torch.full((step.q.shape[0], step.q.shape[1] + 40), float("nan"), device=device)
    wide[:, 16:80] = step.q
    out = torch.zeros(step.q.shape[0], 100, device=device)
    result = attention(
        wide[:, 16:80], step.pages, step.inputs, num_heads=4, num_kv_heads=2, scale=0.25, out=out[:, 10:74]
    )
    assert result.data_ptr() == out[:, 10:74].data_ptr()
    assert torch.equal(result, step.run())
    assert not out[:, :10].any() and not out[:, 74:].any()


def test_wrong_shapes_are_refused(device: str) -> None:
    """What would read past the end is an error that says what it found."""
    step = make_step(Layer(), ((5, 1),), device)
    with pytest.raises(BackendError, match=r"queries are \[1, 63\], expected \[1, 64\]"):
        replace(step, q=step.q[:, :63]).run()
    with pytest.raises(BackendError, match="attention of 4 over 1 heads on pages of 2"):
        replace(step, layer=Layer(kv_heads=1)).run()
    with pytest.raises(BackendError, match=r"sinks are \[3\], expected \[4\]"):
        replace(step, layer=Layer().with_options(sinks=torch.zeros(3, device=device))).run()
    with pytest.raises(BackendError, match="context_lengths of a step is"):
        step.run(context_lengths=step.inputs.context_lengths.long())
