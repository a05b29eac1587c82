"""A step of ranks in processes, and whether these end soon, as all have to once one has failed."""

from __future__ import annotations

import os
import select
import time

import numpy as np
import pytest

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import StepBatch
from inferencex.runtime.parallel.executable import ParallelExecutable
from tests.runtime.parallel.conftest import OPTIONS

SOON = 10.0
"""Seconds within which ranks have to notice that one has died."""


def prompt_batch(tokens: int = 3) -> StepBatch:
    """A prompt of so many tokens, in the first blocks."""
    blocks = -(-tokens // OPTIONS.block_size)
    return StepBatch(
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        sequence_offsets=np.array([0, tokens], np.int32),
        context_lengths=np.array([tokens], np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logit_rows=np.array([tokens - 1], np.int32),
        prompt_lengths=np.full(tokens, tokens, np.int32),
    )


def assert_failed(executable: ParallelExecutable, message: str) -> None:
    """A step fails within seconds, and so does every later one; nobody is left."""
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(BackendError, match=message):
            executable.step(prompt_batch())
    assert time.monotonic() - begin < SOON
    assert all(ends(process_id) for process_id in executable.process_ids)
    executable.close()


def ends(process_id: int) -> bool:
    """Wait for the end of a process, whoever's child it is."""
    try:
        handle = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], SOON)[0])
    finally:
        os.close(handle)
