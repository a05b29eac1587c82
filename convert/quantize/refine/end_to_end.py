"""Refine a whole quantized model against the predictions of its source: distillation with the format held fixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import product_dtype
from inferencex.convert.quantize.refine.descent import Progress, Refined, Schedule, Slope, descend
from inferencex.convert.quantize.refine.distillation import divergence
from inferencex.convert.quantize.refine.parameters import Refinable
from inferencex.convert.quantize.refine.rounding import Rates
from inferencex.formats.errors import QuantizationError

MODEL_SCHEDULE = Schedule(
    steps=128,
    samples_per_step=2,
    rates=Rates(rounding=5e-4, scales=4e-4, zeros=5e-4, plain=5e-4),
    check_every=16,
    patience=6,
)
"""For windows of about 512 tokens. Gradients of the whole model are noisy: at ten times these rates they turn over
random integers faster than they improve any. It is mostly scales that are learned here, integers block by block
before. Improvements come late, as the rates fall."""


class Model(Protocol):
    """A whole model as functions of tensors. Called from several threads at once."""

    def hidden(self, weights: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """Return what the head multiplies, `[S * L, hidden]`, for int64 `[S, L]`; differentiable in `weights`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[rows, vocab]` for `[rows, hidden]`, each row by itself; differentiable in `hidden`."""
        ...


@dataclass(frozen=True)
class Windows:
    """Text, and what the source makes of it.

    token_ids:  int64 [windows, length]
    targets:    [windows, length, hidden], what the head multiplies in the source, floating point
    """

    token_ids: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        """Raises QuantizationError when the two do not belong together."""
        if self.token_ids.dim() != 2 or self.targets.dim() != 3 or self.targets.shape[:2] != self.token_ids.shape:
            raise QuantizationError(
                f"windows of token ids {list(self.token_ids.shape)} do not go with targets {list(self.targets.shape)}, "
                "expected [windows, length] and [windows, length, hidden]"
            )


class Distillation:
    """The loss of a model: mean KL(source || model) in nats per token, over the full vocabulary."""

    def __init__(self, model: Model, calibration: Windows, held_out: Windows) -> None:
        self._model, self._calibration, self._held_out = model, calibration, held_out

    @property
    def samples(self) -> int:
        """Windows to learn from."""
        return len(self._calibration.token_ids)

    @property
    def held_out(self) -> int:
        """Windows to judge by."""
        return len(self._held_out.token_ids)

    def slope(self, weights: Mapping[str, Tensor], sample: int) -> Slope:
        """Return the loss of a window; the gradient of the head is computed a few rows at a time."""
        hidden = self._model.hidden(weights, self._calibration.token_ids[sample : sample + 1])
        found = divergence(self._model.logits, hidden.detach(), self._calibration.targets[sample], gradient=True)
        assert found.gradient is not None
        return Slope(found.total / len(hidden), [hidden], [found.gradient])

    def loss(self, weights: Mapping[str, Tensor], sample: int) -> float:
        """Return the loss of a window held out."""
        hidden = self._model.hidden(weights, self._held_out.token_ids[sample : sample + 1])
        return divergence(self._model.logits, hidden, self._held_out.targets[sample], gradient=False).total / len(
            hidden
        )


def refine_end_to_end(
    model: Model,
    refinable: Refinable,
    calibration: Windows,
    held_out: Windows,
    schedule: Schedule = MODEL_SCHEDULE,
    *,
    threads: int | None = None,
    observe: Callable[[Progress], None] | None = None,
    state_file: Path | None = None,
) -> Refined:
    """Learn integers, scales, zero points and plain tensors of a whole model together; see `descend`.

    Needs all weights in memory at once (see `end_to_end_bytes`). The weights are learned as if rounding were the
    identity (quantization-aware training with the format held fixed), from a start that is good already.
    """
    return descend(
        Distillation(model, calibration, held_out),
        refinable,
        schedule,
        threads=threads,
        observe=observe,
        state_file=state_file,
    )


def end_to_end_bytes(refinable: Refinable, samples_per_step: int) -> int:
    """Return how much memory `refine_end_to_end` takes beside the activations of a step's samples and the targets."""
    weights = sum(torch.Size(tensor.shape).numel() for tensor in refinable.weights.values())
    stored = sum(tensor.nbytes for tensor in refinable.weights.values())
    # Positions and two moments in float32; the weights as they are multiplied, and a gradient like it for each sample.
    return weights * (12 + product_dtype().itemsize * (1 + samples_per_step)) + 2 * stored
