"""A step planned on the host: what kernels read besides activations, in one buffer that is copied at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.runtime.backends.base import Draws, StepBatch
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits, plan_tiles
from inferencex.runtime.backends.triton.kernels.attention import AttentionStep
from inferencex.runtime.backends.triton.kernels.split_sums import SplitSums
from inferencex.runtime.backends.triton.step_inputs import StepInputs

Array = NDArray[np.int64]

_ALIGNMENT = 16  # bytes, that Triton's kernels may then take for granted

_DRAWS = ("temperature", "top_k", "top_p", "min_p", "uniform")
_KINDS: Mapping[type[np.generic], torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float64: torch.float64,
}

NO_SLOT = -1
"""The slot of a row that only fills up a batch: its keys and values are not kept."""


@dataclass(frozen=True)
class StepShape:
    """How large a step's arrays are: steps of one shape lie alike in a buffer, and one recorded graph runs them all.

    tokens, rows, sequences: T, R and S
    blocks:                  B, columns of the block tables
    tiles, decodes:          query tiles of sequences with several new tokens, and sequences with one
    longest_context:         bound of the contexts of those with one
    decode_groups:           how many of these each launch takes
    """

    tokens: int
    rows: int
    sequences: int
    blocks: int
    tiles: int
    decodes: int
    longest_context: int
    decode_groups: tuple[int, ...]

    def sections(self) -> Mapping[str, tuple[type[np.generic], tuple[int, ...]]]:
        """Return the arrays by name, in the order in which they lie in a buffer."""
        return {
            "token_ids": (np.int64, (self.tokens,)),
            "positions": (np.int64, (self.tokens,)),
            "prompt_lengths": (np.int64, (self.tokens,)),
            "token_rows": (np.int64, (self.tokens,)),
            "slots": (np.int64, (self.tokens,)),
            "logit_rows": (np.int64, (self.rows,)),
            "sequence_offsets": (np.int32, (self.sequences + 1,)),
            "context_lengths": (np.int32, (self.sequences,)),
            "block_tables": (np.int32, (self.sequences, self.blocks)),
            "tiles": (np.int32, (self.tiles, 2)),
            "decode_sequences": (np.int32, (self.decodes,)),
            "keys_before": (np.int64, (self.decodes,)),
            "temperature": (np.float64, (self.rows,)),
            "top_k": (np.int32, (self.rows,)),
            "top_p": (np.float64, (self.rows,)),
            "min_p": (np.float64, (self.rows,)),
            "uniform": (np.float64, (self.rows,)),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(_padded(dtype, shape) for dtype, shape in self.sections().values())


def _padded(dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class StepPlan:
    """A step's arrays on the host, and their shape."""

    shape: StepShape
    arrays: Mapping[str, NDArray[np.generic]]


def plan_step(
    batch: StepBatch,
    block_size: int,
    tile_rows: int,
    bucket: DecodeBucket | None = None,
    *,
    limits: DecodeLimits | None = None,
    draws: Draws | None = None,
    token_rows: NDArray[np.integer] | None = None,
) -> StepPlan:
    """Plan a step; with a bucket, which it must fit as it must the limits, filled up to the bucket's shape.

    `limits` are those of a launch of decode attention, which takes all sequences of one new token without them.
    `draws` say how its tokens are chosen, `token_rows` from which rows of an earlier step its own tokens are taken.
    """
    offsets = batch.sequence_offsets.astype(np.int32)
    counts = np.diff(offsets)
    slots = _slots(batch, counts, block_size)
    planned = plan_tiles(offsets, batch.context_lengths, tile_rows, limits)
    arrays: dict[str, NDArray[np.generic]] = {
        "token_ids": batch.token_ids.astype(np.int64),
        "positions": batch.positions.astype(np.int64),
        "prompt_lengths": batch.prompt_lengths.astype(np.int64),
        "slots": slots,
        "logit_rows": batch.logit_rows.astype(np.int64),
        "sequence_offsets": offsets,
        "context_lengths": batch.context_lengths.astype(np.int32),
        "block_tables": batch.block_tables.astype(np.int32),
        "tiles": planned.tiles,
        "decode_sequences": planned.decode_sequences,
        "keys_before": planned.keys_before,
    }
    if draws is not None:
        arrays.update({name: getattr(draws, name) for name in _DRAWS})
    if token_rows is not None:
        arrays["token_rows"] = token_rows.astype(np.int64)
    if bucket is not None:
        return StepPlan(bucket.shape, _filled_up(arrays, bucket.shape))
    shape = StepShape(
        tokens=len(batch.token_ids),
        rows=len(batch.logit_rows),
        sequences=len(counts),
        blocks=batch.block_tables.shape[1],
        tiles=len(planned.tiles),
        decodes=len(planned.decode_sequences),
        longest_context=int(batch.context_lengths[planned.decode_sequences].max(initial=0)),
        decode_groups=planned.decode_groups,
    )
    return StepPlan(shape, arrays)


