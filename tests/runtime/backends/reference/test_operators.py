"""Every torch operator against the reference implementation of the ONNX specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper
from onnx.reference import ReferenceEvaluator

from inferencex.formats.dialect import DOMAIN, OPSET
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.operators import OPERATORS

Array = NDArray[Any]
Inputs = list[Any]  # arrays, scalars, and None for an absent input


def _random(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _ints(*values: int) -> Array:
    return np.array(values, dtype=np.int64)


X = _random(3, 4, 6)
POSITIVE = np.abs(X) + 0.5
BOOLS = X > 0
UNARY = {
    "Abs": X, "Ceil": X, "Cos": X, "Erf": X, "Exp": X, "Floor": X, "HardSwish": 4 * X, "Identity": X, "Log": POSITIVE,
    "Neg": X, "Not": BOOLS, "Reciprocal": POSITIVE, "Relu": X, "Round": 3 * X, "Sigmoid": X, "Sign": X, "Sin": X,
    "Softplus": X, "Sqrt": POSITIVE, "Tanh": X, "IsNaN": np.where(BOOLS, X, np.float32("nan")),
}  # fmt: skip
Y = _random(4, 1)
WHOLE = np.random.default_rng(0).integers(-9, 9, (3, 4))
CASES: list[tuple[str, Inputs, dict[str, Any]]] = [
    *((name, [x], {}) for name, x in UNARY.items()),
    *((name, [X, Y], {}) for name in ("Add", "Sub", "Mul", "Div", "Equal", "Greater", "GreaterOrEqual", "Less")),
    ("LessOrEqual", [X, X], {}),
    *((name, [BOOLS, BOOLS[:, ::-1]], {}) for name in ("And", "Or", "Xor")),
    ("Div", [WHOLE, _ints(3)], {}),
    ("Div", [WHOLE, _ints(-4)], {}),
    ("Pow", [POSITIVE, np.float32(-0.5).reshape(())], {}),
    ("Pow", [X, _ints(2)], {}),
    ("PRelu", [X, _random(6)], {}),
    ("Max", [X, Y, _random(6)], {}),
    ("Min", [X, Y, _random(6)], {}),
    ("Sum", [X, Y, _random(6)], {}),
    ("Mod", [WHOLE, _ints(4)], {}),
    ("Mod", [WHOLE, _ints(4)], {"fmod": 1}),
    ("Clip", [X, np.float32(-0.5), np.float32(0.7)], {}),
    ("Clip", [X, None, np.float32(0.7)], {}),
    ("Where", [BOOLS, X, Y], {}),
    ("Cast", [3 * X], {"to": onnx.TensorProto.INT64}),
    ("Cast", [X], {"to": onnx.TensorProto.BOOL}),
    ("CastLike", [WHOLE, X], {}),
    ("Gelu", [X], {}),
    ("Gelu", [X], {"approximate": "tanh"}),
    ("LeakyRelu", [X], {"alpha": 0.3}),
    ("Elu", [X], {"alpha": 0.3}),
    ("Softmax", [X], {"axis": 1}),
    ("Softmax", [X], {}),
    ("LogSoftmax", [X], {"axis": 1}),
    ("MatMul", [X, _random(6, 5)], {}),
    ("MatMul", [X, _random(3, 6, 2)], {}),
    ("Gemm", [_random(4, 6), _random(5, 6), _random(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    ("Gemm", [_random(6, 4), _random(6, 5)], {"transA": 1}),
    ("Einsum", [X, _random(6, 5)], {"equation": "abc,cd->bad"}),
    *(
        (f"Reduce{kind}", [X, axes], {"keepdims": keep})
        for kind in ("Mean", "Sum", "Max", "Min", "L1", "L2", "SumSquare")
        for axes, keep in ((_ints(-1), 1), (_ints(0, 2), 0), (None, 1))
    ),
    ("ReduceSum", [X], {"noop_with_empty_axes": 1}),
    ("ArgMax", [X], {"axis": 1, "keepdims": 0}),
    ("TopK", [X, _ints(3)], {"axis": 1}),
    ("TopK", [X, _ints(2)], {"largest": 0}),
    *(
        ("CumSum", [X, np.array(1)], {"exclusive": exclusive, "reverse": reverse})
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    ("RMSNormalization", [X, _random(6)], {"epsilon": 0.1}),
    ("RMSNormalization", [X, _random(4, 6)], {"axis": 1}),
    ("LayerNormalization", [X, _random(6), _random(6)], {"epsilon": 0.1}),
    ("LayerNormalization", [X, _random(6)], {}),
    (
        "DequantizeLinear",
        [np.arange(24, dtype=np.int8).reshape(4, 6), _random(4, 2), None],
        {"axis": 1, "block_size": 3},
    ),
    (
        "DequantizeLinear",
        [np.arange(24, dtype=np.uint8).reshape(4, 6), _random(4, 2), np.arange(8, dtype=np.uint8).reshape(4, 2)],
        {"axis": 1, "block_size": 3},
    ),
    ("DequantizeLinear", [np.arange(24, dtype=np.int8).reshape(4, 6), _random(4)], {"axis": 0}),
    ("DequantizeLinear", [np.arange(24, dtype=np.int8).reshape(4, 6), np.float32(0.5), np.int8(3)], {}),
    ("QuantizeLinear", [_random(4, 6), np.float32(0.03), np.int8(0)], {}),
    ("QuantizeLinear", [_random(4, 6) * 9, np.float32(0.03), np.uint8(7)], {}),
    (
        "QuantizeLinear",
        [_random(4, 6), np.array([0.1, 0.02, 0.5, 0.01], np.float32), np.zeros(4, np.int8)],
        {"axis": 0},
    ),
    ("Shape", [X], {}),
    ("Shape", [X], {"start": 1, "end": -1}),
    ("Size", [X], {}),
    ("Reshape", [X, _ints(0, -1, 3)], {}),
    ("Flatten", [X], {"axis": 2}),
    ("Flatten", [X], {"axis": 0}),
    ("Flatten", [X], {"axis": -1}),
    ("Transpose", [X], {"perm": [2, 0, 1]}),
    ("Transpose", [X], {}),
    ("Unsqueeze", [X, _ints(0, -1)], {}),
    ("Unsqueeze", [X, _ints(3, 1)], {}),
    ("Squeeze", [X[:, :1], _ints(1)], {}),
    ("Squeeze", [X[:1, :1]], {}),
    ("Expand", [Y, _ints(3, 4, 6)], {}),
    ("Expand", [X, _ints(1, 6)], {}),
    ("Tile", [X, _ints(1, 2, 3)], {}),
    ("Concat", [X, X[:, :2]], {"axis": 1}),
    ("Split", [X, _ints(1, 3)], {"axis": 1}),
    ("Split", [X], {"axis": 2, "num_outputs": 4}),
    ("Split", [X], {"axis": -1, "num_outputs": 2}),
    ("Slice", [X, _ints(1), _ints(2**63 - 1), _ints(2)], {}),
    ("Slice", [X, _ints(0, 1), _ints(-1, 6), _ints(1, 2), _ints(1, 2)], {}),
    ("Slice", [X, _ints(-3), _ints(-1), _ints(-1)], {}),
    ("Slice", [X, _ints(5), _ints(-(2**63)), _ints(2), _ints(-2)], {}),
    ("Slice", [X, _ints(4), _ints(1), _ints(2), _ints(-1)], {}),
    ("Slice", [X, _ints(1, 1), _ints(3, 3)], {}),
    ("Gather", [X, np.array([[0, -1], [2, 1]])], {"axis": 1}),
    ("Gather", [X, np.array(2)], {"axis": -1}),
    ("GatherElements", [X, np.array([[[0, -1, 2, 1, 0, 0]] * 4] * 3)], {"axis": 2}),
    ("ScatterElements", [X, np.array([[[0, -1]] * 4] * 3), X[..., :2]], {"axis": 2}),
    ("ScatterElements", [X, np.array([[[0, -1]] * 4] * 3), X[..., :2]], {"axis": 2, "reduction": "add"}),
    ("ScatterElements", [X, np.array([[[0, -1]] * 4] * 3), X[..., :2]], {"axis": 2, "reduction": "max"}),
    ("ConstantOfShape", [_ints(2, 3)], {}),
    ("ConstantOfShape", [_ints(2, 3)], {"value": helper.make_tensor("v", onnx.TensorProto.INT64, [1], [7])}),
    ("Range", [np.array(1), np.array(9), np.array(2)], {}),
    *(("Trilu", [X, np.array(k)], {"upper": upper}) for k in (-1, 1) for upper in (0, 1)),
    ("Trilu", [X], {}),
    ("OneHot", [_ints(0, 2, -1), np.array(4), np.array([0.5, 2.0], np.float32)], {}),
    ("OneHot", [_ints(0, 2, 1), np.array(4), np.array([0.5, 2.0], np.float32)], {"axis": 0}),
]


def _outputs(op_type: str, attributes: dict[str, Any], inputs: Inputs) -> int:
    if op_type == "Split":
        return int(attributes.get("num_outputs", 0)) or len(inputs[1])
    return 2 if op_type == "TopK" else 1


@pytest.mark.parametrize(("op_type", "inputs", "attributes"), CASES)
def test_the_operator_is_the_specified_one(op_type: str, inputs: Inputs, attributes: dict[str, Any]) -> None:
    names = ["" if x is None else f"i{index}" for index, x in enumerate(inputs)]
    outputs = [f"o{index}" for index in range(_outputs(op_type, attributes, inputs))]
    proto = helper.make_node(op_type, names, outputs, **attributes)
    feeds = {name: np.asarray(x) for name, x in zip(names, inputs, strict=True) if x is not None}
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    graph = helper.make_graph([proto], "node", infos, [helper.make_empty_tensor_value_info(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    expected = ReferenceEvaluator(model).run(None, feeds)
    assert ("", op_type) in OPERATORS
    node = ir.serde.deserialize_node(proto)
    tensors = [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]
    for got, other in zip(interpreter.run_node(node, tensors), expected, strict=True):
        assert list(got.shape) == list(np.shape(other))
        assert got.numpy().dtype == np.asarray(other).dtype
        np.testing.assert_allclose(got.numpy(), other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("width", [0, 4])
@pytest.mark.parametrize("layout", ["flat", "heads"])
@pytest.mark.parametrize("with_positions", [True, False])
def test_rotary_embedding(interleaved: int, width: int, layout: str, with_positions: bool) -> None:
    half = (width or 8) // 2
    x = _random(2, 5, 3 * 8) if layout == "flat" else _random(2, 3, 5, 8)
    attributes: dict[str, Any] = {"interleaved": interleaved, "rotary_embedding_dim": width}
    attributes |= {"num_heads": 3} if layout == "flat" else {}
    tables: Inputs = [_random(9, half), _random(9, half)] if with_positions else [_random(2, 5, half)] * 2
    positions: Inputs = [np.array([[4, 0, 1, 8, 3], [1, 1, 2, 7, 5]])] if with_positions else []
    test_the_operator_is_the_specified_one("RotaryEmbedding", [x, *tables, *positions], attributes)


def test_every_standard_operator_has_a_case() -> None:
    tested = {op_type for op_type, _, _ in CASES} | {"RotaryEmbedding"}
    assert {name for domain, name in OPERATORS if domain != DOMAIN} == tested
