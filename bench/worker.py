"""What runs in the fresh process of one engine; its answers go to a file, one JSON object a line.

    python -m bench.worker version ENGINE ANSWERS
    python -m bench.worker prepare ENGINE ANSWERS CHECKPOINT FOLDER
    python -m bench.worker measure ENGINE ANSWERS FOLDER JOB
    python -m bench.worker first-token ENGINE ANSWERS FOLDER JOB

JOB is JSON: see `Job`. Imports are few, so that the time to the first token is the engine's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engines import find_engine
from bench.engines.base import Capacity, Session


@dataclass(frozen=True)
class Job:
    """What to measure: names of columns, the room they need, and a file of token ids to cut prompts from."""

    columns: tuple[str, ...]
    capacity: Capacity
    token_ids: str
    repeat: int
    seconds: float
    idle: float

    def dump(self) -> str:
        """As JSON, for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Job:
        """Read what `dump` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "columns": tuple(fields["columns"]), "capacity": Capacity(**fields["capacity"])})


class _Answers:
    def __init__(self, path: str) -> None:
        self._path = path

    def add(self, **answer: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(answer) + "\n")


def prefill_rate(session: Session, prompt: Sequence[int]) -> float:
    """Tokens per second of one prompt, until its first token is there."""
    began = time.perf_counter()
    elapsed = 0.0
    for counts in session.generate([prompt], 1):
        if counts[0] and not elapsed:
            elapsed = time.perf_counter() - began
    return len(prompt) / elapsed


def decode_rate(session: Session, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens per second of all sequences together, over the steps in which every one of them was decoding."""
    ticks: list[tuple[float, int]] = []
    complete = False
    for counts in session.generate(prompts, tokens):
        if min(counts) >= 1 and not complete:
            ticks.append((time.perf_counter(), sum(counts)))
            complete = max(counts) >= tokens
    if len(ticks) < 2:
        raise RuntimeError(
            f"no step decoded all {len(prompts)} sequences together; give them more than {tokens} tokens"
        )
    (began, before), (ended, after) = ticks[0], ticks[-1]
    return (after - before) / (ended - began)


def _measure(engine_name: str, answers: _Answers, folder: Path, job: Job) -> None:
    import resource

    from bench.columns import COLUMNS
    from bench.sampling import Patience, sample

    ids = json.loads(Path(job.token_ids).read_text())
    session = find_engine(engine_name).load(folder, job.capacity)
    for name in job.columns:
        column = COLUMNS[name]
        prompts = [ids[place * column.context :][: column.context] for place in range(column.sequences)]

        def take(column: Any = column, prompts: Any = prompts) -> float:
            if column.kind == "prefill":
                return prefill_rate(session, prompts[0])
            return decode_rate(session, prompts, column.tokens)

        take()
        figure = sample(take, Patience(job.repeat, job.seconds, job.idle))
        answers.add(column=name, **asdict(figure))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    answers.add(column="memory", value=peak / 1e6, samples=1, disturbed=False)


def _first_token(engine_name: str, answers: _Answers, folder: Path, job: Job) -> None:
    ids = json.loads(Path(job.token_ids).read_text())
    session = find_engine(engine_name).load(folder, job.capacity)
    for counts in session.generate([ids[: job.capacity.max_length - 1]], 1):
        if counts[0]:
            answers.add(monotonic=time.monotonic())
            break


def main(arguments: Sequence[str]) -> None:
    """Do one of the four tasks."""
    task, engine_name, answers_path, *rest = arguments
    answers = _Answers(answers_path)
    if task == "version":
        engine = find_engine(engine_name)
        answers.add(version=engine.version(), precision=engine.precision, settings=engine.settings)
    elif task == "prepare":
        find_engine(engine_name).prepare(Path(rest[0]), Path(rest[1]))
    elif task == "measure":
        _measure(engine_name, answers, Path(rest[0]), Job.parse(rest[1]))
    elif task == "first-token":
        _first_token(engine_name, answers, Path(rest[0]), Job.parse(rest[1]))
    else:
        raise SystemExit(f"unknown task {task!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
