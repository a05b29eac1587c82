"""A whole run of `inferencex bench serve`: prompts made, every load measured, results shown and written."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from inferencex.cli.console import stderr_console
from inferencex.formats.errors import RequestError
from inferencex.runtime.load_test.api import RequestShape, only_model
from inferencex.runtime.load_test.arrivals import evenly, poisson
from inferencex.runtime.load_test.connection import HttpClient
from inferencex.runtime.load_test.plan import Plan
from inferencex.runtime.load_test.plot import latency_throughput
from inferencex.runtime.load_test.prompt_files import FilePrompt, read_text
from inferencex.runtime.load_test.prompts import Prompt, random_prompts, text_prompts
from inferencex.runtime.load_test.records import RequestRecord
from inferencex.runtime.load_test.report import latency_table, results_json, summary_lines, sweep_table
from inferencex.runtime.load_test.run import LoadRun, Measurement
from inferencex.runtime.load_test.statistics import Load, Result, summarize
from inferencex.runtime.load_test.tokenizer import FileTokenizer, ServerTokenizer, Tokenizer
from inferencex.runtime.load_test.words import token_vocabulary, word_vocabulary


async def measure(plan: Plan) -> bool:
    """Do what the plan says; return whether any request completed.

    Raises RequestError when the server does not answer at all, or cannot say what is needed for prompts.
    """
    client = HttpClient(plan.origin, plan.api_key)
    try:
        return await _Session(plan, client).measure()
    finally:
        client.close()


class _Session:
    def __init__(self, plan: Plan, client: HttpClient) -> None:
        self._plan = plan
        self._client = client
        self._console = Console(highlight=False, soft_wrap=True)
        self._notes = stderr_console()

    async def measure(self) -> bool:
        plan = self._plan
        shape = RequestShape(
            model=plan.model or await only_model(self._client),
            endpoint=plan.endpoint,
            stream=plan.stream,
            temperature=plan.temperature,
            ignore_eos=plan.ignore_eos,
            extra=plan.extra,
        )
        prompts = await self._prompts(shape.model)
        self._notes.print(f"{plan.origin}, {shape.model}, seed {plan.seed}", markup=False)
        results: list[Result] = []
        records: list[list[RequestRecord]] = []
        for load in plan.loads:
            measurement = await self._one(load, shape, prompts)
            result = summarize(load, measurement, plan.objectives)
            results.append(result)
            records.append(measurement.records)
            self._console.print(latency_table(result))
            for line in summary_lines(result):
                self._console.print(line, markup=False)
        if len(results) > 1:
            self._console.print(sweep_table(results))
        if plan.output is not None:
            plan.output.write_text(results_json(self._settings(shape), results, records), encoding="utf-8")
        if plan.plot is not None:
            plan.plot.write_text(latency_throughput(f"{shape.model} at {plan.origin}", results), encoding="utf-8")
        return any(result.completed for result in results)

    async def _one(self, load: Load, shape: RequestShape, prompts: Iterator[Prompt]) -> Measurement:
        """Warm up, then measure one load."""
        plan = self._plan
        if plan.warm_up:
            warm_up = LoadRun(self._client, shape, itertools.islice(prompts, plan.warm_up), plan.timeout)
            done = await warm_up.at_concurrency(load.concurrency or plan.warm_up)
            failed = [record for record in done.records if not record.ok]
            if len(failed) == len(done.records) and failed:
                raise RequestError(f"{plan.origin}: no request of the warm-up completed ({failed[0].message})")
        with Progress(
            TextColumn(load.label, markup=False),
            BarColumn(),
            TextColumn("{task.completed} requests"),
            TimeElapsedColumn(),
            console=self._notes,
            disable=not self._notes.is_terminal,
            transient=True,
            refresh_per_second=2,  # it costs the processor that may be the server's
        ) as progress:
            task = progress.add_task("", total=plan.requests)
            run = LoadRun(
                self._client,
                shape,
                # Made beforehand where their number is known, so that making them takes nothing from the server.
                prompts if plan.requests is None else iter([*itertools.islice(prompts, plan.requests)]),
                plan.timeout,
                lambda record: progress.advance(task),
            )
            if load.rate is None:
                return await run.at_concurrency(load.concurrency or 1, plan.duration)
            source = random.Random(f"{plan.seed} arrivals")
            arrivals = evenly(load.rate) if plan.fixed_rate else poisson(load.rate, source)
            return await run.at_times(arrivals, load.concurrency, plan.duration)

    async def _prompts(self, model: str) -> Iterator[Prompt]:
        """Return the prompts of all measurements, one after the other."""
        plan = self._plan
        source = random.Random(f"{plan.seed} prompts")
        if plan.file_prompts is not None:
            needed = None if plan.requests is None else len(plan.loads) * (plan.requests + plan.warm_up)
            if needed is None or needed > len(plan.file_prompts):
                self._notes.print(
                    f"note: the file has {len(plan.file_prompts)} prompts, and they are asked again once all were; "
                    "a prefix cache answers those faster",
                    markup=False,
                )
            return self._repeated(plan.file_prompts, source)
        tokenizer: Tokenizer
        if plan.tokenizer is not None:
            tokenizer = FileTokenizer(plan.tokenizer)
        else:
            tokenizer = await ServerTokenizer.find(self._client, model)
        if plan.text_file is not None and plan.requests is not None:
            ids = await tokenizer.encode(read_text(plan.text_file), special_tokens=False)
            count = len(plan.loads) * (plan.requests + plan.warm_up)
            decoder = tokenizer if plan.as_text else None
            return iter(await text_prompts(ids, plan.prompt_lengths, plan.output_lengths, source, count, decoder))
        if plan.as_text:
            words = await word_vocabulary(tokenizer, special_tokens=plan.endpoint == "completions")
            return random_prompts(words, plan.prompt_lengths, plan.output_lengths, source, plan.shared_prefix)
        tokens = await token_vocabulary(tokenizer)
        return random_prompts(tokens, plan.prompt_lengths, plan.output_lengths, source, plan.shared_prefix)

    def _repeated(self, prompts: tuple[FilePrompt, ...], source: random.Random) -> Iterator[Prompt]:
        for prompt in itertools.cycle(prompts):
            limit = prompt.max_tokens or self._plan.output_lengths.draw(source)
            tokens = len(prompt.content) if not isinstance(prompt.content[0], str | dict) else None
            yield Prompt(prompt.content, tokens, limit)

    def _settings(self, shape: RequestShape) -> dict[str, Any]:
        plan = self._plan
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "url": str(plan.origin),
            "model": shape.model,
            "endpoint": plan.endpoint,
            "stream": plan.stream,
            "temperature": plan.temperature,
            "ignore_eos": plan.ignore_eos,
            "extra": dict(plan.extra),
            "seed": plan.seed,
            "fixed_rate": plan.fixed_rate,
            "prompt_length": str(plan.prompt_lengths),
            "output_length": str(plan.output_lengths),
            "shared_prefix": plan.shared_prefix,
            "objectives": {objective.name: objective.seconds for objective in plan.objectives},
        }
