"""What the engines of a model have done and are doing, as numbers that can be added up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from inferencex.runtime.engine.stats import EngineStats


@dataclass(frozen=True)
class EngineTotals:
    """Sums over engines; those in the first group only grow, the others say how things are now.

    prompt_tokens:  of requests that have ended; `cached_tokens` of them came from the prefix cache
    running, waiting: sequences, of which a request with n > 1 has several
    """

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0

    @classmethod
    def of(cls, stats: EngineStats) -> Self:
        """Return the numbers of one engine."""
        return cls(
            steps=stats.num_steps,
            prompt_tokens=stats.num_prompt_tokens,
            cached_tokens=stats.num_cached_tokens,
            generated_tokens=stats.num_generated_tokens,
            preemptions=stats.num_preemptions,
            running=stats.num_running,
            waiting=stats.num_waiting,
            kv_blocks=stats.num_kv_blocks,
            kv_blocks_used=stats.kv_blocks_used,
        )

    @classmethod
    def sum(cls, totals: Iterable[EngineTotals]) -> Self:
        """Return the sum of all of them."""
        listed = list(totals)
        return cls(**{field.name: sum(getattr(each, field.name) for each in listed) for field in fields(cls)})

    def since(self, start: EngineTotals) -> EngineTotals:
        """Return the counts without those of `start`; how things are now stays as it is."""
        return EngineTotals(
            steps=self.steps - start.steps,
            prompt_tokens=self.prompt_tokens - start.prompt_tokens,
            cached_tokens=self.cached_tokens - start.cached_tokens,
            generated_tokens=self.generated_tokens - start.generated_tokens,
            preemptions=self.preemptions - start.preemptions,
            running=self.running,
            waiting=self.waiting,
            kv_blocks=self.kv_blocks,
            kv_blocks_used=self.kv_blocks_used,
        )

    def counts(self) -> EngineTotals:
        """Return only what grows: what remains to be told of engines that are gone."""
        return EngineTotals(
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
        )
