"""The operators of domain `inferencex`, registered with ONNX so that graphs which use them can be checked.

Standard operators (opset 23) are used wherever one exists. What is here either has state that ONNX cannot
express (`Attention` over a paged cache), or is a fusion every backend wants to see whole.

Symbols in shapes: `T` tokens of all sequences of a step, `S` their number of features, `E` experts, `H` query
heads, `G` key-value heads, `Dk`/`Dv` head widths, `F` features of a feed-forward layer, `k` experts per token.
"""

from __future__ import annotations

import functools

import onnx
from onnx.defs import OpSchema

from inferencex.formats.dialect.names import DOMAIN as DOMAIN
from inferencex.formats.dialect.names import OPSET as OPSET
from inferencex.formats.dialect.names import VERSION as VERSION
from inferencex.formats.dialect.shape_inference import INFERENCE

_INT = OpSchema.AttrType.INT
_FLOAT = OpSchema.AttrType.FLOAT
_INTS = OpSchema.AttrType.INTS
_LIST_OF_FLOATS = OpSchema.AttrType.FLOATS
_STRING = OpSchema.AttrType.STRING
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_Input = tuple[str, str, str]
_Attribute = tuple[str, OpSchema.AttrType, str, int | float | str | tuple[()] | None]  # and its default: () for none

ATTENTION = """Causal attention of every token over its own sequence (Vaswani et al. 2017, section 3.2.1).

`q` is `[T, H * Dk]`, `k` is `[T, G * Dk]`, `v` is `[T, G * Dv]` for the step's new tokens; the keys and values of
earlier tokens are the runtime's state, held under `layer`. Query head `h` reads key-value head `h * G / H`.

Scores are `scale * (q . k)`; with `softcap` they become `softcap * tanh(score / softcap)`; with `slopes [H]` (ALiBi,
Press et al. 2022) `slopes[h] * (key position - query position)` is added. A query at position `p` sees keys at
positions `j <= p` with `p - j < window` when `window > 0`, and with `j / chunk == p / chunk` (integers) when
`chunk > 0`. `sinks [H]` (gpt-oss) is one more logit per head that takes part in the softmax and carries no value.

Nodes that name the same `layer` share one state: the first writes it, those with `writes = 0` only read it, and
their `k` and `v` are the values the writer was given.

`kv_type` says that the state may be kept in 8 bits, with calibrated scales: `key_scales` and `value_scales` are a
positive number for each of the `G` heads, the same on every node of a layer. In place of an element `x` of a key or
value, `s * r(clip(x / s, -m, m))` is attended to, where `s` is the scale of its layer and head and `r` rounds to the
nearest number of the type, ties to even: with `kv_type` = INT8 (3, as `onnx.TensorProto.DataType` numbers it) `m` is
127 and `r` gives integers; with FLOAT8E4M3FN (17) `m` is 448 (Micikevicius et al. 2022). The new tokens' own keys and
values are rounded as well. Arithmetic is float32. With 0, the default, the state is what was given, and there are no
scales. A runtime may keep keys and values more exactly than that."""

EXPERT_LINEAR = """A linear layer with weights chosen per row.

`y[m] = x[m] @ weight[expert_ids[m]].T + bias[expert_ids[m]]`, with `x [M, K]`, `expert_ids [M]`,
`weight [E, N, K]`, `bias [E, N]`, `y [M, N]`."""

EXPERTS = """A layer of gated feed-forward experts (Shazeer et al. 2017), with the routing already decided.

For token `t` with chosen experts `e = top_k_index[t, j]` and weights `w = top_k_weights[t, j]`:
`y[t] = sum_j w * (GatedActivation(x[t] @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e])`.
`x [T, S]`, `top_k_index [T, k]`, `top_k_weights [T, k]`, `gate_up [E, 2F, S]`, `down [E, S, F]`,
`gate_up_bias [E, 2F]`, `down_bias [E, S]`. The attributes are those of `GatedActivation`."""

