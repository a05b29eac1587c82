"""Make one quantized tensor `[E, N, K]` of those of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.packing import QuantizedTensor, pack_bits, unpack_bits


def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stack tensors `[N, K]` of one format; scales become float32 if those of any part are."""
    first = parts[0]
    scales = np.stack([part.scales for part in parts])

    def joined(arrays: Sequence[NDArray[Any]], shape: tuple[int, ...]) -> NDArray[Any]:
        if arrays[0].shape == shape:
            return np.stack(arrays)
        unpacked: NDArray[np.uint8] = np.stack([unpack_bits(a, first.bits, shape).view(np.uint8) for a in arrays])
        return pack_bits(unpacked, first.bits)

    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    tensor_scales = {float(part.tensor_scale) for part in parts if part.tensor_scale is not None}
    assert len(tensor_scales) <= 1, "experts of one tensor share its scale"
    return replace(
        first,
        values=joined([part.values for part in parts], first.shape),
        scales=scales,
        zero_points=joined(zero_points, first.scales.shape) if zero_points else None,
        shape=(len(parts), *first.shape),
    )
