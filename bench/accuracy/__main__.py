"""Accuracy and cost of quantization, ours beside our peers': `python -m bench.accuracy`."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from rich.console import Console

from bench.accuracy.figures import compare
from bench.accuracy.plot import scatter
from bench.accuracy.reference import Reference, evaluation_windows, reference_of
from bench.accuracy.report import markdown, notes, terminal_table
from bench.accuracy.results import Run, chosen_rows
from bench.accuracy.run import ROOT, Harness, ProcessError
from bench.accuracy.tools import NAMES, find_tool
from bench.accuracy.tools.base import Task
from bench.machine import default_threads, describe_machine
from bench.models import MODELS
from bench.run import ensure_checkpoint
from inferencex.convert.calibrate.data import CalibrationOptions, load_calibration
from inferencex.convert.source.open import open_checkpoint

PAGE = ROOT / "docs" / "accuracy.md"
PLOT = "accuracy.svg"
CACHE = Path("~/.cache/inferencex-accuracy")
_CALIBRATION = ("calibration/exl3.c4.utf8", "calibration/exl3.wiki.utf8")
_TEXT = "eval/wikitext2.test.raw"
_MODEL = MODELS["smollm2"]


def accuracy(
    only: Annotated[
        str | None,
        typer.Option(help=f"Tools ({', '.join(NAMES)}; ours) or rows (TOOL/ROW), separated by commas."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Convert and measure anew what is finished already.")] = False,
    list_rows: Annotated[bool, typer.Option("--list", help="Print the names of all rows, and end.")] = False,
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder to begin from. Default: SmolLM2-135M-Instruct.")
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(help="Text file to calibrate on; repeatable. Default: c4 and wiki of the shared data."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of the calibration.")] = 128,
    length: Annotated[int, typer.Option(min=32, help="Tokens of a sample.")] = 512,
    text: Annotated[
        Path | None, typer.Option(help="Text to measure on. Default: wikitext-2's test text in the shared data.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of the text.")] = 64,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every tool. Default: one a processor.")] = None,
    interpreters: Annotated[
        list[str] | None,
        typer.Option("--python", help="TOOL=PATH: the interpreter of an environment of its own; repeatable."),
    ] = None,
    environments: Annotated[
        Path | None,
        typer.Option(help="Folder of environments by tool: TOOL/bin/python is used where it is."),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where models, logs and raw figures are kept.")] = CACHE,
    output: Annotated[
        Path | None, typer.Option(help="Page to write. Default: docs/accuracy.md, if all settings are the defaults.")
    ] = None,
) -> None:
    """Quantize a model with every tool, measure what that does to its predictions, and write docs/accuracy.md.

    Finished rows are kept, and not run again by the next call with the same settings.
    """
    console = Console()
    known = {name: [row.name for row in find_tool(name).rows] for name in NAMES}
    if list_rows:
        for name, rows in known.items():
            for row in rows:
                console.print(f"{name}/{row}", highlight=False, soft_wrap=True)
        return
    try:
        wanted = chosen_rows(only, known)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    folder = folder.expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    texts = tuple(_given("--calibration", path) for path in calibration or map(_shared, _CALIBRATION))
    judged = _given("--text", text or _shared(_TEXT))
    threads = threads or default_threads()
    with console.status("checkpoint, calibration and the source's predictions"):
        checkpoint = model.absolute() if model is not None else ensure_checkpoint(_MODEL, folder)
        ids = _token_ids(checkpoint, texts, samples, length)
        reference = reference_of(checkpoint, evaluation_windows(checkpoint, judged, windows, window), folder)
        place = folder / _key(ids, reference.windows, threads, checkpoint)
        place.mkdir(exist_ok=True)
        lock = _alone(place)
        task = Task(checkpoint, place / "token_ids.npy", texts, samples, length, window, threads)
        np.save(task.token_ids, ids)
        run = _begin(place / "results.json", reference, _MODEL.title if model is None else checkpoint.name)
    run.settings = {
        "calibration": f"{samples} x {length} tokens of {', '.join(path.name for path in texts)}",
        "text": f"{windows} x {window} tokens of {judged.name}",
        "threads": threads,
    }
    harness = Harness(task, reference, place, _interpreters(interpreters or (), environments))
    with lock:
        _measure_all(harness, wanted, run, place / "results.json", console, again=again)
    console.print(terminal_table(run))
    for line in notes(run):
        console.print(line, highlight=False, soft_wrap=True)
    defaults = (samples, length, windows, window, model, calibration, text) == (128, 512, 64, 512, None, None, None)
    page = output or (PAGE if defaults else None)
    if page is not None:
        page.write_text(markdown(run, PLOT), encoding="utf-8")
        page.with_name(PLOT).write_text(scatter(f"{run.model}: KL by size", run.ordered()), encoding="utf-8")
        console.print(f"Wrote {page}")
    if run.failures:
        raise typer.Exit(1)


def _measure_all(
    harness: Harness, wanted: Mapping[str, Sequence[str]], run: Run, results: Path, console: Console, *, again: bool
) -> None:
    """Measure what is wanted and not there yet; after each row, write the results."""
    for tool, names in wanted.items():
        missing = [row for row in find_tool(tool).rows if row.name in names]
        missing = [row for row in missing if again or f"{tool}/{row.name}" not in run.findings]
        if not missing:
            continue
        try:
            version = harness.version(tool)
        except ProcessError as error:
            run.skipped[tool] = error.reason
            console.print(f"{tool} is left out: {error}", highlight=False, soft_wrap=True)
            continue
        run.skipped.pop(tool, None)
        converted: set[str] = set()
        for row in missing:
            name = f"{tool}/{row.name}"
            began = time.monotonic()
            try:
                with console.status(f"{name}: {row.scheme}"):
                    fresh = again and row.conversion not in converted
                    run.findings[name] = harness.measure(tool, row, version, again=fresh)
                run.failures.pop(name, None)
                said = f"KL {run.findings[name].mean_kl:.4g}"
            except ProcessError as error:
                run.failures[name], said = error.reason, str(error)
            converted.add(row.conversion)
            console.print(f"{name}: {said}, {time.monotonic() - began:.0f} s", highlight=False, soft_wrap=True)
            run.save(results)


def _alone(place: Path) -> FileLock:
    """Return the lock of a folder, held: two runs would overwrite each other's results, and disturb their times."""
    lock = FileLock(place / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise typer.BadParameter(f"{place}: another run is at work there", param_hint="--folder") from error
    return lock


def _begin(results: Path, reference: Reference, title: str) -> Run:
    """Return the run that `results` keeps, or a new one, as of now."""
    date = time.strftime("%Y-%m-%d")
    command = shlex.join(["python", "-m", "bench.accuracy", *sys.argv[1:]])
    software = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    if results.exists():
        run = Run.load(results)
        return replace(run, date=date, command=command, machine=describe_machine(), software=software)
    exact = compare(reference.logits(), reference.logits(), reference.windows)
    run = Run(title, date, command, describe_machine(), software, {}, exact.perplexity)
    run.save(results)
    return run


def _token_ids(checkpoint: Path, texts: Sequence[Path], samples: int, length: int) -> NDArray[np.int64]:
    """Return what all tools calibrate on, `[samples, length]`: what `inferencex-convert` draws from these texts."""
    opened = open_checkpoint(str(checkpoint))
    options = CalibrationOptions(",".join(map(str, texts)), samples, length)
    return load_calibration(options, opened.files, vocab_size=opened.config.vocab_size).token_ids


def _key(ids: NDArray[np.int64], judged: NDArray[np.int64], threads: int, checkpoint: Path) -> str:
    """Name a folder after all that figures depend on."""
    facts = [ids.tolist(), judged.tolist(), threads, (checkpoint / "config.json").read_text(encoding="utf-8")]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
    return "-".join([*("x".join(map(str, array.shape)) for array in (ids, judged)), f"{threads}-threads", digest])


def _shared(name: str) -> Path:
    return Path(os.environ.get("INFERENCEX_SHARED_DATA", ROOT.parent / "shared" / "data")) / name


def _given(option: str, path: Path) -> Path:
    if not path.is_file():
        raise typer.BadParameter(
            f"{path}: there is no such file; give another (the shared data is looked for beside the repository, or "
            "where INFERENCEX_SHARED_DATA says)",
            param_hint=option,
        )
    return path.absolute()


def _interpreters(pairs: Sequence[str], environments: Path | None) -> dict[str, str]:
    """Return the interpreter of each tool that has one of its own; a pair TOOL=PATH goes before an environment."""
    found: dict[str, str] = {}
    if environments is not None:
        pythons = {name: environments.absolute() / name / "bin" / "python" for name in NAMES}
        found = {name: str(python) for name, python in pythons.items() if python.exists()}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in NAMES or not path:
            raise typer.BadParameter(f"{pair!r}: expected TOOL=PATH, TOOL of {', '.join(NAMES)}", param_hint="--python")
        found[name] = path
    return found


if __name__ == "__main__":
    typer.run(accuracy)
