"""Refusing programs that this machine has no memory for, before any of it is touched."""

from __future__ import annotations

import os
import sys

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import DEFAULT_KV_CACHE_MEMORY
from inferencex.runtime.backends.cpu.lowering import LoweredProgram, LoweringOptions
from inferencex.runtime.backends.cpu.lowering.extents import Extent, product
from inferencex.runtime.backends.cpu.lowering.views import ITEM_SIZES, View


def machine_memory() -> int:
    """Return the bytes of memory that this machine has; where the system does not say, as many as it could address."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def check_memory(
    lowered: LoweredProgram, options: LoweringOptions, bytes_per_token: int, available: int | None = None
) -> None:
    """Raise BackendError when the values of a step, or the layer state, take more than `available` bytes.

    No operand may have more elements than would fit, not even one that repeats a few: to read it would take forever.
    """
    available = machine_memory() if available is None else available
    fitting: set[tuple[tuple[Extent, ...], str]] = set()  # a program has few shapes, many times
    for instruction in lowered.instructions:
        for view in (*instruction.inputs, *instruction.outputs):
            if view is None or (view.dims, view.dtype) in fitting:
                continue
            fitting.add((view.dims, view.dtype))
            if _bytes_of(view, options) > available:
                raise BackendError(
                    f"{instruction.kind} {instruction.name!r} has an operand of shape "
                    f"[{', '.join(map(str, view.dims))}], which is more than the {available} bytes of this machine "
                    f"in steps of max_num_batched_tokens={options.max_tokens}"
                )
    arena, state = lowered.memory.arena_bytes, bytes_per_token * options.num_blocks * options.block_size
    if arena > available:
        raise BackendError(
            f"a step of {options.max_tokens} tokens takes {arena} bytes, and this machine has {available}; lower "
            "max_num_batched_tokens"
        )
    # Its pages are taken when they are first written to, so the usual pool may be larger than a small machine.
    if state > max(available, DEFAULT_KV_CACHE_MEMORY):
        raise BackendError(
            f"the KV cache takes {state} bytes, {bytes_per_token} for each of {options.num_blocks} blocks of "
            f"{options.block_size} tokens, and this machine has {available}; allow fewer blocks"
        )


def _bytes_of(view: View, options: LoweringOptions) -> int:
    return product(view.dims).at(options.max_tokens, options.max_tokens) * ITEM_SIZES[view.dtype]
