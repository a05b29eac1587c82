"""Refining a block against what its source makes of the source's own inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import one_thread_each
from inferencex.convert.quantize.refine import Rates, Refinable, Schedule, refine_block
from tests.convert.quantize.refine.tiny_model import LENGTH, WIDTH, TinyModel


class _Samples:
    """Inputs with an error, as quantized blocks in front make them, and targets without."""

    def __init__(self, model: TinyModel, count: int) -> None:
        self.count = count
        generator = torch.Generator().manual_seed(5)
        self._clean = torch.randn(count, 1, LENGTH, WIDTH, generator=generator)
        self._inputs = self._clean + 0.005 * torch.randn(self._clean.shape, generator=generator)
        with one_thread_each(), torch.no_grad():
            weights = {**model.sources, **model.plain}
            self._targets = [model.layer(x, "0", weights) for x in self._clean]

    def inputs(self, sample: int) -> Mapping[str, Tensor]:
        return {"x": self._inputs[sample]}

    def targets(self, sample: int) -> Mapping[str, Tensor]:
        return {"y": self._targets[sample], "positions": torch.arange(LENGTH)}


def test_brings_the_outputs_nearer_and_leaves_other_blocks_alone() -> None:
    model = TinyModel()
    everything = model.refinable()
    refinable = Refinable(
        {name: tensor for name, tensor in everything.weights.items() if name.startswith("0.")},
        model.sources,
        {"0.norm": model.plain["0.norm"]},
    )

    def block(values: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"y": model.layer(values["x"], "0", weights), "positions": torch.arange(LENGTH)}

    samples = _Samples(model, 32)
    schedule = Schedule(steps=40, check_every=20, rates=Rates(2e-2, 2e-3, 2e-2, 2e-3))
    refined = refine_block(block, refinable, samples, schedule, threads=2)
    assert refined.after < 0.85 * refined.before
    assert set(refined.result.weights) == {"0.up", "0.down"}
    again = refine_block(block, refinable, samples, schedule, threads=1)
    assert all(
        np.array_equal(tensor.values, again.result.weights[name].values)
        for name, tensor in refined.result.weights.items()
    )
