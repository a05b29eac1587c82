"""The loop that all refinements share: small steps against gradients, judged on samples held out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import one_thread_each, product_dtype
from inferencex.convert.quantize.refine.parameters import Parameters, Refinable, Snapshot
from inferencex.convert.quantize.refine.rounding import Rates
from inferencex.convert.quantize.refine.saved_state import SavedState
from inferencex.formats.errors import QuantizationError

Weights = Mapping[str, Tensor]

# A state is as large as several copies of the weights: it is written a few times, not at every look.
_SAVES = 4


@dataclass(frozen=True)
class Schedule:
    """How a refinement proceeds. The rates rise over `warmup`, then fall linearly to nothing.

    steps:             at most so many
    samples_per_step:  samples whose gradients are added up for a step; also how many threads can be of use
    rates:             how far a step moves things at most
    warmup:            share of the steps, 0 to 1
    check_every:       steps between two looks at the samples held out
    patience:          looks without an improvement after which to stop
    seed:              of the order of samples
    """

    steps: int
    samples_per_step: int = 2
    rates: Rates = field(default_factory=Rates)
    warmup: float = 0.05
    check_every: int = 20
    patience: int = 5
    seed: int = 0

    def fraction(self, step: int) -> float:
        """Return the share of the rates that `step`, from 0, uses."""
        rising = (step + 1) / max(1.0, self.warmup * self.steps)
        return min(1.0, rising) * (1.0 - step / self.steps)

    def samples(self, step: int, available: int) -> list[int]:
        """Return the samples of a step: all are used once, in a random order, before one is used again."""
        first = step * self.samples_per_step
        return [self._sample(index, available) for index in range(first, first + self.samples_per_step)]

    def _sample(self, index: int, available: int) -> int:
        around, place = divmod(index, available)
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + around) % (1 << 63))
        return int(torch.randperm(available, generator=generator)[place])


@dataclass(frozen=True)
class Progress:
    """Where a refinement is.

    training:  loss over the samples of the steps since the last report; nan before the first
    held_out:  loss over the samples held out, as the weights are now
    best:      the lowest of those so far
    """

    step: int
    steps: int
    training: float
    held_out: float
    best: float


@dataclass(frozen=True)
class Refined:
    """What came of a refinement; never worse on the samples held out than what it began with.

    before, after:  loss over the samples held out
    steps:          steps taken
    best_step:      the step whose result this is; 0 when none improved on the beginning
    history:        what was observed
    """

    result: Snapshot
    before: float
    after: float
    steps: int
    best_step: int
    history: tuple[Progress, ...]


@dataclass(frozen=True)
class Slope:
    """Outputs that depend on the weights, and the gradient of the loss, itself a plain number, by each of them."""

    loss: float
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]


class Objective(Protocol):
    """What a refinement makes small: the mean over samples of a loss. Called from several threads at once."""

    @property
    def samples(self) -> int:
        """Samples to learn from."""
        ...

    @property
    def held_out(self) -> int:
        """Samples to judge by; at least one."""
        ...

    def slope(self, weights: Weights, sample: int) -> Slope:
        """Return the loss of a sample to learn from, differentiable in `weights`."""
        ...

    def loss(self, weights: Weights, sample: int) -> float:
        """Return the loss of a sample held out; called without gradients."""
        ...


def descend(
    objective: Objective,
    refinable: Refinable,
    schedule: Schedule,
    *,
    threads: int | None = None,
    observe: Callable[[Progress], None] | None = None,
    state_file: Path | None = None,
) -> Refined:
    """Learn `refinable`, and return the best of it that was seen.

    A thread computes one sample at a time with operators that do not divide their work, and gradients are added in
    the order of samples: the result is the same with any number of threads (default: the processors this process may
    use). Memory holds 14 bytes a weight (where bfloat16 is multiplied, else 16) and the best result; in a step,
    besides, a gradient of 2 (else 4) bytes a weight for each sample of the step, and the activations of as many
    samples as there are threads.

    `state_file` is written now and then, and a call with the same arguments goes on from it; remove it in the end.
    Raises OptionError when it was written by a call with others, QuantizationError
    without samples, and when the loss is not finite to begin with.
    """
    if objective.samples < 1 or objective.held_out < 1:
        raise QuantizationError(
            f"refinement was given {objective.samples} samples to learn from and {objective.held_out} to judge by, and "
            "needs at least one of each; calibrate on more samples"
        )
    saved = SavedState(state_file, refinable, schedule) if state_file is not None else None
    workers = threads if threads is not None else len(os.sched_getaffinity(0))
    with one_thread_each(), ThreadPoolExecutor(max(1, workers)) as pool:
        parameters = Parameters(refinable, product_dtype(), pool)
        return _Descent(objective, refinable, schedule, parameters, pool, observe, saved).run()


class _Descent:
    def __init__(
        self,
        objective: Objective,
        refinable: Refinable,
        schedule: Schedule,
        parameters: Parameters,
        pool: Executor,
        observe: Callable[[Progress], None] | None,
        saved: SavedState | None,
    ) -> None:
        self._objective, self._schedule = objective, schedule
        self._parameters, self._pool = parameters, pool
        self._observe, self._saved = observe, saved
        self._best = Snapshot(dict(refinable.weights), dict(refinable.plain))
        self._step = self._best_step = self._saved_step = 0
        self._history: list[Progress] = []
        self._losses: list[float] = []

    def run(self) -> Refined:
        schedule = self._schedule
        if not self._resume():
            self._check()
        while self._step < schedule.steps and not self._is_stuck():
            self._advance()
            if self._step % schedule.check_every == 0 or self._step == schedule.steps:
                self._check()
        return Refined(
            self._best,
            self._history[0].held_out,
            self._history[-1].best,
            self._step,
            self._best_step,
            tuple(self._history),
        )

    def _advance(self) -> None:
        chosen = self._schedule.samples(self._step, self._objective.samples)
        results = list(self._pool.map(self._gradient, chosen))
        self._losses += [loss for loss, _ in results]
        self._parameters.step(
            [gradient for _, gradient in results], self._schedule.rates, self._schedule.fraction(self._step)
        )
        self._step += 1

    def _gradient(self, sample: int) -> tuple[float, dict[str, Tensor]]:
        leaves = self._parameters.leaves()
        with torch.enable_grad():
            slope = self._objective.slope(leaves, sample)
            gradients = torch.autograd.grad(
                list(slope.outputs),
                list(leaves.values()),
                list(slope.gradients),
                allow_unused=True,
                materialize_grads=True,
            )
        return slope.loss, dict(zip(leaves, gradients, strict=True))

    def _check(self) -> None:
        """Judge the weights as they are, and keep them if they are the best so far."""
        values = self._parameters.values()

        def judge(sample: int) -> float:
            with torch.no_grad():
                return self._objective.loss(values, sample)

        losses = list(self._pool.map(judge, range(self._objective.held_out)))
        held_out = math.fsum(losses) / len(losses)
        if not self._history and not math.isfinite(held_out):
            raise QuantizationError(
                f"the loss over the {len(losses)} samples held out is {held_out} before anything is refined; "
                "the model overflows on them"
            )
        best = self._history[-1].best if self._history else held_out
        if held_out < best:
            best, self._best_step = held_out, self._step
            self._best = self._parameters.snapshot()
        training = math.fsum(self._losses) / len(self._losses) if self._losses else math.nan
        self._losses = []
        self._history.append(Progress(self._step, self._schedule.steps, training, held_out, best))
        if self._observe is not None:
            self._observe(self._history[-1])
        self._save()

    def _save(self) -> None:
        every = max(1, self._schedule.steps // _SAVES)
        if self._saved is None or (self._step and self._step < self._saved_step + every):
            return
        self._saved_step = self._step
        self._saved.write(
            {
                "step": self._step,
                "best_step": self._best_step,
                "history": [list(vars(progress).values()) for progress in self._history],
                "parameters": self._parameters.state(),
            },
            self._best,
        )

    def _resume(self) -> bool:
        """Go on where a saved state ends, if there is one."""
        found = self._saved.read() if self._saved is not None else None
        if found is None:
            return False
        facts, self._best = found
        self._step = self._saved_step = facts["step"]
        self._best_step = facts["best_step"]
        self._history = [Progress(*values) for values in facts["history"]]
        self._parameters.load_state(facts["parameters"])
        return True

    def _is_stuck(self) -> bool:
        looks = [progress for progress in self._history if progress.step > self._best_step]
        return len(looks) >= self._schedule.patience
