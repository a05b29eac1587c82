from typing import Any

import onnx
import pytest

from tests.formats.dialect.nodes import Shape, model_of

ATTENTION = {"layer": 0, "num_heads": 4, "num_kv_heads": 2, "scale": 0.5}
KV_SCALES = {"kv_type": 3, "key_scales": [0.5, 1.0], "value_scales": [0.25, 2.0]}
QKV: dict[str, Shape | None] = {"q": ["T", 32], "k": ["T", 16], "v": ["T", 12]}
GATE = {"activation": "silu"}
NORM: dict[str, Shape | None] = {"x": ["T", 8], "residual": ["T", 8], "scale": [8]}
EXPERTS: dict[str, Shape | None] = {
    "x": ["T", 6],
    "top_k_index": ["T", 2],
    "top_k_weights": ["T", 2],
    "gate_up": [5, 14, 6],
    "down": [5, 6, 7],
    "gate_up_bias": [5, 14],
    "down_bias": [5, 6],
}
IDS = {"expert_ids": onnx.TensorProto.INT64, "top_k_index": onnx.TensorProto.INT64}

CASES: list[tuple[str, dict[str, Shape | None], dict[str, Any], list[Shape]]] = [
    ("Attention", {"q": ["T", 32], "k": ["T", 16], "v": ["T", 12]}, ATTENTION, [["T", 24]]),
    ("Attention", {"q": ["T", 32], "k": ["T", 16], "v": ["T", 12]}, ATTENTION | KV_SCALES, [["T", 24]]),
    ("Attention", {"q": [9, 32], "k": ["T", 16], "v": ["T", 12], "sinks": [4], "slopes": [4]}, ATTENTION, [[9, 24]]),
    ("ExpertLinear", {"x": ["M", 6], "expert_ids": ["M"], "weight": [5, 7, 6], "bias": [5, 7]}, {}, [["M", 7]]),
    ("Experts", EXPERTS, GATE, [["T", 6]]),
    ("GatedActivation", {"x": ["T", 10]}, GATE, [["T", 5]]),
    ("AddRMSNormalization", NORM, {}, [["T", 8], ["T", 8]]),
    ("AddLayerNormalization", {**NORM, "bias": [8]}, {}, [["T", 8], ["T", 8]]),
]


def _model(
    op_type: str, inputs: dict[str, Shape | None], attributes: dict[str, Any], count: int = 1
) -> onnx.ModelProto:
    return model_of(op_type, inputs, attributes, outputs=["y", "sum"][:count], dtypes=IDS)


@pytest.mark.parametrize(("op_type", "inputs", "attributes", "expected"), CASES)
def test_shapes_of_outputs(
    op_type: str, inputs: dict[str, Shape | None], attributes: dict[str, Any], expected: list[Shape]
) -> None:
    model = _model(op_type, inputs, attributes, len(expected))
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    for output, shape in zip(inferred.graph.output, expected, strict=True):
        assert [d.dim_param or d.dim_value for d in output.type.tensor_type.shape.dim] == list(shape)
        assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_unknown_shapes_stay_unknown() -> None:
    model = _model("GatedActivation", {"x": ["T", "W"]}, GATE)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    tokens, width = inferred.graph.output[0].type.tensor_type.shape.dim
    assert tokens.dim_param == "T" and not width.HasField("dim_value")


def test_the_dtype_is_that_of_the_activations() -> None:
    dtypes = {name: onnx.TensorProto.BFLOAT16 for name in NORM}
    model = model_of("AddRMSNormalization", NORM, {}, outputs=["y", "sum"], dtypes=dtypes)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    assert {o.type.tensor_type.elem_type for o in inferred.graph.output} == {onnx.TensorProto.BFLOAT16}


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        (
            "Attention",
            {"q": ["T", 30], "k": ["T", 16], "v": ["T", 12]},
            ATTENTION,
            "width of q is 30, not a multiple of 4",
        ),
        ("Attention", {"q": ["T", 32], "k": ["T", 12], "v": ["T", 12]}, ATTENTION, "head of q and k is both 6 and 8"),
        ("Attention", QKV, ATTENTION | KV_SCALES | {"kv_type": 1}, "kv_type is 1, neither INT8 nor FLOAT8E4M3FN"),
        ("Attention", QKV, ATTENTION | KV_SCALES | {"key_scales": [1.0]}, "1 key_scales for kv_type 3, 2 heads"),
        ("Attention", QKV, ATTENTION | KV_SCALES | {"kv_type": 0}, "2 key_scales for kv_type 0"),
        ("Attention", {"q": ["T", 32], "k": ["T", 16], "v": ["T", 13]}, ATTENTION, "width of v is 13"),
        ("Attention", {"q": [4, 32], "k": [5, 16], "v": [4, 12]}, ATTENTION, "number of tokens is both 4 and 5"),
        (
            "Attention",
            {"q": [1, 4, 32], "k": ["T", 16], "v": ["T", 12]},
            ATTENTION,
            "input 0 has 3 dimensions, expected 2",
        ),
        (
            "Attention",
            {"q": ["T", 32], "k": ["T", 16], "v": ["T", 12], "sinks": [3]},
            ATTENTION,
            "number of query heads is both 3 and 4",
        ),
        (
            "Attention",
            {"q": ["T", 32], "k": ["T", 24], "v": ["T", 12]},
            {**ATTENTION, "num_kv_heads": 3},
            "num_heads is 4, not a multiple of 3",
        ),
        ("ExpertLinear", {"x": ["M", 6], "expert_ids": ["M"], "weight": [5, 7, 4]}, {}, "x and weight is both 4 and 6"),
        ("Experts", {**EXPERTS, "down": [4, 6, 7]}, GATE, "number of experts is both 4 and 5"),
        ("Experts", {**EXPERTS, "down": [5, 6, 8]}, GATE, "F is both 7 and 8"),
        ("Experts", {**EXPERTS, "down_bias": [5, 9]}, GATE, "S is both 6 and 9"),
        ("Experts", {**EXPERTS, "top_k_weights": ["T", 3]}, GATE, "experts per token is both 2 and 3"),
        ("GatedActivation", {"x": ["T", 9]}, GATE, "width of x is 9, not a multiple of 2"),
        ("AddRMSNormalization", {**NORM, "scale": [7]}, {}, "S is both 7 and 8"),
        ("AddLayerNormalization", {**NORM, "bias": [7]}, {}, "S is both 7 and 8"),
        ("AddRMSNormalization", {**NORM, "residual": ["T", 4]}, {}, "S is both 4 and 8"),
    ],
)
def test_the_full_check_refuses_shapes_that_do_not_fit(
    op_type: str, inputs: dict[str, Shape | None], attributes: dict[str, Any], message: str
) -> None:
    model = _model(op_type, inputs, attributes, 2 if op_type.startswith("Add") else 1)
    with pytest.raises(onnx.shape_inference.InferenceError, match=message):
        onnx.checker.check_model(model, full_check=True)


def test_the_full_check_refuses_a_declared_shape_that_is_not_computed() -> None:
    model = model_of("GatedActivation", {"x": ["T", 8]}, GATE, output_shapes={"y": ["T", 8]})
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(model, full_check=True)
