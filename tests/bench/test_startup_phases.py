"""The clock that says how long the phases of a start took."""

from __future__ import annotations

import threading
import time

import pytest

from bench.startup_phases import PhaseClock


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the system's clock says, in order."""
    coming: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: coming.pop(0))
    return coming


def test_time_inside_another_phase_counts_once(times: list[float]) -> None:
    times += [11.0, 13.0, 16.0, 20.0]
    clock = PhaseClock(10.0, "interpreter")
    clock.turn("backend")  # 11, and 13 for the beginning of what follows
    clock.around(lambda: None, "checks")()  # 16 to 20
    assert clock.seconds == {"interpreter": 1.0, "backend": 3.0, "checks": 4.0}


def test_other_threads_do_not_interrupt_a_phase() -> None:
    clock = PhaseClock(time.monotonic(), "backend")
    results: list[int] = []
    thread = threading.Thread(target=clock.around(lambda: results.append(1), "tokenizer"))
    thread.start()
    thread.join()
    assert results == [1] and list(clock.seconds) == ["backend"]
