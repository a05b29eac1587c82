from __future__ import annotations

import pytest

from bench.columns import COLUMNS, QUICK, capacity_for
from bench.limits import NOT_MEASURED, Limits
from bench.models import MODELS

MODEL = MODELS["smollm2"]
LIMITS = Limits("AVX-512 VNNI", int8_operations_per_second=1e12, bytes_per_second=3e10)


def test_prefill_is_limited_by_multiply_adds_of_linears_and_attention() -> None:
    limit = COLUMNS["prefill-512"].limit(MODEL, LIMITS)
    linears = MODEL.linear_weights + MODEL.head_weights / 512
    attention = 30 * 9 * (64 + 64) * (512 + 1) / 2
    assert limit == pytest.approx(1e12 / (2 * (linears + 2 * attention)))


def test_decoding_alone_is_limited_by_reading_weights_and_context() -> None:
    limit = COLUMNS["decode-1-long"].limit(MODEL, LIMITS)
    read = MODEL.weight_bytes + (2048 + 32) * MODEL.kv_bytes_per_token
    assert limit == pytest.approx(3e10 / read)


def test_decoding_many_is_limited_by_multiply_adds_where_those_take_longer() -> None:
    slow = Limits("AVX2", int8_operations_per_second=1e11, bytes_per_second=3e10)
    limit = COLUMNS["decode-32"].limit(MODEL, slow)
    assert limit == pytest.approx(1e11 / (2 * (MODEL.linear_weights + MODEL.head_weights)))


@pytest.mark.parametrize("name", [name for name, column in COLUMNS.items() if column.needs_session])
def test_there_is_no_limit_of_speed_where_nothing_was_measured(name: str) -> None:
    assert COLUMNS[name].limit(MODEL, NOT_MEASURED) is None


def test_sizes_are_limited_by_the_bits_of_weights_and_of_the_most_keys_and_values() -> None:
    memory, disk = COLUMNS["memory"].limit(MODEL, NOT_MEASURED), COLUMNS["disk"].limit(MODEL, NOT_MEASURED)
    assert memory == pytest.approx((MODEL.weight_bytes + 8 * (2048 + 64) * 30 * 2 * 3 * 64 * 2) / 1e6)
    assert disk == pytest.approx((106_168_320 * (4 + 20 / 64) + 49152 * 576 * (6 + 22 / 64)) / 8e6)
    assert COLUMNS["first-token"].limit(MODEL, LIMITS) is None


def test_room_is_for_the_largest_column_and_no_more() -> None:
    capacity = capacity_for([COLUMNS["decode-32"], COLUMNS["prefill-4096"]], threads=3)
    assert (capacity.threads, capacity.max_sequences, capacity.max_length) == (3, 32, 4097)
    assert capacity.max_tokens == 4097
    assert capacity_for([COLUMNS["decode-8-long"]], 1).max_tokens == 8 * (2048 + 64)


def test_quick_columns_exist() -> None:
    assert set(QUICK) <= set(COLUMNS)


def test_of_two_measurements_of_a_limit_the_higher_counts() -> None:
    busy = Limits("AVX-512 VNNI", int8_operations_per_second=2e12, bytes_per_second=1e10)
    assert LIMITS.at_least(busy) == Limits("AVX-512 VNNI", 2e12, 3e10)
