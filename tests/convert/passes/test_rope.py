"""Rotary embeddings in the ways that models write them, recorded from torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from inferencex.convert.capture import ops
from tests.convert.passes.graphs import only
from tests.convert.passes.recorded import MAX_POSITIONS, Tiny, optimized_and_equal

HEADS, GROUPS, DIM = 4, 2, 8
Rotate = Callable[[Tensor, Tensor], Tensor]  # (x [1, T, H, D], positions [1, T]) -> the same shape


def _frequencies(width: int = DIM) -> Tensor:
    return 1.0 / 100.0 ** (torch.arange(0, width, 2) / width)


def _angles(positions: Tensor, width: int = DIM) -> Tensor:
    return positions[..., None].float() * _frequencies(width)  # [1, T, width / 2]


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def half(x: Tensor, positions: Tensor) -> Tensor:
    angles = _angles(positions)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return x * angles.cos() + _rotate_half(x) * angles.sin()


def half_with_scale(x: Tensor, positions: Tensor) -> Tensor:
    """YaRN multiplies cosines and sines by one factor ("mscale")."""
    angles = _angles(positions)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return x * (angles.cos() * 1.3) + _rotate_half(x) * (angles.sin() * 1.3)


def heads_first(x: Tensor, positions: Tensor) -> Tensor:
    return _heads_first(x, positions, half)


def _heads_first(x: Tensor, positions: Tensor, rotate: Rotate) -> Tensor:
    angles = _angles(positions)
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    x = x.transpose(1, 2)
    return (x * angles.cos() + _rotate_half(x) * angles.sin()).transpose(1, 2)


def two_halves(x: Tensor, positions: Tensor) -> Tensor:
    """The halves are computed apart and joined (gpt-oss)."""
    angles = _angles(positions)[:, :, None]
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def interleaved(x: Tensor, positions: Tensor) -> Tensor:
    """Even and odd columns are pairs (GPT-J)."""
    angles = _angles(positions).repeat_interleave(2, dim=-1)[:, :, None]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


def interleaved_stack(x: Tensor, positions: Tensor) -> Tensor:
    angles = _angles(positions)[:, :, None]
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def partial(x: Tensor, positions: Tensor) -> Tensor:
    angles = _angles(positions, 4)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    turned, rest = x[..., :4], x[..., 4:]
    return torch.cat((turned * angles.cos() + _rotate_half(turned) * angles.sin(), rest), dim=-1)


def partial_interleaved(x: Tensor, positions: Tensor) -> Tensor:
    angles = _angles(positions, 4).repeat_interleave(2, dim=-1)[:, :, None]
    turned, rest = x[..., :4], x[..., 4:]
    pairs = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turned * angles.cos() + pairs * angles.sin(), rest), dim=-1)


def as_complex(x: Tensor, positions: Tensor) -> Tensor:
    """Rotation by complex numbers (Llama's first code, Llama 4)."""
    angles = _angles(positions)
    turn = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


def last_part(x: Tensor, positions: Tensor) -> Tensor:
    """The head is split, its last features are rotated, and it is joined again (DeepSeek)."""
    angles = _angles(positions, 4)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    rest, turned = torch.split(x, [DIM - 4, 4], dim=-1)
    return torch.cat((rest, turned * angles.cos() + _rotate_half(turned) * angles.sin()), dim=-1)


class Attend(Tiny):
    """Attention with `rotate` on queries and keys, and a norm of heads before or behind it."""

    def __init__(self, rotate: Rotate, norm: bool = False) -> None:
        super().__init__(HEADS * DIM)
        self.rotate = rotate
        self.q, self.k, self.v = (nn.Linear(HEADS * DIM, h * DIM) for h in (HEADS, GROUPS, GROUPS))
        self.norm = nn.RMSNorm(DIM) if norm else nn.Identity()

    def mix(self, x: Tensor, positions: Tensor) -> Tensor:
        tokens = x.shape[1]
        q = self.rotate(self.norm(self.q(x).view(1, tokens, HEADS, DIM)), positions).reshape(1, tokens, HEADS * DIM)
        k = self.rotate(self.norm(self.k(x).view(1, tokens, GROUPS, DIM)), positions).reshape(1, tokens, GROUPS * DIM)
        y: Tensor = ops.attention(q, k, self.v(x), None, None, HEADS, GROUPS, DIM**-0.5, 0, 0.0)
        return y


@pytest.mark.parametrize(
    ("rotate", "width", "paired"),
    [
        (half, 0, 0),
        (half_with_scale, 0, 0),
        (heads_first, 0, 0),
        (two_halves, 0, 0),
        (interleaved, 0, 1),
        (interleaved_stack, 0, 1),
        (partial, 4, 0),
        (partial_interleaved, 4, 1),
        (as_complex, 0, 1),
    ],
)
def test_every_way_to_write_it_becomes_the_standard_operator(rotate: Rotate, width: int, paired: int) -> None:
    result = optimized_and_equal(Attend(rotate))
    assert result.rewrites["rotary embeddings"] == 2
    nodes = [node for node in result.model.graph if node.op_type == "RotaryEmbedding"]
    assert [node.attributes["num_heads"].value for node in nodes] == [HEADS, GROUPS]
    for node in nodes:
        assert node.attributes["rotary_embedding_dim"].value == width
        assert node.attributes["interleaved"].value == paired
        for table in node.inputs[1:3]:
            assert table is not None and table.const_value is not None
            assert table.shape == [MAX_POSITIONS, (width or DIM) // 2]
    assert not {"Sin", "Cos", "Neg", "Mul", "Concat", "Slice"} & set(result.ops_after)
    assert result.ops_after["Gemm"] == 2  # the projections are one, the head is the other


def test_layers_share_their_tables() -> None:
    result = optimized_and_equal(Attend(half))
    tables = [name for name in result.model.graph.initializers if name.startswith("rope_table")]
    assert sorted(tables) == ["rope_table.0", "rope_table.1"]


def test_a_norm_of_heads_stands_in_front() -> None:
    result = optimized_and_equal(Attend(half, norm=True))
    assert result.ops_after["RotaryEmbedding"] == 2 and result.ops_after["RMSNormalization"] == 2


def test_a_norm_of_heads_stands_behind() -> None:
    norm = nn.RMSNorm(DIM)
    module = Attend(lambda x, positions: half(x, positions))
    module.behind = norm
    module.rotate = lambda x, positions: norm(half(x, positions))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, DIM))
    result = optimized_and_equal(module)
    assert result.ops_after["RotaryEmbedding"] == 2 and result.ops_after["RMSNormalization"] == 2


