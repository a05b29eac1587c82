"""Masks of recorded attention become attributes; nodes on the same keys and values share a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inferencex.convert.capture import ops
from inferencex.convert.capture.routes import UNKNOWN_MASK
from inferencex.convert.passes import optimize
from inferencex.formats.dialect import DOMAIN, VERSION
from inferencex.formats.errors import CaptureError
from tests.convert.passes.recorded import MAX_POSITIONS, Tiny, optimized_and_equal, record

HEADS, DIM = 2, 4


class Masked(Tiny):
    """Attention layers with the masks `(window, chunk)`; None is no mask. Layer `i` reads the keys of `sources[i]`."""

    def __init__(self, *masks: tuple[int, int] | None, change: str = "", sources: tuple[int, ...] = ()) -> None:
        super().__init__(HEADS * DIM)
        self.masks, self.change, self.sources = masks, change, sources or tuple(range(len(masks)))
        self.q = nn.ModuleList(nn.Linear(HEADS * DIM, HEADS * DIM) for _ in masks)
        self.kv = nn.ModuleList(nn.Linear(HEADS * DIM, HEADS * DIM) for _ in masks)

    def _mask(self, positions: Tensor, shape: tuple[int, int]) -> Tensor:
        mask: Tensor = ops.causal_mask(positions, *shape)
        match self.change:
            case "sliced":
                return mask[:, :, :, : positions.shape[1]]
            case "squeezed":
                return mask.squeeze(0).unsqueeze(0)
            case "cut":
                return mask[:, :, :1]
            case "halved":
                return mask * 0.5
            case "shifted":
                return mask + torch.where(positions[0] == 0, 1.0, 0.0)
        return mask

    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        keys: list[Tensor] = []
        for index, shape in enumerate(self.masks):
            keys.append(self.kv[index](x))
            source = self.sources[index]
            mask = None if shape is None else self._mask(positions, shape)
            x = x + ops.attention(
                self.q[index](x), keys[source], keys[source] * 2, mask, None, HEADS, HEADS, 0.5, 0, 0.0
            )
        return x


def _attention(module: Masked) -> list[dict[str, Any]]:
    result = optimized_and_equal(module)
    assert set(result.model.opset_imports) == {"", DOMAIN} and result.model.opset_imports[DOMAIN] == VERSION
    return [
        {name: a.value for name, a in node.attributes.items()}
        for node in result.model.graph
        if node.op_type == "Attention"
    ]


def test_windows_and_chunks_become_attributes() -> None:
    found = _attention(Masked((0, 0), (3, 0), (0, 5), None))
    assert [(a["window"], a["chunk"]) for a in found] == [(0, 0), (3, 0), (0, 5), (0, 0)]
    assert [(a["layer"], a["writes"]) for a in found] == [(0, 1), (1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("change", ["sliced", "squeezed"])
def test_what_leaves_a_mask_in_place_is_seen_through(change: str) -> None:
    assert [a["window"] for a in _attention(Masked((3, 0), change=change))] == [3]


@pytest.mark.parametrize("change", ["cut", "halved", "shifted"])
def test_a_changed_mask_is_refused(change: str) -> None:
    with pytest.raises(CaptureError, match="uses a mask that is changed by"):
        optimize(record(Masked((3, 0), change=change)), max_positions=MAX_POSITIONS)


def test_an_unknown_mask_is_refused_when_it_is_used() -> None:
    with pytest.raises(CaptureError, match="not causal with at most one window or chunk"):
        optimize(record(Masked(UNKNOWN_MASK)), max_positions=MAX_POSITIONS)


class SharedKeys(Tiny):
    """The second layer reads the keys and values of the first."""

    def __init__(self) -> None:
        super().__init__(HEADS * DIM)
        self.q0, self.q1, self.k, self.v = (nn.Linear(HEADS * DIM, HEADS * DIM) for _ in range(4))

    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        k, v = self.k(x), self.v(x)
        for q, window in ((self.q0, 0), (self.q1, 4)):
            x = x + ops.attention(q(x), k, v, ops.causal_mask(positions, window, 0), None, HEADS, HEADS, 0.5, 0, 0.0)
        return x


def test_layers_on_the_same_keys_share_their_state() -> None:
    result = optimized_and_equal(SharedKeys())
    nodes = [node for node in result.model.graph if node.op_type == "Attention"]
    found = [[node.attributes[n].value for n in ("layer", "writes", "window")] for node in nodes]
    assert found == [[0, 1, 0], [0, 0, 4]]


class MaskElsewhere(Tiny):
    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        mask = ops.causal_mask(positions, 0, 0)
        y: Tensor = ops.attention(x, x, x, mask, None, 2, 2, 0.5, 0, 0.0)
        total: Tensor = y + mask[0, 0].amax(-1)[None, :, None]
        return total


class NoAttention(Tiny):
    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


def test_models_without_known_attention_are_refused() -> None:
    with pytest.raises(CaptureError, match="a mask is used outside of attention"):
        optimize(record(MaskElsewhere()), max_positions=MAX_POSITIONS)
    with pytest.raises(CaptureError, match="no attention layer was found"):
        optimize(record(NoAttention()), max_positions=MAX_POSITIONS)
