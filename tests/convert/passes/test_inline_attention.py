"""Attention that a model computes itself, recorded from torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from inferencex.convert.capture import ops
from inferencex.convert.passes import optimize
from inferencex.formats.errors import CaptureError
from tests.convert.passes.graphs import only
from tests.convert.passes.recorded import MAX_POSITIONS, Tiny, optimized_and_equal, record

HEADS, DIM = 4, 6
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LOWEST = torch.finfo(torch.float32).min


class Inline(Tiny):
    """Softmax attention in plain torch: with what is added to the scores, and where the scale is applied."""

    def __init__(self, bias: str = "mask", scale: str = "scores", groups: int = HEADS, window: int = 0) -> None:
        super().__init__(HEADS * DIM)
        self.bias, self.scale, self.groups, self.window = bias, scale, groups, window
        self.q = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.k, self.v = nn.Linear(HEADS * DIM, groups * DIM), nn.Linear(HEADS * DIM, groups * DIM)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM)

    def _visible(self, positions: Tensor) -> Tensor:
        query, key = positions[0][:, None], positions[0][None, :]
        seen = key <= query
        return seen & (query - key < self.window) if self.window else seen

    def _biased(self, scores: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        visible = self._visible(positions)
        added = torch.where(visible, 0.0, LOWEST)
        key, query = positions[0].float()[None, :], positions[0].float()[:, None]
        match self.bias:
            case "mask":
                return scores + added
            case "opaque mask":
                mask: Tensor = ops.causal_mask(positions, self.window, 0)
                return scores + mask
            case "where":
                return torch.where(visible, scores, LOWEST)
            case "where and opaque mask":
                return torch.where(visible, scores, LOWEST) + ops.causal_mask(positions, 0, 0)
            case "masked fill":
                return scores.masked_fill(~visible, float("-inf"))
            case "alibi":
                return scores + SLOPES[:, None, None] * (key - query) + added
            case "alibi by key":
                return scores + SLOPES[None, :, None, None] * key[None, None] + added
            case "content":
                return scores + x.mean(-1)[:, None, None, :] + added
            case "square":
                return scores + 0.01 * (key - query) ** 2 + added
            case "everything":
                return scores
        raise AssertionError(self.bias)

    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (
            layer(x).view(1, tokens, heads, DIM).transpose(1, 2)
            for layer, heads in ((self.q, HEADS), (self.k, self.groups), (self.v, self.groups))
        )
        q = q * DIM**-0.5 if self.scale == "queries" else q
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / DIM**0.5 if self.scale == "scores" else scores
        weights = torch.softmax(self._biased(scores, x, positions), dim=-1)
        mixed = torch.matmul(weights, v).transpose(1, 2).reshape(1, tokens, HEADS * DIM)
        out: Tensor = self.out(mixed)
        return out


def _attributes(module: Inline) -> dict[str, Any]:
    result = optimized_and_equal(module)
    assert result.rewrites["in-line attention"] == 1
    assert not {"Softmax", "MatMul", "Where"} & set(result.ops_after)
    node = only(result.model, "Attention")
    slopes = node.inputs[4].const_value if len(node.inputs) > 4 and node.inputs[4] is not None else None
    found = {name: a.value for name, a in node.attributes.items()}
    return found | {"slopes": None if slopes is None else slopes.numpy()}


@pytest.mark.parametrize("bias", ["mask", "opaque mask", "where", "masked fill"])
def test_a_causal_mask_in_every_spelling(bias: str) -> None:
    found = _attributes(Inline(bias))
    assert found["num_heads"] == found["num_kv_heads"] == HEADS
    assert found["scale"] == pytest.approx(DIM**-0.5)
    assert found["slopes"] is None and found["window"] == 0


def test_a_scale_on_the_queries_stays_there() -> None:
    result = optimized_and_equal(Inline(scale="queries"))
    assert only(result.model, "Attention").attributes["scale"].value == pytest.approx(1.0)


@pytest.mark.parametrize("bias", ["alibi", "alibi by key"])
def test_alibi_becomes_slopes(bias: str) -> None:
    found = _attributes(Inline(bias))
    np.testing.assert_allclose(found["slopes"], SLOPES.numpy(), rtol=1e-5)


def test_one_head_of_keys_is_shared_by_all_queries() -> None:
    found = _attributes(Inline(groups=1))
    assert (found["num_heads"], found["num_kv_heads"]) == (HEADS, 1)


def test_a_window_in_an_opaque_mask_is_read() -> None:
    assert _attributes(Inline("opaque mask", window=5))["window"] == 5


@pytest.mark.parametrize("bias", ["content", "square", "everything"])
def test_what_is_not_causal_softmax_attention_is_refused(bias: str) -> None:
    with pytest.raises(CaptureError, match=r"no attention|outside of attention|tokens"):
        optimize(record(Inline(bias)), max_positions=MAX_POSITIONS)


@pytest.mark.parametrize("bias", ["where", "masked fill", "mask", "where and opaque mask"])
@pytest.mark.parametrize("window", [5, 50])
def test_a_window_that_is_spelled_out_is_read(bias: str, window: int) -> None:
    assert _attributes(Inline(bias, window=window))["window"] == window
