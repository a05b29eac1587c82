"""ONNX operators that compute every element of their output alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inferencex.runtime.backends.reference.registry import Operator, Registry

OPERATORS = Registry()

# ONNX TensorProto.DataType -> torch, for Cast
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip


def _div(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _pow(a: Tensor, b: Tensor) -> Tensor:
    return torch.pow(a, b.to(a.dtype))


def _prelu(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < 0, a * b, a)


_PLAIN: dict[str, Operator] = {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "Identity": lambda x: x, "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Softplus": F.softplus, "Sqrt": torch.sqrt, "Tanh": torch.tanh,
    "HardSwish": F.hardswish,
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _div, "Pow": _pow, "PRelu": _prelu,
    "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
}  # fmt: skip
OPERATORS.update({("", name): function for name, function in _PLAIN.items()})


@OPERATORS.operator("Max")
def _max(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = torch.maximum(first, other)
    return first


@OPERATORS.operator("Min")
def _min(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = torch.minimum(first, other)
    return first


@OPERATORS.operator("Sum")
def _sum(first: Tensor, *rest: Tensor) -> Tensor:
    for other in rest:
        first = first + other
    return first


@OPERATORS.operator("Mod")
def _mod(a: Tensor, b: Tensor, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@OPERATORS.operator("Clip")
def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


@OPERATORS.operator("Where")
def _where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@OPERATORS.operator("Cast")
def _cast(x: Tensor, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(DTYPES[to])


@OPERATORS.operator("CastLike")
def _cast_like(x: Tensor, target: Tensor, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(target.dtype)


@OPERATORS.operator("Gelu")
def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


@OPERATORS.operator("LeakyRelu")
def _leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@OPERATORS.operator("Elu")
def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)
