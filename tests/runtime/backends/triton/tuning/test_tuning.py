"""Choosing configurations by an injected clock, and keeping them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.triton.tuning import Config, Tuner, bucket_of, cache, configuration, remembered
from inferencex.runtime.backends.triton.tuning.cache import INTERPRETER, TuningCache, cache_path, read_again

_DEVICE = "Some GPU sm_90"
_SMALL, _LARGE = Config.of(4, 2, BLOCK=16), Config.of(8, 3, BLOCK=128)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning" / "device.json"


def tuner_of(path: Path, seconds: dict[Config, float], *, again: bool = False) -> Tuner:
    """Return a tuner whose clock reads `seconds`, in which a configuration without a reading does not fit."""
    current: list[Config] = []

    def timer(run: Callable[[], Any]) -> float:
        run()
        if current[-1] not in seconds:
            raise OutOfResources(300_000, 200_000, "shared memory")
        return seconds[current[-1]]

    tuner = Tuner(TuningCache.read(_DEVICE, path), timer, again)
    tuner.run = current.append  # type: ignore[attr-defined]
    return tuner


def tune(tuner: Tuner, *candidates: Config) -> Config:
    return tuner.tune("kernel", "N8 T1", candidates, tuner.run)  # type: ignore[attr-defined]


def test_the_fastest_is_chosen_and_kept(path: Path) -> None:
    assert tune(tuner_of(path, {_SMALL: 2.0, _LARGE: 1.0}), _SMALL, _LARGE) == _LARGE
    assert TuningCache.read(_DEVICE, path).get("kernel", "N8 T1") == _LARGE
    assert {found.name for found in path.parent.iterdir()} == {path.name, "device.lock"}
    later = tuner_of(path, {_SMALL: 0.5, _LARGE: 1.0})
    assert tune(later, _SMALL, _LARGE) == _LARGE and not later.measured
    assert later.chosen == {("kernel", "N8 T1"): _LARGE}
    anew = tuner_of(path, {_SMALL: 0.5, _LARGE: 1.0}, again=True)
    assert tune(anew, _SMALL, _LARGE) == _SMALL
    assert anew.measured == {("kernel", "N8 T1"): 0.5}
    anew.timer = lambda run: pytest.fail("what this tuner has measured is not measured once more")
    assert tune(anew, _SMALL, _LARGE) == _SMALL


def test_what_is_no_candidate_any_more_is_measured_anew(path: Path) -> None:
    TuningCache(_DEVICE, path).put("kernel", "N8 T1", Config.of(BLOCK=17))
    assert tune(tuner_of(path, {_SMALL: 2.0, _LARGE: 1.0}), _SMALL, _LARGE) == _LARGE


def test_what_does_not_fit_the_device_is_passed_over(path: Path) -> None:
    assert tune(tuner_of(path, {_SMALL: 2.0}), _LARGE, _SMALL) == _SMALL
    with pytest.raises(BackendError, match="none of 1 configurations of kernel runs"):
        tune(tuner_of(path, {}, again=True), _LARGE)


def test_other_errors_are_not_swallowed(path: Path) -> None:
    def timer(run: Callable[[], Any]) -> float:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Tuner(TuningCache.read(_DEVICE, path), timer).tune("kernel", "N8", [_SMALL], lambda config: None)


def test_two_processes_keep_what_the_other_wrote(path: Path) -> None:
    one, other = TuningCache.read(_DEVICE, path), TuningCache.read(_DEVICE, path)
    one.put("kernel", "a", _SMALL)
    other.put("kernel", "b", _LARGE)
    found = TuningCache.read(_DEVICE, path)
    assert found.get("kernel", "a") == _SMALL and found.get("kernel", "b") == _LARGE
    one.put("kernel", "b", _SMALL)
    other.put("kernel", "c", _LARGE)
    assert TuningCache.read(_DEVICE, path).get("kernel", "b") == _SMALL


def _changed(**changes: Any) -> str:
    kernels = {"kernel": {"N8 T1": _SMALL.to_json()}}
    return json.dumps(
        {"version": cache.VERSION, "device": _DEVICE, "triton": triton.__version__, "kernels": kernels} | changes
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        _changed(version=0),
        _changed(device="Another GPU"),
        _changed(triton="1.0"),
        _changed(kernels=[]),
        _changed(kernels={"kernel": []}),
        _changed(kernels={"kernel": {"N8 T1": {}}}),
        _changed(kernels={"kernel": {"N8 T1": {"blocks": {"BLOCK": -1}, "num_warps": 4, "num_stages": 2}}}),
        _changed(kernels={"kernel": {"N8 T1": {"blocks": {"BLOCK": 16}, "num_warps": True, "num_stages": 2}}}),
        _changed(kernels={"kernel": {"N8 T1": {"blocks": {"BLOCK": "16"}, "num_warps": 4, "num_stages": 2}}}),
    ],
)
def test_a_file_that_cannot_be_used_is_a_warning(path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        found = TuningCache.read(_DEVICE, path)
    assert not found.configurations and "kernels run with their defaults" in caplog.text
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].message
    found.put("kernel", "N8 T1", _LARGE)
    assert TuningCache.read(_DEVICE, path).get("kernel", "N8 T1") == _LARGE


def test_the_file_that_all_of_these_differ_from_is_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_text(_changed())
    assert TuningCache.read(_DEVICE, path).get("kernel", "N8 T1") == _SMALL and not caplog.text


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    found = TuningCache(_DEVICE, tmp_path / "file" / "device.json")
    found.put("kernel", "N8 T1", _LARGE)
    assert found.get("kernel", "N8 T1") == _LARGE and "not kept" in caplog.text


def test_where_files_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path("AMD Instinct MI300X gfx942:sramecc+:xnack-") == (
        tmp_path / "inferencex" / "tuning" / "AMD-Instinct-MI300X-gfx942-sramecc-xnack.json"
    )


def test_a_launch_gets_what_was_measured_for_its_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {3: TuningCache(_DEVICE, path, {("kernel", "N8"): _LARGE}), None: TuningCache(INTERPRETER, path)}
    options, gpu = [_SMALL, _LARGE], torch.device("cuda", 3)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "device_cache", kept.__getitem__)
        assert configuration("kernel", "N8", options, gpu) == _LARGE
        assert configuration("kernel", "N9", options, gpu) == _SMALL
        assert configuration("kernel", "N8", options, torch.device("cpu")) == _SMALL


def test_what_a_kernel_is_not_written_for_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    TuningCache(INTERPRETER, cache_path(INTERPRETER)).put("kernel", "N8", Config.of(BLOCK=48))
    read_again()
    with caplog.at_level(logging.WARNING):
        assert configuration("kernel", "N8", [_SMALL, _LARGE], torch.device("cpu")) == _SMALL
    assert len(caplog.records) == 1 and "'BLOCK': 48" in caplog.text and "\n" not in caplog.records[0].message


def test_what_is_remembered_is_forgotten_when_something_is_kept(path: Path) -> None:
    asked: list[int] = []

    @remembered
    def double(number: int) -> int:
        asked.append(number)
        return 2 * number

    assert [double(3), double(3)] == [6, 6] and asked == [3]
    TuningCache(_DEVICE, path).put("kernel", "N8", _SMALL)
    assert double(3) == 6 and asked == [3, 3]


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(count) for count in (0, 1, 2, 3, 4, 5, 129, 4096, 4097, 10**6)] == [
        1, 1, 2, 4, 4, 8, 256, 4096, 4096, 4096,
    ]  # fmt: skip


def test_configurations_are_values() -> None:
    config = Config.of(8, 3, SPLITS=2, BLOCK=16)
    assert config == Config.of(8, 3, BLOCK=16, SPLITS=2) and hash(config) == hash(Config.from_json(config.to_json()))
    assert config["SPLITS"] == 2 and dict(config.constants) == {"BLOCK": 16, "SPLITS": 2}
