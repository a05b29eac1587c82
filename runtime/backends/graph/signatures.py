"""What operators take and give, as the schemas say: those that graphs of models consist of, without importing `onnx`.

The tables repeat `onnx.defs` for opset 23 and `formats.dialect.schemas`; a test compares them. Operators that are in
neither table are looked up there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from inferencex.formats.dialect.names import DOMAIN, OPSET
from inferencex.formats.onnx_messages import AttributeProto
from inferencex.formats.records import record


@record(frozen=True)
class Signature:
    """What an operator takes and gives.

    inputs, outputs:  fewest and most
    is_required:      for each input, whether it may not be left out; the last entry stands for all behind it
    attributes:       their types, as ONNX numbers them
    needed:           the attributes without a default
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    is_required: tuple[bool, ...]
    attributes: Mapping[str, int]
    needed: frozenset[str]


@functools.cache
def signature_of(domain: str, op_type: str) -> Signature | None:
    """Return the signature of an operator, None for one that neither ONNX nor the dialect has."""
    row = {"": _STANDARD, DOMAIN: _DIALECT}.get(domain, {}).get(op_type)
    return signature_in_schema(domain, op_type) if row is None else _signature(*row)


def signature_in_schema(domain: str, op_type: str) -> Signature | None:
    """Return the same from the schemas themselves."""
    import onnx

    if domain == DOMAIN:
        from inferencex.formats.dialect.schemas import schemas

        schema = schemas().get(op_type)
    else:
        try:
            schema = onnx.defs.get_schema(op_type, OPSET, domain)
        except onnx.defs.SchemaError:
            schema = None
    if schema is None:
        return None
    options = onnx.defs.OpSchema.FormalParameterOption
    return Signature(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(parameter.option in (options.Single, options.Variadic) for parameter in schema.inputs),
        {name: _number(attribute.type) for name, attribute in schema.attributes.items()},
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _number(kind: Any) -> int:
    name = str(kind).removeprefix("AttrType.")  # a schema says `AttrType.INT`
    return int(AttributeProto.AttributeType.Value(name))


def _signature(inputs: str, outputs: str, is_required: str, attributes: str) -> Signature:
    pairs = [attribute.rstrip("!").split(":") for attribute in attributes.split()]
    return Signature(
        _limits(inputs),
        _limits(outputs),
        tuple(letter == "r" for letter in is_required),
        {name: _TYPES[letter] for name, letter in pairs},
        frozenset(attribute.partition(":")[0] for attribute in attributes.split() if attribute.endswith("!")),
    )


def _limits(text: str) -> tuple[int, int]:
    fewest, dash, most = text.partition("-")
    return int(fewest), int(most) if most else _UNLIMITED if dash else int(fewest)


_UNLIMITED = (1 << 31) - 1  # what schemas say

_TYPES: dict[str, int] = {
    "f": AttributeProto.FLOAT,
    "i": AttributeProto.INT,
    "s": AttributeProto.STRING,
    "t": AttributeProto.TENSOR,
    "F": AttributeProto.FLOATS,
    "I": AttributeProto.INTS,
    "S": AttributeProto.STRINGS,
}

# Inputs and outputs (fewest-most, an open end where there is no limit), which inputs are required (r) or optional (o),
# and attributes with the letter of their type; those with ! have no default.
_STANDARD: dict[str, tuple[str, str, str, str]] = {
    "Abs": ("1", "1", "r", ""),
    "Add": ("2", "1", "rr", ""),
    "And": ("2", "1", "rr", ""),
    "ArgMax": ("1", "1", "r", "axis:i keepdims:i select_last_index:i"),
    "ArgMin": ("1", "1", "r", "axis:i keepdims:i select_last_index:i"),
    "Cast": ("1", "1", "r", "saturate:i to:i!"),
    "Ceil": ("1", "1", "r", ""),
    "Clip": ("1-3", "1", "roo", ""),
    "Concat": ("1-", "1", "r", "axis:i!"),
    "ConstantOfShape": ("1", "1", "r", "value:t"),
    "Cos": ("1", "1", "r", ""),
    "CumSum": ("2", "1", "rr", "exclusive:i reverse:i"),
    "DequantizeLinear": ("2-3", "1", "rro", "axis:i block_size:i output_dtype:i"),
    "Div": ("2", "1", "rr", ""),
    "Elu": ("1", "1", "r", "alpha:f"),
    "Equal": ("2", "1", "rr", ""),
    "Erf": ("1", "1", "r", ""),
    "Exp": ("1", "1", "r", ""),
    "Expand": ("2", "1", "rr", ""),
    "Flatten": ("1", "1", "r", "axis:i"),
    "Floor": ("1", "1", "r", ""),
    "Gather": ("2", "1", "rr", "axis:i"),
    "GatherElements": ("2", "1", "rr", "axis:i"),
    "Gelu": ("1", "1", "r", "approximate:s"),
    "Gemm": ("2-3", "1", "rro", "alpha:f beta:f transA:i transB:i"),
    "Greater": ("2", "1", "rr", ""),
    "GreaterOrEqual": ("2", "1", "rr", ""),
    "HardSwish": ("1", "1", "r", ""),
    "Identity": ("1", "1", "r", ""),
    "IsNaN": ("1", "1", "r", ""),
    "LayerNormalization": ("2-3", "1-3", "rro", "axis:i epsilon:f stash_type:i"),
    "LeakyRelu": ("1", "1", "r", "alpha:f"),
    "Less": ("2", "1", "rr", ""),
    "LessOrEqual": ("2", "1", "rr", ""),
    "Log": ("1", "1", "r", ""),
    "LogSoftmax": ("1", "1", "r", "axis:i"),
    "MatMul": ("2", "1", "rr", ""),
    "Max": ("1-", "1", "r", ""),
    "Min": ("1-", "1", "r", ""),
    "Mod": ("2", "1", "rr", "fmod:i"),
    "Mul": ("2", "1", "rr", ""),
    "Neg": ("1", "1", "r", ""),
    "Not": ("1", "1", "r", ""),
    "Or": ("2", "1", "rr", ""),
    "PRelu": ("2", "1", "rr", ""),
    "Pow": ("2", "1", "rr", ""),
    "QuantizeLinear": ("2-3", "1", "rro", "axis:i block_size:i output_dtype:i precision:i saturate:i"),
    "RMSNormalization": ("2", "1", "rr", "axis:i epsilon:f stash_type:i"),
    "Range": ("3", "1", "rrr", ""),
    "Reciprocal": ("1", "1", "r", ""),
    "ReduceL2": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceMax": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceMean": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceMin": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceProd": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceSum": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "ReduceSumSquare": ("1-2", "1", "ro", "keepdims:i noop_with_empty_axes:i"),
    "Relu": ("1", "1", "r", ""),
    "Reshape": ("2", "1", "rr", "allowzero:i"),
    "RotaryEmbedding": ("3-4", "1", "rrro", "interleaved:i num_heads:i rotary_embedding_dim:i"),
    "Round": ("1", "1", "r", ""),
    "ScatterElements": ("3", "1", "rrr", "axis:i reduction:s"),
    "Shape": ("1", "1", "r", "end:i start:i"),
    "Sigmoid": ("1", "1", "r", ""),
    "Sign": ("1", "1", "r", ""),
    "Sin": ("1", "1", "r", ""),
    "Slice": ("3-5", "1", "rrroo", ""),
    "Softmax": ("1", "1", "r", "axis:i"),
    "Softplus": ("1", "1", "r", ""),
    "Split": ("1-2", "1-", "ro", "axis:i num_outputs:i"),
    "Sqrt": ("1", "1", "r", ""),
    "Squeeze": ("1-2", "1", "ro", ""),
    "Sub": ("2", "1", "rr", ""),
    "Sum": ("1-", "1", "r", ""),
    "Tanh": ("1", "1", "r", ""),
    "Tile": ("2", "1", "rr", ""),
    "TopK": ("2", "2", "rr", "axis:i largest:i sorted:i"),
    "Transpose": ("1", "1", "r", "perm:I"),
    "Unsqueeze": ("2", "1", "rr", ""),
    "Where": ("3", "1", "rrr", ""),
    "Xor": ("2", "1", "rr", ""),
}

_DIALECT: dict[str, tuple[str, str, str, str]] = {
    "Attention": (
        "3-5",
        "1",
        "rrroo",
        "chunk:i key_scales:F kv_type:i layer:i! num_heads:i! num_kv_heads:i! scale:f! softcap:f value_scales:F "
        "window:i writes:i",
    ),
    "ExpertLinear": ("3-4", "1", "rrro", ""),
    "Experts": ("5-7", "1", "rrrrroo", "activation:s! alpha:f layout:s limit:f"),
    "GatedActivation": ("1", "1", "r", "activation:s! alpha:f layout:s limit:f"),
    "AddRMSNormalization": ("3", "2", "rrr", "epsilon:f"),
    "AddLayerNormalization": ("3-4", "2", "rrro", "epsilon:f"),
    "QuantizeRows": ("1", "2", "r", "to:i!"),
    "UnpackBits": ("1", "1", "r", "bits:i! shape:I! signed:i"),
}

TABULATED = [*(("", name) for name in _STANDARD), *((DOMAIN, name) for name in _DIALECT)]
"""The operators that are in the tables."""
