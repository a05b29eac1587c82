from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferencex.runtime.server.access.quotas import Quotas
from inferencex.runtime.server.calls import ANONYMOUS, Caller, CallerLimits
from inferencex.runtime.server.errors import TooManyRequests


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def caller(name: str = "a", **limits: int) -> Caller:
    return Caller(name, limits=CallerLimits(**limits))


def refused(quotas: Quotas, who: Caller, num_tokens: int = 1) -> float:
    with pytest.raises(TooManyRequests) as caught:
        quotas.acquire(who, num_tokens)
    assert caught.value.retry_after is not None and caught.value.retry_after > 0
    return caught.value.retry_after


def test_concurrency_is_given_back_exactly_once() -> None:
    quotas, who = Quotas(), caller(concurrent=2)
    first, _ = quotas.acquire(who, 1), quotas.acquire(who, 1)
    refused(quotas, who)
    first.release()
    first.release()
    assert quotas.running(who) == 1
    quotas.acquire(who, 1)
    refused(quotas, who)
    quotas.acquire(caller("b", concurrent=2), 1)


def test_requests_a_minute_and_when_to_come_back() -> None:
    clock = Clock()
    quotas, who = Quotas(clock=clock), caller(requests_per_minute=6)
    for _ in range(6):
        quotas.acquire(who, 1)
    wait = refused(quotas, who)
    assert wait == pytest.approx(10)
    clock.now += wait * 0.99
    refused(quotas, who)
    clock.now += wait * 0.01
    quotas.acquire(who, 1)
    refused(quotas, who)


def test_tokens_are_reserved_and_corrected() -> None:
    clock = Clock()
    quotas, who = Quotas(clock=clock), caller(tokens_per_minute=600)
    permit = quotas.acquire(who, 500)
    assert refused(quotas, who, 200) == pytest.approx(10)
    permit.release(50)  # most of it was not used
    quotas.acquire(who, 550)
    assert refused(quotas, who, 1) == pytest.approx(0.1)


def test_what_was_not_corrected_counts_as_used() -> None:
    quotas, who = Quotas(clock=Clock()), caller(tokens_per_minute=600)
    quotas.acquire(who, 500).release()
    refused(quotas, who, 101)


def test_tokens_that_become_known_later_are_reserved_then() -> None:
    quotas, who = Quotas(clock=Clock()), caller(concurrent=2, requests_per_minute=3, tokens_per_minute=600)
    first = quotas.acquire(who)
    first.reserve(500)
    second = quotas.acquire(who)
    with pytest.raises(TooManyRequests, match="may take 200 with its prompt") as caught:
        second.reserve(200)
    assert caught.value.retry_after == pytest.approx(10)
    second.withdraw()  # as if it had not been asked
    second.withdraw()
    second.release(50)
    assert quotas.running(who) == 1
    quotas.acquire(who, 100)
    refused(quotas, who)  # both seats are taken
    first.release(0)
    quotas.acquire(who, 500)
    refused(quotas, who)


def test_a_request_of_more_than_a_minutes_worth_is_let_in_when_nothing_is_used() -> None:
    clock = Clock()
    quotas, who = Quotas(clock=clock), caller(tokens_per_minute=60)
    quotas.acquire(who, 180).release(180)
    assert refused(quotas, who, 60) == pytest.approx(180)
    clock.now += 180
    quotas.acquire(who, 180)


def test_a_refusal_uses_nothing_up() -> None:
    quotas, who = Quotas(clock=Clock()), caller(concurrent=5, requests_per_minute=2, tokens_per_minute=100)
    quotas.acquire(who, 90)
    for _ in range(5):
        refused(quotas, who, 50)
    assert quotas.running(who) == 1
    quotas.acquire(who, 10)


def test_defaults_are_for_those_without_limits_of_their_own() -> None:
    quotas = Quotas(CallerLimits(concurrent=1), Clock())
    quotas.acquire(ANONYMOUS, 1)
    refused(quotas, ANONYMOUS)
    roomy = caller("roomy", concurrent=3)
    for _ in range(3):
        quotas.acquire(roomy, 1)
    refused(quotas, roomy)


@given(
    limit=st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200), st.integers(0, 300)), max_size=60),
)
def test_the_rate_holds_over_time_and_retry_after_is_right(limit: int, steps: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    quotas, who = Quotas(clock=clock), caller(tokens_per_minute=limit)
    used: list[tuple[float, int]] = []
    for pause, wanted, spent in steps:
        clock.now += pause
        try:
            permit = quotas.acquire(who, wanted)
        except TooManyRequests as error:
            assert error.retry_after is not None
            clock.now += error.retry_after
            permit = quotas.acquire(who, wanted)  # nothing else was asked meanwhile
        permit.release(spent)
        used.append((clock.now, spent))
    # Whenever a request is let in, what was used until then is within the rate, a minute's worth, and one reservation.
    total = 0
    for (_, spent), (next_time, _) in pairwise(used):
        total += spent
        assert total <= limit * (next_time - 100.0) / 60 + limit + 1e-6 * limit * max(1, total)


def test_a_permit_survives_being_released_by_several_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    quotas, who = Quotas(clock=Clock()), caller(concurrent=2, tokens_per_minute=100)
    permit, _ = quotas.acquire(who, 10), quotas.acquire(who, 90)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: permit.release(3), range(64)))
    assert quotas.running(who) == 1
    quotas.acquire(who, 7).release(0)
    refused(quotas, who, 8)
