"""What a run would do: for `--dry-run`, before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferencex.recipes.pipeline.base import Estimate, Finished
from inferencex.recipes.pipeline.graph import Graph
from inferencex.recipes.pipeline.schedule import estimate_of, step_key
from inferencex.recipes.pipeline.store import Store


@dataclass(frozen=True)
class PlannedStep:
    """One step, those it waits for, and what it is expected to take: nothing when it is `finished` already."""

    id: str
    waits_for: tuple[str, ...]
    estimate: Estimate
    finished: bool = False


@dataclass(frozen=True)
class Plan:
    """All steps of a recipe.

    seconds:  until the last one is done, with `jobs` at once
    memory:   bytes, of the largest step
    disk:     bytes, of all outputs that are to be made
    Each is None where the size of the source is not known.
    """

    name: str
    jobs: int
    steps: tuple[PlannedStep, ...]
    seconds: float | None
    memory: int | None
    disk: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return {
            "pipeline": self.name,
            "jobs": self.jobs,
            "seconds": self.seconds,
            "memory": self.memory,
            "disk": self.disk,
            "steps": [
                {
                    "step": step.id,
                    "waits_for": list(step.waits_for),
                    "seconds": step.estimate.seconds,
                    "memory": step.estimate.memory,
                    "disk": step.estimate.disk,
                    "measured": step.estimate.measured,
                    "finished": step.finished,
                }
                for step in self.steps
            ],
        }


def make_plan(graph: Graph, store: Store, jobs: int, *, source_known: bool) -> Plan:
    """Return the plan of a graph, with what earlier runs in the work directory took where there were any.

    source_known:  whether the conversions know the source's files, so that what is finished can be told
    """
    done = _finished(graph, store) if source_known else {}
    nothing = Estimate(0.0, 0, 0, measured=True)
    planned = tuple(
        PlannedStep(
            step.id,
            tuple(dict.fromkeys((*step.needs, *step.after))),
            nothing if step.id in done else estimate_of(step, store),
            step.id in done,
        )
        for step in graph.steps
    )
    known = all(step.estimate.seconds is not None for step in planned)
    memory = [step.estimate.memory for step in planned if step.estimate.memory is not None]
    disk = [step.estimate.disk for step in planned if step.estimate.disk is not None]
    return Plan(
        graph.recipe.name,
        jobs,
        planned,
        _makespan(planned, jobs) if known else None,
        max(memory) if known else None,
        sum(disk) if known else None,
    )


def _finished(graph: Graph, store: Store) -> dict[str, Finished]:
    found: dict[str, Finished] = {}
    for step in graph.steps:
        if all(name in found for name in step.needs):
            there = store.find(step, step_key(step, found))
            if there is not None:
                found[step.id] = there[0]
    return found


def _makespan(steps: tuple[PlannedStep, ...], jobs: int) -> float:
    """Return when the last step ends if each begins as soon as it may, in the order of the list."""
    ended: dict[str, float] = {}
    workers = [0.0] * jobs
    for step in steps:
        ready = max((ended[name] for name in step.waits_for), default=0.0)
        worker = min(range(jobs), key=lambda index: workers[index])
        workers[worker] = ended[step.id] = max(ready, workers[worker]) + (step.estimate.seconds or 0.0)
    return round(max(ended.values()), 1)