GATED_ACTIVATION = """`activation(gate) * up` (Shazeer 2020, "GLU variants"), from one tensor that holds both.

`x` is `[T, 2F]`: with `layout = "concat"` the gate is the first half; with `"interleaved"` the even columns.
`activation` is `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`, `sigmoid` or `swiglu_clamped`; the last is gpt-oss's
`(clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with `g = min(gate, limit)`."""

ADD_RMS_NORM = """Residual addition and the RMS normalization that follows it (Zhang and Sennrich 2019).

`sum = x + residual`; `y = sum / sqrt(mean(sum^2) + epsilon) * scale`, over the last axis, in float32.
`x` and `residual` are `[T, S]`, `scale` is `[S]`."""

ADD_LAYER_NORM = """Residual addition and the layer normalization that follows it (Ba et al. 2016).

`sum = x + residual`; `y = (sum - mean(sum)) / sqrt(var(sum) + epsilon) * scale + bias`, over the last axis.
`x` and `residual` are `[T, S]`, `scale` and `bias` are `[S]`."""

QUANTIZE_ROWS = """Dynamic quantization of activations: every row by its own largest magnitude.

With `largest` = 127 for `to` = INT8 and 448 for FLOAT8E4M3FN (numbered as `onnx.TensorProto.DataType`), and
`a = max |x[m]|`: `scales[m] = a / largest` and `values[m] = x[m] * (largest / a)`, rounded to the nearest value of the
type, ties to even. Arithmetic is float32. A row whose `a` is below `2^-100` has the scale 0 and values 0, one that is
not all finite has the scale NaN and values 0. `DequantizeLinear(values, scales, axis=0)` gives back what the values
stand for. `x` and `values` are `[T, S]`, `scales` is float32 `[T]`."""

UNPACK_BITS = """Integers of less than eight bits out of a stream of bits.

Bit `b` of element `i` of `values`, flat over the row-major tensor, is bit `i * bits + b` of the stream, whose bit `n`
is bit `n % 8` of byte `n // 8`. `packed` is uint8 `[ceil(size * bits / 8)]`, `values` has the given `shape`: uint8, or
with `signed = 1` int8, the bits being those of a number in two's complement."""

_GATE: list[_Attribute] = [
    ("activation", _STRING, "name of the activation", None),
    ("layout", _STRING, "concat or interleaved", "concat"),
    ("alpha", _FLOAT, "slope inside the sigmoid of swiglu_clamped", 1.0),
    ("limit", _FLOAT, "clamp of swiglu_clamped; 0 for none", 0.0),
]


def _schema(name: str, doc: str, inputs: list[_Input], outputs: list[_Input], attributes: list[_Attribute]) -> OpSchema:
    """Build one schema; an input whose name ends in `?` is optional."""
    optional, single = OpSchema.FormalParameterOption.Optional, OpSchema.FormalParameterOption.Single
    parameters = [
        OpSchema.FormalParameter(n.rstrip("?"), t, d, param_option=optional if n.endswith("?") else single)
        for n, t, d in inputs
    ]
    return OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc=doc,
        inputs=parameters,
        outputs=[OpSchema.FormalParameter(n, t, d) for n, t, d in outputs],
        type_constraints=[
            ("T", _FLOATS, "activations and weights"),
            ("I", ["tensor(int64)", "tensor(int32)"], "indices"),
            ("Q", ["tensor(int8)", "tensor(float8e4m3fn)"], "quantized activations"),
            ("U", ["tensor(uint8)", "tensor(int8)"], "unpacked integers"),
        ],
        attributes=[
            OpSchema.Attribute(n, t, d)
            if default is None
            else OpSchema.Attribute(n, t, d, required=False)
            if default == ()
            else OpSchema.Attribute(n, onnx.helper.make_attribute(n, default), d)
            for n, t, d, default in attributes
        ],
    )


@functools.cache
def schemas() -> dict[str, OpSchema]:
    """Return the schema of every operator of the domain, by name."""
    return {schema.name: schema for schema in _schemas()}


