"""A pipeline that is killed, wherever, ends with the same outputs and does nothing twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from inferencex.recipes.pipeline.hashing import HashCache
from inferencex.recipes.pipeline.schedule import StepResult
from tests.recipes.pipeline.conftest import ROOT

Run = Callable[..., dict[str, StepResult]]
# In the order in which a run comes by: each run gets further than the one before.
POINTS = (
    "convert:half",
    "convert:whole",
    "keep:begin",
    "keep:end",
    "eval:half",
    "eval:whole",
    "export:half",
    "export:whole",
    "publish:begin",
    "publish:end",
)


def drive(recipe: Path, work: Path, die: str = "") -> int:
    driver = Path(__file__).with_name("driver.py")
    environment = {**os.environ, "DIE": die}
    command = [sys.executable, str(driver), str(recipe), str(work)]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, timeout=120).returncode


def outputs(work: Path) -> dict[str, str]:
    """Hashes of all outputs of finished steps but reports, which hold timings."""
    told = ("report.json", "results.json", "step.json", "log.txt", "usage.json")
    found = HashCache().tree(work / "steps")
    return {name: digest for name, digest in found.items() if not name.endswith(told)}


def test_killed_anywhere(tmp_path: Path, recipe: Path, counts: Callable[[], list[str]]) -> None:
    with recipe.open("a", encoding="utf-8") as text:
        text.write("    artifact: gguf\n")  # so that each step comes after the one before
    assert drive(recipe, tmp_path / "whole") == 0
    expected, published = outputs(tmp_path / "whole"), HashCache().tree(tmp_path / "published")
    assert counts() == ["convert", "eval", "export"] and len(expected) > 3 and "SHA256SUMS" in published

    for name in published:
        (tmp_path / "published" / name).unlink()
    times: dict[Path, int] = {}
    for point in POINTS:
        assert drive(recipe, tmp_path / "killed", point) == -signal.SIGKILL, point
        for path, changed in times.items():
            assert path.stat().st_mtime_ns == changed, f"{path} was made again after {point}"
        times = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed/steps").glob("*[!l]/step.json")}
    assert drive(recipe, tmp_path / "killed") == 0
    assert outputs(tmp_path / "killed") == expected
    assert HashCache().tree(tmp_path / "published") == published
    # Only what was killed in the middle began again: a complete bundle is taken as it is, an evaluation is not.
    again = counts()[3:]
    assert again.count("convert") == 2 and again.count("eval") == 3 and again.count("export") == 3


def test_nothing_is_done_twice(tmp_path: Path, run_recipe: Run, counts: Callable[[], list[str]]) -> None:
    assert {result.state for result in run_recipe().values()} == {"done"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work/steps").rglob("*") if path.is_file()}
    assert {result.state for result in run_recipe().values()} == {"cached"}
    assert counts() == ["convert", "eval", "export"]
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_only_what_a_change_reaches_is_done_again(
    tmp_path: Path, run_recipe: Run, checkpoint: Path, counts: Callable[[], list[str]]
) -> None:
    run_recipe()
    states = {name: result.state for name, result in run_recipe("gates.quality.limit=3").items()}
    assert states["convert:int4"] == "cached" and states["evaluate:int4:quality"] == "done"
    assert states["export:int4:gguf"] == "cached"
    (checkpoint / "model.safetensors").write_bytes(b"others!")
    states = {name: result.state for name, result in run_recipe().items()}
    assert states["convert:int4"] == "done"
    assert states["evaluate:int4:quality"] == "cached", "the new bundle has the same bytes, and so the same quality"
    assert counts().count("convert") == 2


def test_calibration_text_counts_by_what_it_says(
    tmp_path: Path, run_recipe: Run, counts: Callable[[], list[str]]
) -> None:
    text = tmp_path / "text.jsonl"
    settings = (f"conversions.int4.options.calibration='{text}#words'",)
    for words in ("one", "two"):
        text.write_text(f'{{"words": "{words}"}}\n', encoding="utf-8")
        assert run_recipe(*settings)["convert:int4"].state == "done"
    assert run_recipe(*settings)["convert:int4"].state == "cached"


def test_damaged_and_removed_outputs_are_made_again(
    tmp_path: Path, run_recipe: Run, counts: Callable[[], list[str]]
) -> None:
    first = run_recipe()
    finished = first["convert:int4"].finished
    assert finished is not None
    (finished.folder / "bundle" / "weights.bin").write_bytes(b"damaged")
    (tmp_path / "published" / "SHA256SUMS").unlink()
    (tmp_path / "published" / "weights.bin").unlink()
    for path in (tmp_path / "published").iterdir():
        path.unlink()
    states = {name: result.state for name, result in run_recipe().items()}
    assert states == {
        "convert:int4": "done",
        "evaluate:int4:quality": "cached",
        "export:int4:gguf": "cached",
        next(name for name in states if name.startswith("publish")): "done",
    }
