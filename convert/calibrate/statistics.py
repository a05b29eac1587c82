"""What the inputs of a linear look like over all calibration samples."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from inferencex.convert.calibrate.gram import gram_matrix
from inferencex.convert.calibrate.streams import Rows
from inferencex.convert.quantize.base import Calibration
from inferencex.formats.errors import QuantizationError


def input_statistics(
    name: str, batches: Sequence[Rows], channels: int, pool: Executor, threads: int, *, with_gram: bool
) -> Calibration:
    """Gather the statistics of `batches` of rows `[rows, channels]` of the value called `name`.

    Sums are float32 over a batch and float64 over batches. Raises QuantizationError when a row is not finite.
    """

    def moments(batch: Rows) -> tuple[int, Tensor, Tensor]:
        x = batch().to(torch.float32)
        return len(x), x.square().sum(0).double(), x.abs().amax(0) if len(x) else torch.zeros(channels)

    tokens, squares, largest = 0, torch.zeros(channels, dtype=torch.float64), torch.zeros(channels)
    for count, square, peak in pool.map(moments, batches):
        tokens, squares, largest = tokens + count, squares + square, torch.maximum(largest, peak)
    if not bool(torch.isfinite(largest).all()):
        channel = int((~torch.isfinite(largest)).nonzero()[0])
        raise QuantizationError(
            f"the activations {name} are not finite (NaN or infinity) in channel {channel} during calibration: "
            "the checkpoint is damaged, or the model does not work on this text"
        )
    mean = (squares / max(tokens, 1)).to(torch.float32).numpy()
    gram = gram_matrix(batches, channels, pool, threads).numpy() if with_gram else None
    return Calibration(mean_square=mean, gram=gram, absolute_max=largest.numpy(), tokens=tokens)
