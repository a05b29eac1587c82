"""Which rows go through which expert: a stable counting sort on the device, with bounds that the host knows.

Every token names `k` experts, which makes `M = T * k` *assignments*, in order of tokens. Grouped products want them
expert by expert, in tiles of one expert each. The host never learns how many each expert got; it launches as many
tiles as there can be, `(M + min(E, M) * (tile - 1)) / tile`, and those beyond the last do nothing. So the launches are
the same for the same `T`, and can be captured in a graph. No atomic additions: the order is that of the tokens.

Three short kernels, or two where M <= 64: counts of each chunk of assignments; their running sums, expert by expert;
places. They move `4 * (M + E * M / 64)` bytes a few times.
"""

# Triton reads the types of a kernel's arguments when it is launched: annotations say only what is a constant.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.runtime.backends.triton.kernels.variant import KernelVariant

_CHUNK = 64
_EXPERTS_AT_ONCE = 64
_SUMMED_AT_ONCE = 1024


@triton.jit
def _count(ids, counts, size, experts, chunks, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Write how often a chunk of `ids` names each expert, int32 `[experts, chunks]`; a program is a chunk."""
    chunk = tl.program_id(0)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + place, mask=place < size, other=-1).to(tl.int32)
    for first in range(0, experts, AT_ONCE):
        candidate = first + tl.arange(0, AT_ONCE)
        found = tl.sum((expert[:, None] == candidate[None, :]).to(tl.int32), axis=0)
        tl.store(counts + candidate.to(tl.int64) * chunks + chunk, found, mask=candidate < experts)


@triton.jit
def _sum_up(counts, totals, chunks, AT_ONCE: tl.constexpr):
    """Replace an expert's counts by what the chunks before have, and write their total; a program is an expert."""
    expert = tl.program_id(0)
    start = counts + expert.to(tl.int64) * chunks
    before = 0
    for first in range(0, chunks, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)
        found = tl.load(start + chunk, mask=chunk < chunks, other=0)
        tl.store(start + chunk, before + tl.cumsum(found, axis=0) - found, mask=chunk < chunks)
        before += tl.sum(found, axis=0)
    tl.store(totals + expert, before)


@triton.jit
def _place(
    ids,
    counts,
    totals,
    rows,
    tiles,
    size,
    experts,
    chunks,
    tile_count,
    TILE: tl.constexpr,
    IS_ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write each assignment to its place (the first `chunks` programs), and the tiles (the rest).

    An assignment's place is its expert's first tile, and in it what earlier chunks and its own have in front of it.
    """
    chunk = tl.program_id(0)
    if chunk < chunks:
        place = chunk * CHUNK + tl.arange(0, CHUNK)
        expert = tl.load(ids + place, mask=place < size, other=-1).to(tl.int32)
        is_valid = (expert >= 0) & (expert < experts)
        # Loaded again, for the same numbers along the other axis.
        other_place = chunk * CHUNK + tl.arange(0, CHUNK)
        other = tl.load(ids + other_place, mask=other_place < size, other=-1).to(tl.int32)
        is_before = (other[None, :] == expert[:, None]) & (other_place[None, :] < place[:, None])
        target = tl.sum(is_before.to(tl.int32), axis=1)
        for first in range(0, experts, AT_ONCE):
            candidate = first + tl.arange(0, AT_ONCE)
            total = tl.load(totals + candidate, mask=candidate < experts, other=0)
            padded = (total + TILE - 1) // TILE * TILE
            target += tl.sum(tl.where(candidate[None, :] < expert[:, None], padded[None, :], 0), axis=1)
        if not IS_ONE_CHUNK:
            target += tl.load(counts + expert.to(tl.int64) * chunks + chunk, mask=is_valid, other=0)
        tl.store(rows + target, place, mask=is_valid)
    else:
        tile = (chunk - chunks) * CHUNK + tl.arange(0, CHUNK)
        owner = tl.zeros((CHUNK,), tl.int32)
        first_tile = tl.zeros((CHUNK,), tl.int32)
        end = 0
        for first in range(0, experts, AT_ONCE):
            candidate = first + tl.arange(0, AT_ONCE)
            total = tl.load(totals + candidate, mask=candidate < experts, other=0)
            owned = (total + TILE - 1) // TILE
            is_behind = (end + tl.cumsum(owned, axis=0))[None, :] <= tile[:, None]
            is_behind = is_behind & (candidate < experts)[None, :]
            owner += tl.sum(is_behind.to(tl.int32), axis=1)
            first_tile += tl.sum(tl.where(is_behind, owned[None, :], 0), axis=1)
            end += tl.sum(owned, axis=0)
        is_used = owner < experts
        left = tl.load(totals + owner, mask=is_used, other=0) - (tile - first_tile) * TILE
        tl.store(tiles + tile * 2, tl.where(is_used, owner, -1), mask=tile < tile_count)
        tl.store(tiles + tile * 2 + 1, tl.maximum(tl.minimum(left, TILE), 0), mask=tile < tile_count)


@dataclass(frozen=True)
class Routing:
    """Assignments expert by expert.

    rows:   int32 `[tiles * tile]`, numbers of assignments; of each tile the first ones, the rest is undefined
    tiles:  int32 `[tiles, 2]`: the expert, and how many assignments it has here; -1 and none for tiles not used
    tile:   assignments of a tile
    """

    rows: Tensor
    tiles: Tensor
    tile: int


def route(ids: Tensor, experts: int, tile: int) -> Routing:
    """Sort assignments, int32 or int64 `[M]` with M > 0, by expert; ids outside `0 .. experts - 1` are left out."""
    if not ids.is_contiguous() or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
        raise ValueError(f"expert ids {ids.dtype} {list(ids.shape)}; expected contiguous integers")
    size = ids.numel()
    chunks = triton.cdiv(size, _CHUNK)
    counts = torch.empty((experts, chunks), dtype=torch.int32, device=ids.device)
    sizes = {"CHUNK": _CHUNK, "AT_ONCE": _EXPERTS_AT_ONCE}
    _count[(chunks,)](ids, counts, size, experts, chunks, **sizes)
    totals = counts
    if chunks > 1:
        totals = torch.empty(experts, dtype=torch.int32, device=ids.device)
        _sum_up[(experts,)](counts, totals, chunks, AT_ONCE=_SUMMED_AT_ONCE)
    tile_count = (size + min(experts, size) * (tile - 1)) // tile
    rows = torch.empty(tile_count * tile, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((tile_count, 2), dtype=torch.int32, device=ids.device)
    grid = (chunks + triton.cdiv(tile_count, _CHUNK),)
    _place[grid](
        ids,
        counts,
        totals,
        rows,
        tiles,
        size,
        experts,
        chunks,
        tile_count,
        TILE=tile,
        IS_ONE_CHUNK=chunks == 1,
        **sizes,
    )
    return Routing(rows, tiles, tile)


def variants() -> list[KernelVariant]:
    """Return what launches compile."""
    sizes = {"CHUNK": _CHUNK, "AT_ONCE": _EXPERTS_AT_ONCE}
    found = [
        KernelVariant(
            _sum_up,
            "expert_routing sums",
            {"counts": "*i32", "totals": "*i32", "chunks": "i32"},
            {"AT_ONCE": _SUMMED_AT_ONCE},
            aligned=("counts", "totals"),
        )
    ]
    for ids in ("i64", "i32"):
        found.append(
            KernelVariant(
                _count,
                f"expert_routing counts of {ids}",
                {"ids": f"*{ids}", "counts": "*i32", "size": "i32", "experts": "i32", "chunks": "i32"},
                sizes,
                aligned=("ids", "counts", "experts"),
            )
        )
        for is_one_chunk in (True, False):
            numbers = dict.fromkeys(("size", "experts", "chunks", "tile_count"), "i32")
            pointers = {name: "*i32" for name in ("counts", "totals", "rows", "tiles")}
            found.append(
                KernelVariant(
                    _place,
                    f"expert_routing places of {ids}{', one chunk' if is_one_chunk else ''}",
                    {"ids": f"*{ids}", **pointers, **numbers},
                    {"TILE": 16, "IS_ONE_CHUNK": is_one_chunk, **sizes},
                    aligned=("ids", *pointers, "experts"),
                )
            )
    return found
