"""Type and shape inference of the operators of domain `inferencex`, for `onnx.checker` and `onnx.shape_inference`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx.shape_inference import InferenceContext, InferenceError

Infer = Callable[[InferenceContext], None]
_Dim = int | str | None  # a size, the name of a symbolic size, or unknown


def _dims(context: InferenceContext, index: int, rank: int) -> list[_Dim]:
    """Return an input's sizes, all unknown where its shape is. Raises InferenceError when its rank is another."""
    given: Any = context.get_input_type(index) if context.has_input(index) else None
    if given is None or not given.tensor_type.HasField("shape"):
        return [None] * rank
    dims = given.tensor_type.shape.dim
    if len(dims) != rank:
        raise InferenceError(f"{context.get_display_name()}: input {index} has {len(dims)} dimensions, expected {rank}")
    return [d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in dims]


def _agree(context: InferenceContext, what: str, *sizes: _Dim) -> _Dim:
    """Return the size that all `sizes` are, unknown ones aside. Raises InferenceError when they differ."""
    known = {size for size in sizes if isinstance(size, int)}
    if len(known) > 1:
        raise InferenceError(f"{context.get_display_name()}: {what} is both {' and '.join(map(str, sorted(known)))}")
    return next(iter(known), next((size for size in sizes if size is not None), None))


def _divide(context: InferenceContext, what: str, size: _Dim, by: int) -> int | None:
    if not isinstance(size, int):
        return None
    if by < 1 or size % by:
        raise InferenceError(f"{context.get_display_name()}: {what} is {size}, not a multiple of {by}")
    return size // by


def _attribute(context: InferenceContext, name: str) -> int:
    attribute: Any = context.get_attribute(name)
    if attribute is None:
        raise InferenceError(f"{context.get_display_name()}: attribute {name} is missing")
    return int(attribute.i)


def _output(context: InferenceContext, index: int, dims: Sequence[_Dim], elements: int | None = None) -> None:
    """Give an output these sizes, and the element type `elements` or that of the first input."""
    if index >= context.get_num_outputs():
        return
    source: Any = context.get_input_type(0)
    result = onnx.TypeProto()
    result.tensor_type.elem_type = source.tensor_type.elem_type if elements is None else elements
    result.tensor_type.shape.SetInParent()
    for dim in dims:
        added = result.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            added.dim_value = dim
        elif dim is not None:
            added.dim_param = dim
    context.set_output_type(index, result)


def _attention(context: InferenceContext) -> None:
    (tokens, q), (k_tokens, k), (v_tokens, v) = (_dims(context, i, 2) for i in range(3))
    heads, kv_heads = _attribute(context, "num_heads"), _attribute(context, "num_kv_heads")
    _divide(context, "num_heads", heads, kv_heads)
    widths = _divide(context, "width of q", q, heads), _divide(context, "width of k", k, kv_heads)
    _agree(context, "width of a head of q and k", *widths)
    for index in (3, 4):
        _agree(context, "number of query heads", heads, *_dims(context, index, 1))
    value_width = _divide(context, "width of v", v, kv_heads)
    _check_scales(context, kv_heads)
    tokens = _agree(context, "number of tokens", tokens, k_tokens, v_tokens)
    _output(context, 0, [tokens, None if value_width is None else heads * value_width])


def _check_scales(context: InferenceContext, kv_heads: int) -> None:
    kind: Any = context.get_attribute("kv_type")
    number = 0 if kind is None else int(kind.i)
    if number not in (0, onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN):
        raise InferenceError(f"{context.get_display_name()}: kv_type is {number}, neither INT8 nor FLOAT8E4M3FN, nor 0")
    for name in ("key_scales", "value_scales"):
        given: Any = context.get_attribute(name)
        count = 0 if given is None else len(given.floats)
        if count != (kv_heads if number else 0):
            raise InferenceError(f"{context.get_display_name()}: {count} {name} for kv_type {number}, {kv_heads} heads")


def _expert_linear(context: InferenceContext) -> None:
    (rows, width), (ids,) = _dims(context, 0, 2), _dims(context, 1, 1)
    experts, features, inner = _dims(context, 2, 3)
    bias_experts, bias_features = _dims(context, 3, 2)
    _agree(context, "number of experts", experts, bias_experts)
    _agree(context, "width of x and weight", width, inner)
    _output(context, 0, [_agree(context, "number of rows", rows, ids), _agree(context, "N", features, bias_features)])


def _experts(context: InferenceContext) -> None:
    tokens, features = _dims(context, 0, 2)
    (index_tokens, index_k), (weight_tokens, weight_k) = _dims(context, 1, 2), _dims(context, 2, 2)
    experts, doubled, width = _dims(context, 3, 3)
    down_experts, down_out, inner = _dims(context, 4, 3)
    up_bias, down_bias = _dims(context, 5, 2), _dims(context, 6, 2)
    _agree(context, "experts per token", index_k, weight_k)
    _agree(context, "number of experts", experts, down_experts, up_bias[0], down_bias[0])
    halved = _divide(context, "width of gate_up", _agree(context, "2F", doubled, up_bias[1]), 2)
    _agree(context, "F", halved, inner)
    features = _agree(context, "S", features, width, down_out, down_bias[1])
    _output(context, 0, [_agree(context, "number of tokens", tokens, index_tokens, weight_tokens), features])


def _gated_activation(context: InferenceContext) -> None:
    tokens, doubled = _dims(context, 0, 2)
    _output(context, 0, [tokens, _divide(context, "width of x", doubled, 2)])


def _add_norm(context: InferenceContext) -> None:
    (tokens, width), (other_tokens, other_width) = _dims(context, 0, 2), _dims(context, 1, 2)
    (scale,) = _dims(context, 2, 1)
    (bias,) = _dims(context, 3, 1) if context.get_num_inputs() > 3 else [None]
    dims = [
        _agree(context, "number of tokens", tokens, other_tokens),
        _agree(context, "S", width, other_width, scale, bias),
    ]
    _output(context, 0, dims)
    _output(context, 1, dims)


def _quantize_rows(context: InferenceContext) -> None:
    tokens, width = _dims(context, 0, 2)
    to = _attribute(context, "to")
    if to not in (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN):
        raise InferenceError(f"{context.get_display_name()}: to is {to}, neither INT8 nor FLOAT8E4M3FN")
    _output(context, 0, [tokens, width], to)
    _output(context, 1, [tokens], onnx.TensorProto.FLOAT)


def _unpack_bits(context: InferenceContext) -> None:
    (found,) = _dims(context, 0, 1)
    bits, given = _attribute(context, "bits"), context.get_attribute("shape")
    shape = [int(size) for size in given.ints] if given is not None else []
    if not 1 <= bits <= 8 or any(size < 0 for size in shape):
        raise InferenceError(f"{context.get_display_name()}: {bits} bits and shape {shape} are none of integers")
    _agree(context, "number of bytes", found, (math.prod(shape) * bits + 7) // 8)
    signed = context.get_attribute("signed")
    is_signed = signed is not None and bool(signed.i)
    _output(context, 0, shape, onnx.TensorProto.INT8 if is_signed else onnx.TensorProto.UINT8)


INFERENCE: dict[str, Infer] = {
    "Attention": _attention,
    "ExpertLinear": _expert_linear,
    "Experts": _experts,
    "GatedActivation": _gated_activation,
    "AddRMSNormalization": _add_norm,
    "AddLayerNormalization": _add_norm,
    "QuantizeRows": _quantize_rows,
    "UnpackBits": _unpack_bits,
}
