"""Steps as tasks of a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inferencex.formats.errors import OptionError
from inferencex.recipes.pipeline.log import JsonLog
from inferencex.recipes.pipeline.run import PipelineOptions, run
from tests.recipes.pipeline.conftest import COMMANDS


class Done:
    """A task's result that is there already."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, None, int]:
        yield from ()
        return self.value


class StandIn(ModuleType):
    """What `ray_runner` uses of Ray, in this process."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = RuntimeError  # type: ignore[attr-defined]
        self.asked: list[dict[str, Any]] = []

    def init(self, address: str, **options: Any) -> None:
        if address == "nowhere":
            raise ConnectionError("no answer")

    def cancel(self, task: Done, force: bool) -> None:
        """A finished task stays finished."""

    def remote(self, **given: Any) -> Callable[..., Any]:
        module = self

        class Task:
            def __init__(self, function: Callable[..., int]) -> None:
                self.function = function

            def options(self, **options: Any) -> Task:
                module.asked.append({**given, **options})
                return self

            def remote(self, *arguments: Any) -> Done:
                return Done(self.function(*arguments))

        return Task


def test_steps_run_as_tasks(
    recipe: Path, tmp_path: Path, counts: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = StandIn()
    monkeypatch.setitem(sys.modules, "ray", ray)
    options = PipelineOptions(recipe, work_dir=tmp_path / "work", ray="auto", commands=COMMANDS)
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        assert {result.state for result in run(options, JsonLog(log))} == {"done"}
    assert counts() == ["convert", "eval", "export"]
    assert [task["max_retries"] for task in ray.asked] == [0, 0, 0] and all(task["memory"] > 0 for task in ray.asked)


def test_no_cluster_and_no_package(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", StandIn())
    options = PipelineOptions(recipe, work_dir=tmp_path / "work", ray="nowhere", commands=COMMANDS)
    with pytest.raises(OptionError, match="--ray nowhere: no cluster answers there: no answer"):
        run(options, JsonLog())
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match="--ray needs the package ray"):
        run(options, JsonLog())


def test_on_ray(recipe: Path, tmp_path: Path, counts: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    if ray.__file__ is None:  # a folder of that name, such as deploy/ray where another test looks from
        pytest.skip("ray is not installed")
    options = PipelineOptions(recipe, work_dir=tmp_path / "work", ray="local", commands=COMMANDS)
    try:
        with (tmp_path / "log").open("w", encoding="utf-8") as log:
            assert {result.state for result in run(options, JsonLog(log))} == {"done"}
    finally:
        ray.shutdown()
    assert counts() == ["convert", "eval", "export"]
