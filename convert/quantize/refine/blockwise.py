"""Refine one block against what its source computes: learned rounding and ranges (AutoRound, arXiv 2309.05516)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inferencex.convert.quantize.refine.descent import Progress, Refined, Schedule, Slope, descend
from inferencex.convert.quantize.refine.parameters import Refinable
from inferencex.convert.quantize.refine.rounding import Rates

Values = Mapping[str, Tensor]
Block = Callable[[Values, Mapping[str, Tensor]], Values]
"""From the values a block reads and its weights to the values it makes, by name; differentiable in the weights, and
called from several threads at once."""

BLOCK_SCHEDULE = Schedule(
    steps=48, samples_per_step=2, rates=Rates(rounding=1e-2, scales=1e-3, zeros=1e-2, plain=1e-3), check_every=16
)
"""For windows of about 512 tokens. The squared error is a dense signal: integers can be learned from few of them. At
twice these rates blocks in the middle of a model gain a little more, and the first ones nothing."""

_SMALLEST = 1e-20


class BlockSamples(Protocol):
    """What a block reads and should make, sample by sample. Called from several threads at once."""

    @property
    def count(self) -> int:
        """Samples there are."""
        ...

    def inputs(self, sample: int) -> Values:
        """Return the values that the quantized blocks before this one make."""
        ...

    def targets(self, sample: int) -> Values:
        """Return the values that the source makes: all that the block makes, or those that matter."""
        ...


class Reconstruction:
    """The loss of a block: squared error of each row of its outputs by the row's square, mean over the rows.

    Each row counts the same: what reads it next normalizes it, and the first token of a sequence, whose values are
    often hundreds of times the others', would otherwise be all that is learned. Outputs are added up.

    The last `held_out` samples are those to judge by.
    """

    def __init__(self, block: Block, samples: BlockSamples, held_out: int) -> None:
        self._block, self._samples, self._held_out = block, samples, held_out

    @property
    def samples(self) -> int:
        """Samples to learn from."""
        return self._samples.count - self._held_out

    @property
    def held_out(self) -> int:
        """Samples to judge by."""
        return self._held_out

    def slope(self, weights: Mapping[str, Tensor], sample: int) -> Slope:
        """Return the loss of a sample."""
        loss = self._error(weights, sample)
        return Slope(float(loss.detach()), [loss], [torch.ones_like(loss)])

    def loss(self, weights: Mapping[str, Tensor], sample: int) -> float:
        """Return the loss of a sample held out."""
        return float(self._error(weights, self.samples + sample))

    def _error(self, weights: Mapping[str, Tensor], sample: int) -> Tensor:
        made = self._block(self._samples.inputs(sample), weights)
        total = torch.zeros(())
        for name, target in self._samples.targets(sample).items():
            if target.is_floating_point():
                wanted = target.to(torch.float32)
                size = wanted.square().sum(-1).clamp_min(_SMALLEST)
                total = total + ((made[name] - wanted).square().sum(-1) / size).mean()
        return total


def refine_block(
    block: Block,
    refinable: Refinable,
    samples: BlockSamples,
    schedule: Schedule = BLOCK_SCHEDULE,
    *,
    held_out: int | None = None,
    threads: int | None = None,
    observe: Callable[[Progress], None] | None = None,
    state_file: Path | None = None,
) -> Refined:
    """Learn integers, scales, zero points and plain tensors of one block together; see `descend`.

    Judged by the last `held_out` samples (default: one in eight), which are not learned from. Needs the block's
    weights in memory, and of the samples those of one step.
    """
    judged = held_out if held_out is not None else max(1, samples.count // 8)
    return descend(
        Reconstruction(block, samples, judged),
        refinable,
        schedule,
        threads=threads,
        observe=observe,
        state_file=state_file,
    )
