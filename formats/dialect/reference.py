"""Reference implementations of the operators of domain `inferencex`, for `onnx.reference`.

Literal transcriptions of the schemas' documentation, in numpy, with no thought for speed: the meaning of the dialect in
executable form. Arithmetic is float32, the result has the dtype of the first input.

A whole graph is executed on one whole sequence: `Attention` takes the step's tokens to be the tokens `0 .. T - 1` of a
sequence that has no earlier ones. Nodes that share a layer's state are given the same keys and values, so a node with
`writes = 0` needs no state either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

from inferencex.formats.dialect.schemas import DOMAIN, schemas
from inferencex.formats.dtypes import DataType
from inferencex.formats.packing import unpack_bits

Array = NDArray[Any]
Floats = NDArray[np.floating[Any]]


def _float32(x: Array) -> Floats:
    return x.astype(np.float32)


def _erf(x: Floats) -> Floats:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float32])(x), dtype=np.float32)


def _sigmoid(x: Floats) -> Floats:
    positive = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x >= 0, positive, 1 - positive).astype(np.float32)


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (1 + _erf(x / np.float32(math.sqrt(2)))) / 2,
    "gelu_tanh": lambda x: (
        x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))) / 2
    ),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": _sigmoid,
}


def _gate(x: Floats, activation: str, layout: str, alpha: float, limit: float) -> Floats:
    """Apply `GatedActivation` to `[T, 2F]`."""
    if layout == "concat":
        gate, up = np.split(x, 2, axis=-1)
    elif layout == "interleaved":
        gate, up = x[..., 0::2], x[..., 1::2]
    else:
        raise ValueError(f"layout is {layout!r}; expected 'concat' or 'interleaved'")
    if activation == "swiglu_clamped":
        if limit:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return np.asarray((up + 1) * gate * _sigmoid(alpha * gate), dtype=np.float32)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join([*ACTIVATIONS, 'swiglu_clamped'])}")
    return np.asarray(ACTIVATIONS[activation](gate) * up, dtype=np.float32)


def _expert_linear(x: Floats, expert_ids: Array, weight: Array, bias: Array | None) -> Floats:
    rows = []
    for row, expert in zip(x, expert_ids, strict=True):
        y = _float32(weight[expert]) @ row
        rows.append(y if bias is None else y + _float32(bias[expert]))
    return np.array(rows, dtype=np.float32).reshape(len(x), weight.shape[1])


LARGEST = {DataType.INT8: 127.0, DataType.FLOAT8E4M3FN: 448.0}
"""The magnitude that the largest of a row becomes, by the type its values are quantized to."""

_VANISHING = 2.0**-100


def quantize_rows(x: Array, to: DataType) -> tuple[Array, Array]:
    """Apply `QuantizeRows` to `[T, S]`."""
    rows, largest = _float32(x), np.float32(LARGEST[to])
    magnitudes = np.abs(rows).max(axis=1, initial=0)
    finite, seen = np.isfinite(magnitudes), magnitudes >= _VANISHING
    scales = np.where(finite, np.where(seen, magnitudes / largest, 0), np.nan).astype(np.float32)
    used = (finite & seen)[:, None]
    factors = np.divide(largest, magnitudes[:, None], out=np.zeros_like(rows[:, :1]), where=used)
    scaled = np.where(used, rows, 0) * factors
    values = np.rint(scaled).astype(np.int8) if to is DataType.INT8 else scaled.astype(to.numpy())
    return values, scales


def keep_in_8_bits(x: Array, scales: Sequence[float], to: DataType) -> Floats:
    """Return keys or values `[T, G, D]` as `Attention` reads them with a `kv_type`, float32."""
    largest = np.float32(LARGEST[to])
    by_head = np.asarray(scales, dtype=np.float32)[:, None]
    scaled = np.clip(_float32(x) / by_head, -largest, largest)
    rounded = np.rint(scaled) if to is DataType.INT8 else scaled.astype(to.numpy()).astype(np.float32)
    return np.asarray(rounded * by_head, dtype=np.float32)


class Attention(OpRun):
    """Causal attention within one whole sequence."""

    op_domain = DOMAIN
    op_schema = schemas()["Attention"]

    def _run(
        self,
        q: Array,
        k: Array,
        v: Array,
        sinks: Array | None = None,
        slopes: Array | None = None,
        *,
        layer: int,
        writes: int,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int,
        chunk: int,
        softcap: float,
        kv_type: int = 0,
        key_scales: Sequence[float] | None = None,
        value_scales: Sequence[float] | None = None,
    ) -> tuple[Array]:
        tokens = len(q)
        queries = _float32(q).reshape(tokens, num_heads, -1)
        keys, values = (_float32(x).reshape(tokens, num_kv_heads, -1) for x in (k, v))
        if kv_type and key_scales is not None and value_scales is not None:
            keys = keep_in_8_bits(keys, key_scales, DataType(kv_type))
            values = keep_in_8_bits(values, value_scales, DataType(kv_type))
        y = np.zeros((tokens, num_heads, values.shape[2]), dtype=np.float32)
        for head in range(num_heads):
            shared = head * num_kv_heads // num_heads
            for p in range(tokens):
                seen = [
                    j
                    for j in range(p + 1)
                    if (not window or p - j < window) and (not chunk or j // chunk == p // chunk)
                ]
                scores = np.array([scale * (queries[p, head] @ keys[j, shared]) for j in seen])
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if slopes is not None:
                    scores = scores + float(slopes[head]) * (np.array(seen) - p)
                if sinks is not None:
                    scores = np.append(scores, float(sinks[head]))
                weights = np.exp(scores - scores.max())
                weights = weights / weights.sum()
                y[p, head] = sum(weight * values[j, shared] for weight, j in zip(weights, seen, strict=False))
        return (y.reshape(tokens, -1).astype(q.dtype),)


class ExpertLinear(OpRun):
    """A linear layer with weights chosen per row."""

    op_domain = DOMAIN
    op_schema = schemas()["ExpertLinear"]

    def _run(self, x: Array, expert_ids: Array, weight: Array, bias: Array | None = None) -> tuple[Array]:
        return (_expert_linear(_float32(x), expert_ids, weight, bias).astype(x.dtype),)


class Experts(OpRun):
    """Gated feed-forward experts with given routing."""

    op_domain = DOMAIN
    op_schema = schemas()["Experts"]

    def _run(
        self,
        x: Array,
        top_k_index: Array,
        top_k_weights: Array,
        gate_up: Array,
        down: Array,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        *,
        activation: str,
        layout: str,
        alpha: float,
        limit: float,
    ) -> tuple[Array]:
        y = np.zeros(x.shape, dtype=np.float32)
        for j in range(top_k_index.shape[1]):
            inner = _expert_linear(_float32(x), top_k_index[:, j], gate_up, gate_up_bias)
            gated = _gate(inner, activation, layout, alpha, limit)
            y += _float32(top_k_weights[:, j : j + 1]) * _expert_linear(gated, top_k_index[:, j], down, down_bias)
        return (y.astype(x.dtype),)


class GatedActivation(OpRun):
    """`activation(gate) * up` from one tensor that holds both."""

    op_domain = DOMAIN
    op_schema = schemas()["GatedActivation"]

    def _run(self, x: Array, *, activation: str, layout: str, alpha: float, limit: float) -> tuple[Array]:
        return (_gate(_float32(x), activation, layout, alpha, limit).astype(x.dtype),)


class AddRMSNormalization(OpRun):
    """Residual addition, then RMS normalization."""

    op_domain = DOMAIN
    op_schema = schemas()["AddRMSNormalization"]

    def _run(self, x: Array, residual: Array, scale: Array, *, epsilon: float) -> tuple[Array, Array]:
        total = _float32(x) + _float32(residual)
        y = total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + epsilon) * _float32(scale)
        return y.astype(x.dtype), total.astype(x.dtype)


class AddLayerNormalization(OpRun):
    """Residual addition, then layer normalization."""

    op_domain = DOMAIN
    op_schema = schemas()["AddLayerNormalization"]

    def _run(
        self, x: Array, residual: Array, scale: Array, bias: Array | None = None, *, epsilon: float
    ) -> tuple[Array, Array]:
        total = _float32(x) + _float32(residual)
        mean, var = np.mean(total, axis=-1, keepdims=True), np.var(total, axis=-1, keepdims=True)
        y = (total - mean) / np.sqrt(var + epsilon) * _float32(scale)
        y = y if bias is None else y + _float32(bias)
        return y.astype(x.dtype), total.astype(x.dtype)


class QuantizeRows(OpRun):
    """Dynamic quantization of rows."""

    op_domain = DOMAIN
    op_schema = schemas()["QuantizeRows"]

    def _run(self, x: Array, *, to: int) -> tuple[Array, Array]:
        return quantize_rows(x, DataType(to))


class UnpackBits(OpRun):
    """Integers out of a stream of bits."""

    op_domain = DOMAIN
    op_schema = schemas()["UnpackBits"]

    def _run(self, packed: Array, *, bits: int, shape: list[int], signed: int) -> tuple[Array]:
        return (unpack_bits(packed, bits, tuple(shape), signed=bool(signed)),)


OPERATORS: tuple[type[OpRun], ...] = (
    Attention,
    ExpertLinear,
    Experts,
    GatedActivation,
    AddRMSNormalization,
    AddLayerNormalization,
    QuantizeRows,
    UnpackBits,
)


def new_ops() -> list[type[OpRun]]:
    """Return the operators as `onnx.reference.ReferenceEvaluator(model, new_ops=...)` takes them."""
    return list(OPERATORS)
