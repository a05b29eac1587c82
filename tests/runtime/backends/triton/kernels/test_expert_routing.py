from __future__ import annotations

import numpy as np
import pytest
import torch

from inferencex.runtime.backends.triton.kernels.expert_routing import route


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("size", "experts"), [(1, 1), (5, 3), (64, 8), (65, 8), (200, 70), (300, 130), (7, 200)])
@pytest.mark.parametrize("tile", [16, 32])
def test_tiles_hold_each_experts_assignments_in_order(
    device: str, size: int, experts: int, tile: int, dtype: torch.dtype
) -> None:
    random = np.random.default_rng(size)
    # Some experts get much, some nothing; some ids belong to no expert.
    ids = np.minimum(random.integers(0, experts, size), random.integers(0, experts, size))
    ids[random.random(size) < 0.1] = random.choice([-1, experts, experts + 7])
    routing = route(torch.from_numpy(ids).to(device, dtype), experts, tile)
    rows, tiles = routing.rows.cpu().numpy(), routing.tiles.cpu().numpy()
    assert len(rows) == len(tiles) * tile
    found: dict[int, list[int]] = {}
    for place, (expert, count) in enumerate(tiles):
        if expert < 0:
            assert (tiles[place:, 0] < 0).all()
            break
        assert 0 < count <= tile
        found.setdefault(int(expert), []).extend(rows[place * tile : place * tile + count].tolist())
    expected = {e: np.flatnonzero(ids == e).tolist() for e in range(experts) if (ids == e).any()}
    assert found == expected
    assert list(found) == sorted(found)


@pytest.mark.parametrize("tile", [16, 64])
def test_there_are_tiles_enough_in_the_worst_case(device: str, tile: int) -> None:
    """Every expert's last tile has one assignment."""
    experts = 6
    ids = torch.arange(experts).repeat_interleave(tile + 1)
    routing = route(ids.to(device), experts, tile)
    assert routing.tiles.shape[0] == 2 * experts
    assert routing.tiles[:, 1].tolist() == [tile, 1] * experts


def test_what_are_no_ids_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="expected contiguous integers"):
        route(torch.zeros(4, device=device), 2, 16)
    with pytest.raises(ValueError, match="expected contiguous integers"):
        route(torch.zeros(0, dtype=torch.int64, device=device), 2, 16)
