"""Prefill, decode, start, memory and size of InferenceX and its peers, side by side: `python -m bench`."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.columns import COLUMNS, QUICK, Column
from bench.engines import NAMES, OURS
from bench.engines.ours import BACKEND
from bench.limits import measure_limits
from bench.machine import default_threads, describe_machine
from bench.models import MODELS
from bench.report import markdown, notes, terminal_table
from bench.results import EngineResult, Run
from bench.run import ROOT, WorkerError, Workers, ensure_checkpoint
from bench.sampling import Patience

PAGE = ROOT / "docs" / "benchmarks.md"
CACHE = Path("~/.cache/inferencex-bench")


def _chosen(option: str, given: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if given is None else tuple(name.strip() for name in given.split(","))
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint=option)
    return names


def bench(
    engines: Annotated[str | None, typer.Option(help=f"Of {', '.join(NAMES)}; separated by commas.")] = None,
    columns: Annotated[str | None, typer.Option(help=f"Of {', '.join(COLUMNS)}.")] = None,
    models: Annotated[str | None, typer.Option(help=f"Of {', '.join(MODELS)}.")] = None,
    backend: Annotated[str, typer.Option(help="Backend of InferenceX.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every engine. Default: one a processor.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    seconds: Annotated[float, typer.Option(help="No more samples of a figure after this long.")] = 60.0,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that each engine is measured in, in turns; the best figures count.")
    ] = 1,
    wait: Annotated[float, typer.Option(help="Longest wait, in seconds, for an idle machine, for each figure.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Short prompts, SmolLM2 only, two samples.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Fill up with figures of the run before, which may be stale.")
    ] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Make the chosen engines' models anew.")] = False,
    interpreters: Annotated[
        list[str] | None,
        typer.Option("--python", help="ENGINE=PATH: the interpreter of an environment of its own; repeatable."),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where prepared models and logs are kept.")] = CACHE,
    output: Annotated[
        Path | None, typer.Option(help="Page to write. Default: docs/benchmarks.md, if everything was measured.")
    ] = None,
) -> None:
    """Measure InferenceX and its peers side by side, print the tables, and write docs/benchmarks.md."""
    console = Console()
    chosen_engines = _chosen("--engines", engines, NAMES)
    chosen_columns = _chosen("--columns", columns or (",".join(QUICK) if quick else None), tuple(COLUMNS))
    chosen_models = _chosen("--models", models or ("smollm2" if quick else None), tuple(MODELS))
    for pair in interpreters or ():
        if "=" not in pair or pair.split("=", 1)[0] not in NAMES:
            raise typer.BadParameter(
                f"{pair!r}: expected ENGINE=PATH, ENGINE of {', '.join(NAMES)}", param_hint="--python"
            )
    os.environ[BACKEND] = backend
    folder = folder.expanduser()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = Workers(
        threads=threads or default_threads(),
        patience=Patience(min(repeat, 2) if quick else repeat, seconds, wait),
        logs=logs,
        interpreters=dict(pair.split("=", 1) for pair in interpreters or ()),
    )
    run = Run(
        date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        machine=describe_machine(),
        software=f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        threads=workers.threads,
        limits=measure_limits(workers.threads, folder),
    )
    installed = _probe(workers, chosen_engines, run, console)
    for model_name in chosen_models:
        with console.status(f"{model_name}: checkpoint"):
            checkpoint = ensure_checkpoint(MODELS[model_name], folder)
        wanted = [COLUMNS[name] for name in chosen_columns]
        for process in range(processes):
            for engine, about in installed.items():
                began = time.monotonic()
                with console.status(f"{model_name}: {engine}"):
                    place = folder / model_name / engine
                    result = _measure(workers, engine, about, checkpoint, place, wanted, rebuild and process == 0)
                console.print(f"{model_name}: {engine}: {result.failure or 'done'}, {time.monotonic() - began:.0f} s")
                run.models.setdefault(model_name, {}).setdefault(engine, result).take_better(result)
        run.limits = run.limits.at_least(measure_limits(workers.threads, folder))
    last = folder / "last_run.json"
    asked = {*chosen_engines, *chosen_columns, *chosen_models}
    whole = asked == {*NAMES, *COLUMNS, *MODELS}
    if keep and last.exists():
        run.complete_from(Run.load(last))
    run.save(last)
    for model_name in run.models:
        console.print(terminal_table(run, model_name))
    for line in notes(run):
        console.print(line, highlight=False)
    page = output or (PAGE if whole else None)
    if page is not None:
        page.write_text(markdown(run), encoding="utf-8")
        console.print(f"Wrote {page}")
    if any(result.failure for results in run.models.values() for result in results.values()):
        raise typer.Exit(1)


def _measure(
    workers: Workers,
    engine: str,
    about: EngineResult,
    checkpoint: Path,
    folder: Path,
    columns: list[Column],
    rebuild: bool,
) -> EngineResult:
    """Measure an engine in processes of its own, making its model first where that is missing or asked for."""
    result = EngineResult(about.version, about.precision, about.settings)
    try:
        workers.prepare(engine, about.version, checkpoint, folder, anew=rebuild)
        workers.measure(engine, folder, checkpoint, columns, result)
    except WorkerError as error:
        result.failure = str(error)
    return result


def _probe(workers: Workers, names: tuple[str, ...], run: Run, console: Console) -> dict[str, EngineResult]:
    """Ask every engine for its version, and note those that are not there."""
    installed = {}
    for name in names:
        try:
            installed[name] = workers.probe(name)
        except WorkerError as error:
            run.skipped[name] = str(error)
            console.print(f"{name} is left out: {error}", highlight=False)
    if OURS in names and OURS not in installed:
        raise typer.Exit(1)
    return installed


if __name__ == "__main__":
    typer.run(bench)
