"""Rotary embedding against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.kernels.rope import rope

TOLERANCES = {torch.float32: 1e-6, torch.float16: 2e-3}


def tables(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [rows, width / 2] of angles that fall from pair to pair."""
    angles = torch.arange(rows)[:, None] * 100.0 ** -(torch.arange(width // 2) / (width // 2))
    return angles.cos().float(), angles.sin().float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return `x [T, H, D]` with its pairs rotated by rows of tables [T, width / 2]."""
    half = cos.shape[1]
    x = x.double().clone()
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b, c, s = x[..., first].clone(), x[..., second].clone(), cos.double()[:, None], sin.double()[:, None]
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("heads,head,width", [(1, 2, 2), (3, 20, 20), (5, 64, 24), (9, 80, 32), (2, 192, 64)])
def test_rotation(device: str, heads: int, head: int, width: int, dtype: torch.dtype, interleaved: bool) -> None:
    """All or part of a head, both layouts, positions in any order, in place and to somewhere else."""
    cos, sin = tables(50, width)
    positions = torch.tensor([3, 49, 0, 7, 7])
    x = torch.randn(5, heads * head).to(dtype)
    expected = rotated(x.unflatten(1, (heads, head)), cos[positions], sin[positions], interleaved).flatten(1)
    args = (cos.to(device), sin.to(device), positions.to(device), heads)
    given = x.to(device)
    result = rope(given, *args, interleaved=interleaved, width=width)
    assert result.dtype == dtype
    assert (result.cpu() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()
    assert torch.equal(given.cpu(), x)
    again = rope(given, args[0], args[1], args[2].int(), heads, interleaved=interleaved, width=width, out=given)
    assert again.data_ptr() == given.data_ptr() and torch.equal(again, result)


def test_rows_of_tables_by_token_and_whole_heads(device: str) -> None:
    """Without positions the tables have a row for each token; a width of 0 is a head's."""
    cos, sin = tables(6, 16)
    x = torch.randn(6, 48)
    result = rope(x.to(device), cos.to(device), sin.to(device), None, 3, interleaved=False).cpu()
    expected = rotated(x.unflatten(1, (3, 16)), cos, sin, False).flatten(1)
    assert (result - expected).abs().max() < 1e-6 * expected.abs().max()


def test_columns_of_something_wider(device: str) -> None:
    """Rows may be apart from each other, in what is read and in what is written."""
    cos, sin = (table.to(device) for table in tables(9, 16))
    wide, out = torch.randn(4, 100, device=device), torch.zeros(4, 70, device=device)
    positions = torch.arange(5, 9, device=device)
    result = rope(wide[:, 20:84], cos, sin, positions, 4, interleaved=True, out=out[:, 2:66])
    assert torch.equal(result, rope(wide[:, 20:84].contiguous(), cos, sin, positions, 4, interleaved=True))
    assert not out[:, :2].any() and not out[:, 66:].any()


def test_no_tokens(device: str) -> None:
    """Nothing is launched for nothing."""
    cos, sin = (table.to(device) for table in tables(4, 16))
    nothing, positions = torch.zeros(0, 32, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert rope(nothing, cos, sin, positions, 2, interleaved=False).shape == (0, 32)


def test_wrong_shapes_are_refused(device: str) -> None:
    """What would read past the end is an error that says what it found."""
    cos, sin = (table.to(device) for table in tables(4, 16))
    x, positions = torch.randn(3, 32, device=device), torch.arange(3, device=device)
    with pytest.raises(BackendError, match="17 elements of a head of 16"):
        rope(x, cos, sin, positions, 2, interleaved=False, width=17)
    with pytest.raises(BackendError, match=r"cosines of a rotation are .* \[4, 8\], expected float32 \[_, 4\]"):
        rope(x, cos, sin, positions, 2, interleaved=False, width=8)
    with pytest.raises(BackendError, match=r"positions are torch.int64 \[2\], expected integers \[3\]"):
        rope(x, cos, sin, positions[:2], 2, interleaved=False)
    with pytest.raises(BackendError, match="tables of 4 and 4 rows rotate 5 tokens"):
        rope(torch.randn(5, 32, device=device), cos, sin, None, 2, interleaved=False)
    with pytest.raises(BackendError, match="32 columns are no 3 heads"):
        rope(x, cos, sin, positions, 3, interleaved=False)
