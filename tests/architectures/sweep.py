"""Try every decoder-only architecture that `transformers` knows, and write down which are supported.

    python -m tests.architectures.sweep [--jobs 2] [--timeout 180] [--at-least 0] [--output PAGE] [name ...]

Without names all of them are tried, and the page is `docs/architectures.md` unless another is asked for.
Each architecture is captured, run and compared in a process of its own, so that one that hangs or dies is a line of
the table like any other. The exit status is 0 whatever the table says, unless `--at-least` asks for more than it has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import transformers

from inferencex.formats.errors import InferenceXError
from tests.architectures import comparison, zoo

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures.md"

_INTRODUCTION = """\
# Architectures

What `transformers` {version} lists for causal language modelling, and what of it InferenceX runs. There is no code
for any of these names: each model is captured from its `transformers` implementation. `make architectures` writes
this page.

For every decoder-only name a tiny random model with every kind of layer of the architecture is converted and run on
the reference backend: five sequences of different lengths together, each cut into chunks in its own way. The error is
the largest difference of any logit to `transformers` running each sequence alone in float32; supported means that it
is below {tolerance:g}.

**{supported} of {decoders} decoder-only architectures are supported.**
"""


@dataclass(frozen=True)
class Result:
    """What became of one architecture.

    error:  largest difference of any logit, None when it did not run.
    reason: why it is not supported, in one line; empty when it is.
    """

    name: str
    error: float | None
    reason: str
    seconds: float

    @property
    def supported(self) -> bool:
        """Whether the architecture ran and agreed with `transformers`."""
        return not self.reason


@dataclass
class _Running:
    name: str
    process: ForkProcess
    receiver: Connection
    started: float


def sweep(names: Sequence[str], *, jobs: int, timeout: float) -> Iterator[Result]:
    """Try `names`, `jobs` at a time, each for at most `timeout` seconds; yields results as they come."""
    context = multiprocessing.get_context("fork")
    waiting = list(names)
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_try, args=(name, sender), daemon=True)
            process.start()
            sender.close()
            running.append(_Running(name, process, receiver, time.monotonic()))
        wait([job.receiver for job in running], timeout=1.0)
        for job in list(running):
            seconds = time.monotonic() - job.started
            if job.receiver.poll():
                try:
                    yield job.receiver.recv()
                except EOFError:
                    job.process.join()
                    yield Result(job.name, None, f"the process died with status {job.process.exitcode}", seconds)
            elif seconds > timeout:
                job.process.kill()
                yield Result(job.name, None, f"not finished after {timeout:.0f} s", seconds)
            else:
                continue
            job.process.join()
            job.receiver.close()
            running.remove(job)


def _try(name: str, sender: Connection) -> None:
    """Run in the child: compare one architecture and send its Result."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)  # torch.export prints the whole graph beside some of its errors
    os.dup2(silence, 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.monotonic()
    error: float | None = None
    reason = ""
    try:
        error = comparison.largest_error(comparison.largest_errors(name))
        if not error < comparison.TOLERANCE:
            reason = f"logits differ by {error:.2g}"
    except InferenceXError as refusal:
        reason = _one_line(refusal)
    except Exception as failure:  # whatever a child meets is a line of the table
        reason = f"{type(failure).__name__}: {_one_line(failure)}"
    sender.send(Result(name, error, reason, time.monotonic() - started))


def _one_line(error: BaseException) -> str:
    line = re.sub(r"\{u\d+[^}]*\}", "...", " ".join(str(error).split()))  # sets of symbols, in no fixed order
    return line if len(line) <= 300 else line[:297] + "..."


def page(results: Sequence[Result]) -> str:
    """Return `docs/architectures.md`: one row per name that `transformers` lists."""
    by_name = {result.name: result for result in results}
    supported = sum(result.supported for result in results)
    lines = [
        _INTRODUCTION.format(
            version=transformers.__version__,
            tolerance=comparison.TOLERANCE,
            supported=supported,
            decoders=len(results),
        ),
        "| Architecture | Supported | Largest error | Reason |",
        "|---|---|---|---|",
    ]
    for name in sorted(by_name):
        result = by_name[name]
        error = "" if result.error is None else f"{result.error:.0e}"
        lines.append(f"| `{name}` | {'yes' if result.supported else 'no'} | {error} | {_cell(result.reason)} |")
    lines += ["", "## Not decoder-only text", "", "| Architecture | Kind |", "|---|---|"]
    others = {name: zoo.kind(name) for name in sorted(zoo.names())}
    lines += [f"| `{name}` | {_cell(kind)} |" for name, kind in others.items() if kind != zoo.DECODER]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures.sweep", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures to try; all decoder-only ones when none is given")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one architecture")
    parser.add_argument("--output", type=Path, help="write the page here (docs/architectures.md if all are tried)")
    parser.add_argument("--at-least", type=int, default=0, help="exit with 1 when fewer are supported")
    options = parser.parse_args(arguments)

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    names = options.names or [name for name in zoo.names() if zoo.kind(name) == zoo.DECODER]
    results = []
    for result in sweep(names, jobs=options.jobs, timeout=options.timeout):
        results.append(result)
        said = f"{result.error:.1e}" if result.supported else result.reason
        print(f"[{len(results)}/{len(names)}] {result.name} ({result.seconds:.1f} s): {said}", flush=True)
    supported = sum(result.supported for result in results)
    print(f"{supported} of {len(results)} supported")
    output = options.output if options.names else options.output or _PAGE
    if output is not None:
        output.write_text(page(results), encoding="utf-8")
    return 0 if supported >= options.at_least else 1


if __name__ == "__main__":
    raise SystemExit(main())
