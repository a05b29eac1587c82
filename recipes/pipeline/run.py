"""A pipeline from its recipe to its reports."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferencex.recipes.pipeline.base import Step
from inferencex.recipes.pipeline.graph import build_graph, read_pipeline
from inferencex.recipes.pipeline.log import Log
from inferencex.recipes.pipeline.plan import Plan, make_plan
from inferencex.recipes.pipeline.ray_runner import RayRunner
from inferencex.recipes.pipeline.runner import COMMANDS, LocalRunner, Runner
from inferencex.recipes.pipeline.schedule import Room, Schedule, StepResult
from inferencex.recipes.pipeline.source import expected_bytes, local_path, resolve
from inferencex.recipes.pipeline.store import Store
from inferencex.recipes.pipeline.summary import headline, write_reports
from inferencex.runtime.server.models.available_memory import available_memory

_PROCESSORS_OF_STEP = 4


@dataclass(frozen=True)
class PipelineOptions:
    """How a recipe is run; see `inferencex pipeline --help`.

    commands:  module whose `main` runs our commands in child processes
    """

    recipe: Path
    settings: tuple[str, ...] = ()
    work_dir: Path | None = None
    report_dir: Path | None = None
    jobs: int | None = None
    ray: str | None = None
    commands: str = COMMANDS


def plan(options: PipelineOptions) -> Plan:
    """Return what a run would do, and what that is expected to take; nothing is written or downloaded."""
    recipe, yaml = read_pipeline(options.recipe, options.settings)
    nbytes = expected_bytes(recipe.source)
    graph = build_graph(recipe, yaml, options.recipe.parent, nbytes)
    store = Store(_work_dir(options, recipe.name))
    begun = store.steps.is_dir() and local_path(recipe.source) is not None
    if begun:
        graph.resolve(resolve(recipe.source, store.hashes))
    return make_plan(graph, store, _jobs(options), source_known=begun)


def run(options: PipelineOptions, log: Log) -> list[StepResult]:
    """Run a recipe and write its reports; what was finished before is not done again.

    Raises RecipeError for a recipe that is wrong, and what `inferencex convert` raises for a source that cannot be
    had. Steps that fail are results, not errors.
    """
    recipe, yaml = read_pipeline(options.recipe, options.settings)
    graph = build_graph(recipe, yaml, options.recipe.parent)
    work_dir = _work_dir(options, recipe.name)
    store = Store(work_dir)
    lock = store.lock()
    try:
        source = resolve(recipe.source, store.hashes)
        graph.resolve(source)
        log.note(
            "pipeline", name=recipe.name, steps=len(graph.steps), source=source.model, revision=source.revision or "-"
        )
        jobs = _jobs(options)
        runner: Runner = LocalRunner(lock, options.commands)
        memory: int | None = available_memory().available
        threads: int | None = max(1, (os.cpu_count() or 1) // jobs)
        if options.ray is not None:
            runner, jobs, memory, threads = RayRunner(options.ray, options.commands), len(graph.steps), None, None
        results = asyncio.run(_scheduled(graph.steps, store, runner, jobs, memory, log, threads))
        write_reports(options.report_dir or work_dir / "report", recipe.name, results)
        log.note("finished", passed=all(result.good for result in results), summary=headline(recipe.name, results))
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt("finished steps are kept; the same command goes on from there") from interrupt
    finally:
        log.close()
        store.close()
    return results


async def _scheduled(
    steps: Sequence[Step], store: Store, runner: Runner, jobs: int, memory: int | None, log: Log, threads: int | None
) -> list[StepResult]:
    return await Schedule(steps, store, runner, Room(jobs, memory), log, threads).run()


def _work_dir(options: PipelineOptions, name: str) -> Path:
    return options.work_dir or Path(".inferencex") / name


def _jobs(options: PipelineOptions) -> int:
    """Return how many steps are worked on at once: one for every four processors unless stated."""
    return options.jobs or max(1, (os.cpu_count() or 1) // _PROCESSORS_OF_STEP)
