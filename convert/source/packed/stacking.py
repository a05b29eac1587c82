"""Experts that the checkpoint stores one by one and the model as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferencex.convert.source.packed.base import PackedHandle
from inferencex.convert.source.packed.joining import concatenate_rows, stack
from inferencex.convert.source.parameter import PackedParameter, ParameterSource
from inferencex.formats.packing import QuantizedTensor


def stacked(plain: ParameterSource, groups: Sequence[Sequence[PackedHandle]]) -> ParameterSource:
    """Return the packed form of `plain`, whose matrix `i` is the `i`-th matrices of all groups, one below the other.

    `packed()` gives None where the matrices were quantized in ways that one tensor cannot hold. Where any has its input
    channels in an order of its own, so has the whole: what comes of it is no longer one matrix product per expert.
    """
    handles = [handle for group in groups for handle in group]
    first = handles[0].storage

    def packed() -> QuantizedTensor | None:
        experts = [concatenate_rows([handle.packed() for handle in matrices]) for matrices in zip(*groups, strict=True)]
        present = [expert for expert in experts if expert is not None]
        return stack(present) if len(present) == len(experts) else None

    def input_order() -> NDArray[np.int64] | None:
        return next((order for order in (handle.input_order() for handle in handles) if order is not None), None)

    return PackedParameter(
        plain.name,
        plain.shape,
        plain.dtype,
        plain.sources,
        plain.load_whole,
        plain.load_rows,
        packed=packed,
        input_order=input_order,
        method=first.method,
        format=f"{first.format}, {len(groups[0])} experts",
        nbytes=sum(handle.nbytes for handle in handles),
    )
