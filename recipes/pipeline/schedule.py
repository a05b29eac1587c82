"""Working through the graph: steps wait for those they need, and for memory, and are done once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inferencex.formats.errors import InferenceXError
from inferencex.recipes.pipeline.base import Estimate, Finished, State, Step
from inferencex.recipes.pipeline.hashing import json_digest
from inferencex.recipes.pipeline.log import Log
from inferencex.recipes.pipeline.runner import Runner
from inferencex.recipes.pipeline.store import LOG_FILE, Record, Store

_TAIL = 16 << 10


@dataclass(frozen=True)
class StepResult:
    """What became of a step.

    seconds:  in this run; 0 for what was there already
    message:  why it failed or was skipped
    """

    step: Step
    state: State
    finished: Finished | None = None
    record: Record | None = None
    seconds: float = 0.0
    message: str = ""

    @property
    def good(self) -> bool:
        """Whether steps that wait for this one may go on."""
        return self.state in ("done", "cached")


class Room:
    """Room for steps: so many at once, and so much memory; a step that never fits has all of it to itself."""

    def __init__(self, jobs: int, memory: int | None) -> None:
        self._jobs, self._memory = jobs, memory
        self._running, self._taken = 0, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def take(self, memory: int) -> AsyncIterator[None]:
        """Wait until there is room for a step that takes so many bytes, and keep it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._fits(memory))
            self._running += 1
            self._taken += memory
        try:
            yield
        finally:
            self._running -= 1
            self._taken -= memory
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, memory: int) -> bool:
        if self._running == 0:
            return True
        return self._running < self._jobs and (self._memory is None or self._taken + memory <= self._memory)


class Schedule:
    """One run over the steps of a pipeline."""

    def __init__(
        self, steps: Sequence[Step], store: Store, runner: Runner, room: Room, log: Log, threads: int | None
    ) -> None:
        self._steps = steps
        self._store, self._runner, self._room, self._log, self._threads = store, runner, room, log, threads
        self._tasks: dict[str, asyncio.Task[StepResult]] = {}

    async def run(self) -> list[StepResult]:
        """Do all that can be done; what fails keeps only what waits for it from being done."""
        try:
            async with asyncio.TaskGroup() as group:
                for step in self._steps:  # those that a step waits for come before it
                    self._tasks[step.id] = group.create_task(self._step(step))
        except ExceptionGroup as unforeseen:
            raise unforeseen.exceptions[0] from unforeseen  # the group's own words do not say what happened
        return [self._tasks[step.id].result() for step in self._steps]

    async def _step(self, step: Step) -> StepResult:
        before = [await self._tasks[name] for name in (*step.needs, *step.after)]
        bad = [result.step.id for result in before if not result.good]
        if bad:
            result = StepResult(step, "skipped", message=f"waits for {', '.join(bad)}")
        else:
            inputs = {result.step.id: result.finished for result in before if result.finished is not None}
            started = time.monotonic()
            try:
                result = await self._do(step, inputs)
            except (InferenceXError, OSError) as error:
                result = StepResult(step, "failed", seconds=time.monotonic() - started, message=str(error))
        self._log.ended(result)
        return result

    async def _do(self, step: Step, inputs: Mapping[str, Finished]) -> StepResult:
        key = await asyncio.to_thread(step_key, step, inputs)
        found = await asyncio.to_thread(self._store.find, step, key)
        if found is not None:
            finished, record = found
            return StepResult(step, "cached" if finished.outcome.passed else "failed gate", finished, record)
        estimate = estimate_of(step, self._store)
        async with self._room.take(estimate.memory or 0):
            started = time.monotonic()
            self._log.started(step, estimate)
            folder = self._store.partial(step, key)
            status, tail = await self._run(step, folder, inputs, estimate)
            outcome = await asyncio.to_thread(step.finish, folder, inputs, status, tail)
            seconds = time.monotonic() - started
            finished, record = await asyncio.to_thread(self._store.keep, step, key, outcome, seconds)
        return StepResult(step, "done" if outcome.passed else "failed gate", finished, record, seconds)

    async def _run(
        self, step: Step, folder: Path, inputs: Mapping[str, Finished], estimate: Estimate
    ) -> tuple[int, str]:
        command = step.command(folder, inputs, self._threads)
        if command is None:
            return 0, ""
        status = await self._runner.run(command, folder, estimate)
        return status, _why(folder / LOG_FILE, status)


def step_key(step: Step, inputs: Mapping[str, Finished]) -> str:
    """Return the hash of everything that a step's outputs depend on."""
    digests = {name: inputs[name].outcome.digest for name in step.needs}
    return json_digest({"step": step.id, "ingredients": step.ingredients(), "inputs": digests})


def estimate_of(step: Step, store: Store) -> Estimate:
    """Return what an earlier run of the step took, or else the step's rule of thumb."""
    earlier = store.earlier(step)
    rule = step.estimate()
    if earlier is None or earlier.seconds == 0:
        return rule
    return Estimate(earlier.seconds, earlier.peak_memory or rule.memory, earlier.disk or rule.disk, measured=True)


def _why(log: Path, status: int) -> str:
    """Return the line of a command's log that says why it failed."""
    if status == 0:
        return ""
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - _TAIL))
        lines = [line.strip() for line in handle.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    how = f"was ended by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{(errors or lines or ['it said nothing'])[-1]} ({how}; all of it: {log})"
