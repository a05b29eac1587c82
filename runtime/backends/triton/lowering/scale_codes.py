"""The scales of 4-bit floats as the 8-bit codes that bundles store, which are fewer bytes than what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inferencex.formats.dtypes import DataType
from inferencex.formats.graph import Value
from inferencex.runtime.backends.graph.static_values import StaticValues

_CODES = {DataType.FLOAT8E4M3FN: torch.float8_e4m3fn, DataType.FLOAT8E8M0: torch.float8_e8m0fnu}


@dataclass(frozen=True)
class ScaleCodes:
    """Scales `[..., N, groups]`, float8_e4m3fn (NVFP4) or float8_e8m0fnu (MXFP4) on the host, and a factor of all."""

    codes: Tensor
    tensor_scale: float


def scale_codes(static: StaticValues, value: Value) -> ScaleCodes | None:
    """Return the stored scales of a weight that `DequantizeLinear` gives; None where they are no codes of 8 bits."""
    node = value.producer()
    scales = None if node is None else node.inputs[1]
    if scales is None:
        return None
    tensor_scale = 1.0
    inner = scales.producer()
    if inner is not None:
        factor = inner.inputs[1] if (inner.domain, inner.op_type) == ("", "DequantizeLinear") else None
        zero_point = inner.inputs[2] if len(inner.inputs) > 2 else None
        scales = inner.inputs[0]
        if factor is None or zero_point is not None or scales is None or scales.producer() is not None:
            return None
        factors = np.asarray(static.array(factor), dtype=np.float32)
        if factors.size != 1:
            return None
        tensor_scale = float(factors.reshape(-1)[0])
    kind = None if scales.dtype is None else _CODES.get(scales.dtype)
    if kind is None:
        return None
    bits = np.ascontiguousarray(static.array(scales)).view(np.uint8)
    return ScaleCodes(torch.from_numpy(bits.copy()).view(kind), tensor_scale)
