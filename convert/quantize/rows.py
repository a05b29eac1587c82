"""Weights and importances in the form that the native quantization reads: rows of K numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from inferencex.convert.native import _quantize
from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, group_count

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0


@dataclass(frozen=True, eq=False)
class Rows:
    """A weight `[..., N, K]` as the native module takes it, without a copy where it lies in order.

    data:       `[rows, K]`, float32, or uint16 with the bits of 16-bit floats, which `element` names
    group_size: channels that share a scale, K for one a row
    """

    name: str
    weight: NDArray[Any]
    data: NDArray[Any]
    element: str
    group_size: int
    threads: int

    @classmethod
    def of(cls, name: str, weight: NDArray[Any], group_size: int, threads: int | None) -> Self:
        """Check the weight; `name` is for messages. Raises QuantizationError."""
        if weight.ndim < 2 or weight.size == 0:
            raise QuantizationError(f"{name}: shape {list(weight.shape)} cannot be quantized, expected [..., N, K]")
        if group_size == PER_CHANNEL and weight.ndim != 2:
            raise QuantizationError(
                f"{name}: shape {list(weight.shape)} cannot be quantized per channel, only matrices can"
            )
        channels = weight.shape[-1]
        element, data = _elements(name, weight)
        workers = threads if threads is not None else len(os.sched_getaffinity(0))
        group = channels if group_size == PER_CHANNEL else group_size
        return cls(name, weight, data.reshape(-1, channels), element, group, workers)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and groups in each of them."""
        return self.data.shape[0], group_count(self.data.shape[1], self.group_size)

    def scan(self, bits: int, symmetric: bool) -> _quantize.Scan:
        """Find the smallest and the largest scale that full ranges need. Raises QuantizationError for NaN, infinity."""
        scan = _quantize.scan(self.data, self.element, self.group_size, bits, symmetric, self.threads)
        if scan.first_bad >= 0:
            index = tuple(int(i) for i in np.unravel_index(scan.first_bad, self.weight.shape))
            raise QuantizationError(
                f"{self.name}: the weight at {list(index)} is {self.weight[index]}; the checkpoint is damaged"
            )
        return scan


def _elements(name: str, weight: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Return the element type's name, and the weight in a form the native module can read without copying."""
    contiguous = np.require(weight, requirements=["C", "A"])
    if weight.dtype == np.float32:
        return "float32", contiguous
    if weight.dtype == np.float16:
        return "float16", contiguous.view(np.uint16)
    if weight.dtype == ml_dtypes.bfloat16:
        return "bfloat16", contiguous.view(np.uint16)
    raise QuantizationError(f"{name}: weights of type {weight.dtype}, expected float32, float16 or bfloat16")


def importance_rows(name: str, importance: NDArray[np.float32] | None, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the importance as `[matrices, K]`, with no rows when there is none."""
    channels = shape[-1]
    if importance is None:
        return np.empty((0, channels), dtype=np.float32)
    if importance.shape not in ((channels,), (*shape[:-2], channels)):
        raise QuantizationError(
            f"{name}: importance of shape {list(importance.shape)} does not fit the weight {list(shape)}, "
            f"expected {[channels]} or {[*shape[:-2], channels]}"
        )
    if not np.isfinite(importance).all() or (importance < 0).any():
        raise QuantizationError(f"{name}: importances must be finite and not negative")
    return np.ascontiguousarray(importance.reshape(-1, channels), dtype=np.float32)
