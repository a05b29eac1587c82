"""What a step's kernels read besides activations, as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inferencex.runtime.backends.triton.kernels.attention import AttentionStep


@dataclass(frozen=True)
class StepInputs:
    """The arrays of a `StepBatch` on the device.

    token_ids, positions, prompt_lengths: int64 [T]
    token_rows:                           int64 [T], the row of an earlier step that a token is taken from, if it is
    logit_rows:                           int64 [R]
    temperature, top_p, min_p, uniform:   float64 [R]
    top_k:                                int32 [R]
    attention:                            what the attention of every layer reads
    """

    token_ids: Tensor
    positions: Tensor
    prompt_lengths: Tensor
    token_rows: Tensor
    logit_rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    attention: AttentionStep