def _slots(batch: StepBatch, counts: NDArray[np.int32], block_size: int) -> Array:
    """Return the flat slot of every new token, int64 [T]."""
    positions = batch.positions.astype(np.int64)
    sequence = np.repeat(np.arange(len(counts)), counts)
    blocks = batch.block_tables[sequence, positions // block_size].astype(np.int64)
    return blocks * block_size + positions % block_size


@dataclass(frozen=True)
class DecodeBucket:
    """A shape of steps in which every sequence has one new token and wants its logits.

    sequences: most sequences
    context:   longest context
    """

    sequences: int
    context: int
    block_size: int

    @property
    def shape(self) -> StepShape:
        """The shape that steps are filled up to."""
        count = self.sequences
        return StepShape(count, count, count, -(-self.context // self.block_size), 0, count, self.context, (count,))


def is_decode(batch: StepBatch) -> bool:
    """Tell whether every sequence has one new token and wants its logits."""
    sequences = len(batch.context_lengths)
    return len(batch.token_ids) == sequences and len(batch.logit_rows) == sequences


def _filled_up(arrays: Mapping[str, NDArray[np.generic]], shape: StepShape) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of a decode step with rows for sequences that are none: no context, and no slot."""
    filled: dict[str, NDArray[np.generic]] = {}
    for name, (dtype, size) in shape.sections().items():
        filled[name] = np.zeros(size, dtype)
    count = len(arrays["token_ids"])
    for name in ("token_ids", "positions", "prompt_lengths", "context_lengths", "keys_before", "token_rows", *_DRAWS):
        if name in arrays:
            filled[name][:count] = arrays[name]
    filled["slots"][:count], filled["slots"][count:] = arrays["slots"], NO_SLOT
    tables = arrays["block_tables"]
    width = min(tables.shape[1], shape.blocks)
    filled["block_tables"][:count, :width] = tables[:, :width]
    for name in ("logit_rows", "decode_sequences"):
        filled[name][:] = np.arange(shape.sequences)
    filled["sequence_offsets"][:] = np.arange(shape.sequences + 1)
    return filled


class StepBuffer:
    """Memory on the host and on the device that steps of one shape are copied through.

    There are two pieces on the host, in turns: a step is written to one while the copy of the last may still wait.
    """

    def __init__(
        self,
        shape: StepShape,
        device: torch.device,
        tile_rows: int,
        *,
        capacity: int | None = None,
        sums: SplitSums | None = None,
    ) -> None:
        """Reserve memory for steps of a shape.

        capacity: bytes to reserve, for a buffer that other shapes use as well
        sums:     memory for the sums of decode attention, which steps are given along
        """
        nbytes = max(shape.nbytes, capacity or 0)
        self.capacity = nbytes
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        self._device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._tile_rows, self._sums = tile_rows, sums

    def load(self, plan: StepPlan) -> StepInputs:
        """Copy a step to the device, in order with what runs on the current stream, and return its tensors."""
        self.write(plan)
        return self.inputs(plan.shape)

    def write(self, plan: StepPlan) -> None:
        """Copy a step to the device."""
        self._hosts.reverse()
        self._copied.reverse()
        memory, copied = self._hosts[0], self._copied[0]
        if copied is not None:
            copied.synchronize()
        host, place = memory.numpy(), 0
        for name, (dtype, shape) in plan.shape.sections().items():
            if name in plan.arrays:
                array = np.ascontiguousarray(plan.arrays[name], dtype=dtype)
                host[place : place + array.nbytes] = array.reshape(-1).view(np.uint8)
            place += _padded(dtype, shape)
        self._device[:place].copy_(memory[:place], non_blocking=True)
        if copied is not None:
            copied.record()

    def inputs(self, shape: StepShape) -> StepInputs:
        """Return the tensors of a step of this shape, which read the buffer."""
        found: dict[str, Tensor] = {}
        place = 0
        for name, (dtype, size) in shape.sections().items():
            count = int(np.prod(size, dtype=np.int64))
            nbytes = count * np.dtype(dtype).itemsize
            kind = _KINDS[dtype]
            found[name] = self._device[place : place + nbytes].view(kind).view(size)
            place += _padded(dtype, size)
        attention = AttentionStep(
            slots=found["slots"],
            sequence_offsets=found["sequence_offsets"],
            context_lengths=found["context_lengths"],
            block_tables=found["block_tables"],
            tiles=found["tiles"],
            tile_rows=self._tile_rows,
            decode_sequences=found["decode_sequences"],
            decode_groups=shape.decode_groups,
            keys_before=found["keys_before"],
            longest_context=shape.longest_context,
            sums=self._sums,
        )
        read = ("token_ids", "positions", "prompt_lengths", "token_rows", "logit_rows", *_DRAWS)
        return StepInputs(**{name: found[name] for name in read}, attention=attention)