def _schemas() -> list[OpSchema]:
    normed: list[_Input] = [("y", "T", "normalized"), ("sum", "T", "x + residual")]
    return [
        _schema(
            "Attention",
            ATTENTION,
            [
                ("q", "T", "queries"),
                ("k", "T", "keys"),
                ("v", "T", "values"),
                ("sinks?", "T", "one logit per query head"),
                ("slopes?", "T", "ALiBi slope per query head"),
            ],
            [("y", "T", "[T, H * Dv]")],
            [
                ("layer", _INT, "which layer state the keys and values live in", None),
                ("writes", _INT, "0 when another node of the same layer writes the state", 1),
                ("num_heads", _INT, "H", None),
                ("num_kv_heads", _INT, "G", None),
                ("scale", _FLOAT, "factor on q . k", None),
                ("window", _INT, "keys a query sees, itself included; 0 for all", 0),
                ("chunk", _INT, "tokens of an attention chunk; 0 for none", 0),
                ("softcap", _FLOAT, "bound of the scores; 0 for none", 0.0),
                ("kv_type", _INT, "element type of the state: 0, INT8 or FLOAT8E4M3FN", 0),
                ("key_scales", _LIST_OF_FLOATS, "[G], with kv_type", ()),
                ("value_scales", _LIST_OF_FLOATS, "[G], with kv_type", ()),
            ],
        ),
        _schema(
            "ExpertLinear",
            EXPERT_LINEAR,
            [("x", "T", "rows"), ("expert_ids", "I", "[M]"), ("weight", "T", "[E, N, K]"), ("bias?", "T", "[E, N]")],
            [("y", "T", "[M, N]")],
            [],
        ),
        _schema(
            "Experts",
            EXPERTS,
            [
                ("x", "T", "tokens"),
                ("top_k_index", "I", "chosen experts"),
                ("top_k_weights", "T", "their weights"),
                ("gate_up", "T", "[E, 2F, S]"),
                ("down", "T", "[E, S, F]"),
                ("gate_up_bias?", "T", "[E, 2F]"),
                ("down_bias?", "T", "[E, S]"),
            ],
            [("y", "T", "[T, S]")],
            _GATE,
        ),
        _schema("GatedActivation", GATED_ACTIVATION, [("x", "T", "[T, 2F]")], [("y", "T", "[T, F]")], _GATE),
        _schema(
            "AddRMSNormalization",
            ADD_RMS_NORM,
            [("x", "T", "branch"), ("residual", "T", "residual stream"), ("scale", "T", "[S]")],
            normed,
            [("epsilon", _FLOAT, "added to the mean square", 1e-5)],
        ),
        _schema(
            "AddLayerNormalization",
            ADD_LAYER_NORM,
            [("x", "T", "branch"), ("residual", "T", "residual stream"), ("scale", "T", "[S]"), ("bias?", "T", "[S]")],
            normed,
            [("epsilon", _FLOAT, "added to the variance", 1e-5)],
        ),
        _schema(
            "QuantizeRows",
            QUANTIZE_ROWS,
            [("x", "T", "[T, S]")],
            [("values", "Q", "[T, S]"), ("scales", "tensor(float)", "[T]")],
            [("to", _INT, "element type of the values", None)],
        ),
        _schema(
            "UnpackBits",
            UNPACK_BITS,
            [("packed", "tensor(uint8)", "stream of bits")],
            [("values", "U", "integers")],
            [
                ("bits", _INT, "of an integer: 1 to 8", None),
                ("shape", _INTS, "of the values", None),
                ("signed", _INT, "1 for two's complement", 0),
            ],
        ),
    ]


@functools.cache
def register() -> None:
    """Make the domain known to `onnx.checker` and to builders of nodes in this process."""
    for name, schema in schemas().items():
        schema.set_type_and_shape_inference_function(INFERENCE[name])
        onnx.defs.register_schema(schema)
