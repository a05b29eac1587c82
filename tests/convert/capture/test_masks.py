"""The shape of a mask is found by probing the function that says who sees whom."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils

from inferencex.convert.capture import ops
from inferencex.convert.capture.routes import UNKNOWN_MASK, MaskFunction, mask_route, mask_shape, routed
from inferencex.formats.errors import CaptureError

causal: Any = masking_utils.causal_mask_function


def _window(size: int) -> MaskFunction:
    window: Any = masking_utils.sliding_window_causal_mask_function(size)
    return cast(MaskFunction, window)


def _chunk(size: int) -> MaskFunction:
    return lambda b, h, q, k: (k <= q) & (q // size == k // size)


def test_a_causal_mask_has_neither() -> None:
    assert mask_shape(causal) == (0, 0)


@pytest.mark.parametrize("size", [1, 2, 3, 64, 127, 128, 512, 1023, 4096, 131072])
def test_a_window_is_measured(size: int) -> None:
    assert mask_shape(_window(size)) == (size, 0)


@pytest.mark.parametrize("size", [2, 3, 64, 100, 128, 8192, 65536])
def test_a_chunk_is_measured(size: int) -> None:
    assert mask_shape(_chunk(size)) == (0, size)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(2, 20000), chunked=st.booleans())
def test_any_size(size: int, chunked: bool) -> None:
    assert mask_shape(_chunk(size) if chunked else _window(size)) == ((0, size) if chunked else (size, 0))


REFUSED: dict[str, MaskFunction] = {
    "bidirectional": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool),
    "strictly before": lambda b, h, q, k: k < q,
    "prefix": lambda b, h, q, k: (k <= q) | (k < 8),
    "sink tokens": lambda b, h, q, k: (k <= q) & ((q - k < 16) | (k < 4)),
    "window and chunk": lambda b, h, q, k: (k <= q) & (q // 64 == k // 64) & (q - k < 8),
    "dilated": lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
    "one hole": lambda b, h, q, k: (k <= q) & ~((q == 50) & (k == 20)),
    "one token ahead": lambda b, h, q, k: k <= q + 1,
    "window ahead": lambda b, h, q, k: (q - k).abs() < 8,
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_mask_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="not causal with at most one window or chunk"):
        mask_shape(REFUSED[name])


def test_masks_that_are_made_but_have_no_form_are_marked() -> None:
    """Refusing is left to the pass that knows whether a layer uses the mask."""
    positions = torch.arange(3)[None]
    with routed(positions):
        seen: list[tuple[int, int]] = []
        original = ops.causal_mask

        def spy(at: Tensor, window: int, chunk: int) -> Tensor:
            assert at is positions
            seen.append((window, chunk))
            mask: Tensor = original(at, max(window, 0), max(chunk, 0))
            return mask

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "causal_mask", spy)
            mask_route(mask_function=_window(7))
            mask_route(mask_function=REFUSED["prefix"])
    assert seen == [(7, 0), UNKNOWN_MASK]


def test_a_mask_outside_of_a_capture_is_refused() -> None:
    with pytest.raises(CaptureError, match="outside of a capture"):
        mask_route(mask_function=causal)


def test_the_opaque_mask_hides_what_is_not_seen() -> None:
    mask = ops.causal_mask(torch.arange(6)[None], 2, 0)
    assert mask.shape == (1, 1, 6, 6)
    expected = torch.tensor([[0 <= q - k < 2 for k in range(6)] for q in range(6)])
    assert torch.equal(mask[0, 0] == 0.0, expected)
    chunked = ops.causal_mask(torch.arange(6)[None], 0, 4)
    assert torch.equal(
        chunked[0, 0] == 0.0, torch.tensor([[k <= q and q // 4 == k // 4 for k in range(6)] for q in range(6)])
    )
