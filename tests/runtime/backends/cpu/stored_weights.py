"""Random weights in every stored format, as operands of linears and as what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from inferencex.formats.packing import group_count, pack_bits, pack_int4
from tests.runtime.backends.cpu.operations import Argument, Typed

Array = NDArray[Any]
FORMATS = ("f32", "bf16", "f16", "f8e4m3", "int8", "int4", "int3", "int5", "int6", "f4e2m1")
EPSILON = 2.0**-23


@dataclass(frozen=True)
class Spec:
    """How a weight is stored; `group` -1: one scale a channel."""

    format: str
    group: int = -1
    zero_points: bool = False
    signed: bool = True
    scales: str = "float16"  # "": none

    def __str__(self) -> str:
        """Return a name for a test's parameter."""
        parts = [self.format, f"g{self.group}" if self.group > 0 else "", "zero" if self.zero_points else ""]
        return "-".join([*filter(None, parts), "" if self.signed else "unsigned", self.scales]).strip("-")


SPECS = (
    Spec("f32"),
    Spec("bf16"),
    Spec("f16"),
    Spec("f8e4m3"),
    Spec("f8e4m3", scales=""),
    Spec("f8e4m3", group=96, scales="float32"),
    Spec("int8"),
    Spec("int8", group=32, zero_points=True),
    Spec("int8", group=5, scales="float32"),
    Spec("int4", signed=False, zero_points=True),
    Spec("int4", group=32),
    Spec("int4", group=32, signed=False, zero_points=True),
    Spec("int4", group=7, zero_points=True, scales="float32"),
    Spec("int4", group=300, signed=False),
    Spec("int3", group=64, signed=False, zero_points=True),
    Spec("int3", group=5, scales="float32"),
    Spec("int5", group=64, signed=False, zero_points=True),
    Spec("int5", group=7, scales="float32"),
    Spec("int6", group=32, signed=False, zero_points=True),
    Spec("int6", zero_points=True),
    Spec("f4e2m1", group=16),
    Spec("f4e2m1", group=32, scales="float32"),
)


@dataclass(frozen=True)
class StoredWeight:
    """A weight `[..., N, K]`: values, scales and zero points as operands, attributes, and its numbers in float64."""

    operands: list[Argument]
    attributes: dict[str, Any]
    exact: NDArray[np.float64]

    def for_integers(self) -> StoredWeight:
        """Return what integer kernels take the operands for: twice the values of 4-bit floats."""
        factor = 2 if self.attributes["format"] == "f4e2m1" else 1
        return StoredWeight(self.operands, self.attributes, self.exact * factor)


def stored_weight(rng: np.random.Generator, shape: tuple[int, ...], spec: Spec) -> StoredWeight:
    """Return random weights of about unit size in all groups."""
    features = shape[-1]
    attributes: dict[str, Any] = {"format": spec.format}
    if spec.group != -1:
        attributes["group"] = spec.group
    if spec.format in ("f32", "bf16", "f16"):
        return _plain(rng.standard_normal(shape, dtype=np.float32), spec.format, attributes)
    scale_shape = (*shape[:-1], group_count(features, spec.group))
    spread = np.arange(features) // (spec.group if spec.group != -1 else features)
    scales = (rng.uniform(0.5, 1.5, scale_shape) / 8).astype(spec.scales or "float32")
    if not spec.scales:
        scales[...] = 1
    stored_scales = scales if spec.scales else None
    factors = scales.astype(np.float64)[..., spread]
    if spec.format == "f8e4m3":
        codes = (rng.standard_normal(shape) * 4).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * factors
        return StoredWeight([Typed(codes, "f8e4m3"), stored_scales, None], attributes, exact)
    if spec.format == "f4e2m1":
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        exact = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * factors
        return StoredWeight([pack_int4(codes), stored_scales, None], attributes, exact)
    bits = int(spec.format.removeprefix("int"))
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if spec.signed else (0, 1 << bits)
    dtype = np.int8 if spec.signed else np.uint8
    values = rng.integers(low, high, shape).astype(dtype)
    zeros = rng.integers(low, high, scale_shape).astype(dtype) if spec.zero_points else None
    exact = values.astype(np.float64)
    if zeros is not None:
        exact -= zeros.astype(np.float64)[..., spread]
    if bits < 8:
        attributes["signed"] = int(spec.signed)
        packed_zeros = None if zeros is None else pack_bits(zeros, bits)
        return StoredWeight([pack_bits(values, bits), stored_scales, packed_zeros], attributes, exact * factors)
    return StoredWeight([values, stored_scales, zeros], attributes, exact * factors)


def _plain(values: NDArray[np.float32], name: str, attributes: dict[str, Any]) -> StoredWeight:
    if name == "bf16":
        narrow = values.astype(ml_dtypes.bfloat16)
        return StoredWeight([narrow.view(np.uint16), None, None], attributes, narrow.astype(np.float64))
    cast = values.astype({"f32": np.float32, "f16": np.float16}[name])
    return StoredWeight([cast, None, None], attributes, cast.astype(np.float64))
