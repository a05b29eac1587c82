from __future__ import annotations

import pytest

from bench import sampling
from bench.sampling import Patience, sample


class Machine:
    """Stands in for the kernel's counters: others take what the test says during each sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.others = 5.0
        monkeypatch.setattr(sampling, "_others_seconds", lambda: self.others)
        monkeypatch.setattr(sampling.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(sampling.time, "sleep", self.pass_time)
        monkeypatch.setattr(sampling.os, "cpu_count", lambda: 2)

    def pass_time(self, seconds: float, others: float = 0.0) -> None:
        self.now += seconds
        self.others += others


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_the_median_of_enough_samples(machine: Machine) -> None:
    values = iter([5.0, 1.0, 3.0])

    def take() -> float:
        machine.pass_time(1.0)
        return next(values)

    figure = sample(take, Patience(repeat=3, seconds=100))
    assert (figure.value, figure.samples, figure.disturbed) == (3.0, 3, False)


def test_samples_beside_other_work_do_not_count(machine: Machine) -> None:
    script = iter([(1.0, 1.5), (9.0, 0.0), (2.0, 0.5), (7.0, 0.1)])  # value, seconds that others took of 2

    def take() -> float:
        value, others = next(script)
        machine.pass_time(1.0, others)
        return value

    figure = sample(take, Patience(repeat=2, seconds=100))
    assert (figure.value, figure.samples, figure.disturbed) == (8.0, 2, False)


def test_a_machine_that_is_never_left_alone_marks_the_figure(machine: Machine) -> None:
    def take() -> float:
        machine.pass_time(1.0, 2.0)
        return 4.0

    figure = sample(take, Patience(repeat=2, seconds=100))
    assert (figure.value, figure.samples, figure.disturbed) == (4.0, 8, True)


def test_time_is_limited_but_one_sample_is_always_taken(machine: Machine) -> None:
    def take() -> float:
        machine.pass_time(50.0)
        return 4.0

    assert sample(take, Patience(repeat=9, seconds=10)).samples == 1


def test_waiting_for_an_idle_machine_is_limited_and_costs_no_measuring_time(machine: Machine) -> None:
    def busy(seconds: float) -> None:
        machine.pass_time(seconds)
        machine.others += 2 * seconds

    sampling.time.sleep = busy

    def take() -> float:
        machine.pass_time(1.0)
        return 4.0

    figure = sample(take, Patience(repeat=3, seconds=10, idle=20))
    assert figure.samples == 3
    assert 120 <= machine.now <= 125