def test_a_part_that_was_split_off_is_rotated_alone() -> None:
    result = optimized_and_equal(Attend(last_part))
    nodes = [node for node in result.model.graph if node.op_type == "RotaryEmbedding"]
    assert [node.attributes["num_heads"].value for node in nodes] == [HEADS, GROUPS]
    assert result.ops_after["Concat"] == 2 and not {"Sin", "Cos", "Neg"} & set(result.ops_after)


def _unrelated_sines(x: Tensor, positions: Tensor) -> Tensor:
    """Cosines and sines of different frequencies: no rotation, hence no RoPE."""
    cos, sin = _angles(positions), _angles(positions) * 2
    a, b = x.chunk(2, dim=-1)
    c, s = cos.cos()[:, :, None], sin.sin()[:, :, None]
    return torch.cat((a * c - b * s, b * c + a * c), dim=-1)


def _wrong_sign(x: Tensor, positions: Tensor) -> Tensor:
    angles = _angles(positions)[:, :, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() + b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _crossed(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs of unlike columns."""
    angles = _angles(positions)[:, :, None]
    a, b = x.chunk(2, dim=-1)
    c = b.flip(-1)
    return torch.cat((a * angles.cos() - c * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def _scaled(x: Tensor, positions: Tensor) -> Tensor:
    """A factor per position alone (log-n scaling)."""
    return x * torch.log1p(positions.float())[..., None, None]


@pytest.mark.parametrize("rotate", [_unrelated_sines, _wrong_sign, _crossed, _scaled])
def test_what_is_no_rotation_is_not_taken_for_one(rotate: Rotate) -> None:
    result = optimized_and_equal(Attend(rotate))
    assert "RotaryEmbedding" not in result.ops_after


def test_a_rotation_behind_the_other_way_is_one() -> None:
    """Negative frequencies turn backwards, which is a rotation all the same."""
    result = optimized_and_equal(Attend(lambda x, positions: half(x, -positions)))
    assert only(result.model, "Attention").inputs[0].producer().op_type == "Reshape"  # type: ignore[union-attr]
    assert result.ops_after["RotaryEmbedding"] == 2
