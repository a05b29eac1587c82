"""Our server, its peers' and our engine without one, under the same load: `python -m bench.serve`."""

from __future__ import annotations

import platform
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.__main__ import CACHE
from bench.engines import OURS
from bench.machine import default_threads, describe_machine
from bench.models import MODELS
from bench.run import ROOT, WorkerError, Workers, ensure_checkpoint
from bench.sampling import Patience
from bench.serve.load import Load
from bench.serve.measure import IncompleteError, measure_server
from bench.serve.offline import OfflineError, offline_rates
from bench.serve.process import ServerError, check_installed, running
from bench.serve.report import markdown, notes, terminal_table
from bench.serve.results import Run, ServerResult
from bench.serve.servers import SERVERS

PAGE = ROOT / "docs" / "serving-benchmarks.md"
MODEL = "smollm2"


def bench_serve(
    servers: Annotated[str | None, typer.Option(help=f"Of {', '.join(SERVERS)}; separated by commas.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 128,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each repetition.")] = 128,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    seconds: Annotated[
        float, typer.Option(help="No further repetition on a server after this long, once there is one of each way.")
    ] = 60.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every engine. Default: one a processor.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer, or the start of a server, may take.")] = 600.0,
    interpreters: Annotated[
        list[str] | None,
        typer.Option("--python", help="SERVER=PATH: the interpreter of an environment of its own; repeatable."),
    ] = None,
    folder: Annotated[Path, typer.Option("--folder", help="Where prepared models and logs are kept.")] = CACHE,
    output: Annotated[
        Path | None, typer.Option(help="Page to write. Default: docs/serving-benchmarks.md, if all were asked for.")
    ] = None,
) -> None:
    """Measure our server, its peers' and our engine without one, and write docs/serving-benchmarks.md."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # it stops the server under test
    console = Console()
    chosen = tuple(SERVERS) if servers is None else tuple(name.strip() for name in servers.split(","))
    for name in chosen:
        if name not in SERVERS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(SERVERS)}", param_hint="--servers")
    for pair in interpreters or ():
        if "=" not in pair or pair.split("=", 1)[0] not in SERVERS:
            raise typer.BadParameter(f"{pair!r}: expected SERVER=PATH, SERVER of {', '.join(SERVERS)}")
    load = Load(threads or default_threads(), concurrency, prompt_tokens, output_tokens, requests, repeat, seconds)
    folder = folder.expanduser()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = Workers(load.threads, Patience(1, 0.0), logs, dict(pair.split("=", 1) for pair in interpreters or ()))
    run = Run(
        date=time.strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "bench.serve", *sys.argv[1:]]),
        machine=describe_machine(),
        software=f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        model=MODELS[MODEL].title,
        load=load,
    )
    with console.status("checkpoint"):
        checkpoint = ensure_checkpoint(MODELS[MODEL], folder)
    for name in chosen:
        began = time.monotonic()
        with console.status(f"{name}: measuring"):
            _measure(name, run, workers, checkpoint, folder / MODEL / name, timeout)
        said = run.skipped.get(name) or run.servers[name].failure or "done"
        console.print(f"{name}: {said}, {time.monotonic() - began:.0f} s", highlight=False)
    run.save(folder / "last_serving_run.json")
    console.print(terminal_table(run))
    for line in notes(run):
        console.print(line, highlight=False)
    page = output or (PAGE if set(chosen) == set(SERVERS) else None)
    if page is not None:
        page.write_text(markdown(run), encoding="utf-8")
        console.print(f"Wrote {page}")
    if OURS in run.skipped or any(result.failure for result in run.servers.values()):
        raise typer.Exit(1)


def _measure(name: str, run: Run, workers: Workers, checkpoint: Path, place: Path, timeout: float) -> None:
    """Measure one server, and for ours the engine without it right before and after; note what goes wrong."""
    server = SERVERS[name]
    interpreter = workers.interpreters.get(name, sys.executable)
    try:
        about = workers.probe(name)
        check_installed(server, interpreter)
        workers.prepare(name, about.version, checkpoint, place)
    except (WorkerError, ServerError) as error:
        run.skipped[name] = str(error)
        return
    result = run.servers[name] = ServerResult(about.version, about.precision, server.settings)
    try:
        if name == OURS:
            run.offline += offline_rates(place, run.load)
        log = workers.logs / f"{name}.server.log"
        with running(server, place, run.load, log, timeout, interpreter) as origin:
            result.served += measure_server(server, origin, run.load, checkpoint, timeout)
        if name == OURS:
            run.offline += offline_rates(place, run.load)
    except (ServerError, IncompleteError, OfflineError) as error:
        result.failure = str(error)


if __name__ == "__main__":
    typer.run(bench_serve)
