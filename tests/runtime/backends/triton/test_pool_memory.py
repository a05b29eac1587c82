"""How large the pool of keys and values gets, and what is said when nothing is left for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferencex.formats.errors import BackendError, OptionError
from inferencex.runtime.backends.triton.attention_tiles import DecodeLimits
from inferencex.runtime.backends.triton.kernels.split_sums import floats_of
from inferencex.runtime.backends.triton.pool_memory import DeviceMemory

GB = 10**9
MEMORY = DeviceMemory(total=80 * GB, others=1 * GB, weights=16 * GB, step=2 * GB, recordings=2 * GB)


def test_the_pool_gets_what_is_left() -> None:
    left = MEMORY.for_pool(0.9)
    assert left == int(80 * GB * 0.9) - 21 * GB - (64 << 20)
    assert MEMORY.for_pool(1.0) - left == pytest.approx(8 * GB, abs=2)


def test_sums_of_decode_attention_are_counted() -> None:
    """They are those of the pool that would be left without them, and so suffice for what is left by them."""
    block, seen = 2 << 20, []

    def sums_of(pool: int) -> int:
        seen.append(pool)
        limits = DecodeLimits.of_pool(pool // block * 16, 256, 131072)
        return 4 * floats_of(32, 128, 256, limits)

    without = MEMORY.for_pool(0.9)
    memory = MEMORY.with_sums(0.9, sums_of)
    left = memory.for_pool(0.9)
    assert seen == [without] and left == without - memory.sums
    assert sums_of(left) <= memory.sums, "the pool and its sums are together what may be taken"
    assert 0 < memory.sums < 0.002 * left
    assert f"sums of decode attention {memory.sums / GB:.2f} GB" in str(memory)


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
