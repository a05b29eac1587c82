"""How large the pool of keys and values gets, and what is said when nothing is left for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends.triton.pool_memory import DeviceMemory

GB = 10**9
MEMORY = DeviceMemory(total=80 * GB, others=1 * GB, weights=16 * GB, step=2 * GB, recordings=2 * GB)


def test_the_pool_gets_what_is_left() -> None:
    left = MEMORY.for_pool(0.9)
    assert left == int(80 * GB * 0.9) - 21 * GB - (64 << 20)
    assert MEMORY.for_pool(1.0) - left == pytest.approx(8 * GB, abs=2)


def test_nothing_left_says_what_takes_how_much() -> None:
    with pytest.raises(BackendError) as raised:
        replace(MEMORY, weights=70 * GB).for_pool(0.9)
    message = str(raised.value)
    for part in ("weights 70.00 GB", "the largest step 2.00 GB", "90%", "80.00 GB", "max_num_batched_tokens"):
        assert part in message


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(OptionError, match="expected a share above 0 and at most 1"):
        MEMORY.for_pool(share)
