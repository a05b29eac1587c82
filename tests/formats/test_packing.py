from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import PER_CHANNEL, IntegerArray, QuantizedTensor, pack_int4, unpack_int4

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def random_tensor(
    shape: tuple[int, ...], bits: int, group_size: int, symmetric: bool, seed: int, half: bool = True
) -> QuantizedTensor:
    """Return a tensor of random integers, scales and zero points."""
    rng = np.random.default_rng(seed)
    low, high = (0, 15) if bits == 4 and not symmetric else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    kind = np.uint8 if low == 0 else np.int8
    scale_shape = shape[:-1] if group_size == PER_CHANNEL else (*shape[:-1], math.ceil(shape[-1] / group_size))

    def integers(of: tuple[int, ...]) -> IntegerArray:
        drawn = rng.integers(low, high, of, endpoint=True).astype(kind)
        return pack_int4(drawn) if bits == 4 else drawn

    scales = rng.uniform(0.001, 0.1, scale_shape).astype(np.float16 if half else np.float32)
    zero_points = None if symmetric else integers(scale_shape)
    return QuantizedTensor(integers(shape), scales, zero_points, bits, group_size, symmetric, shape)


@given(SHAPES, st.booleans(), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(shape: tuple[int, ...], signed: bool, seed: int) -> None:
    low, high, kind = (-8, 7, np.int8) if signed else (0, 15, np.uint8)
    values = np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(kind)
    packed = pack_int4(values)
    assert packed.dtype == np.uint8
    assert packed.shape == ((values.size + 1) // 2,)
    unpacked = unpack_int4(packed, shape, signed=signed)
    assert unpacked.dtype == kind
    np.testing.assert_array_equal(unpacked, values)


@pytest.mark.parametrize("signed", [True, False])
def test_packing_is_onnx_packing(signed: bool) -> None:
    values = np.arange(-8, 7, dtype=np.int8) if signed else np.arange(15, dtype=np.uint8)
    kind = TensorProto.INT4 if signed else TensorProto.UINT4
    theirs = helper.make_tensor("t", kind, [15], values.tolist())
    assert pack_int4(values).tobytes() == numpy_helper.from_array(numpy_helper.to_array(theirs)).raw_data


def test_odd_count_pads_with_zero() -> None:
    assert pack_int4(np.array([-1, 2, -3], dtype=np.int8)).tolist() == [0x2F, 0x0D]


def test_unpacking_refuses_the_wrong_number_of_bytes() -> None:
    with pytest.raises(QuantizationError, match="expected 3 bytes"):
        unpack_int4(np.zeros(4, dtype=np.uint8), (5,), signed=True)


@given(
    n=st.integers(1, 7),
    k=st.integers(1, 40),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([PER_CHANNEL, 1, 3, 8, 16, 64]),
    symmetric=st.booleans(),
    experts=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dequantize_is_the_definition_element_by_element(
    n: int, k: int, bits: int, group_size: int, symmetric: bool, experts: int, seed: int
) -> None:
    if experts and group_size == PER_CHANNEL:
        group_size = k
    shape = (experts, n, k) if experts else (n, k)
    tensor = random_tensor(shape, bits, group_size, symmetric, seed)
    integers, zero_points = tensor.integers().astype(np.float64), tensor.zero_point_integers()
    expected = np.empty(shape)
    for index in np.ndindex(shape):
        group = index[:-1] if group_size == PER_CHANNEL else (*index[:-1], index[-1] // group_size)
        zero = 0.0 if zero_points is None else float(zero_points[group])
        expected[index] = (integers[index] - zero) * float(tensor.scales[group])
    found = tensor.dequantize()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "group_size"),
    [((5, 7), PER_CHANNEL), ((5, 7), 1), ((5, 7), 4), ((3, 64), 64), ((4, 172), 64), ((2, 3, 10), 4), ((2, 3, 10), 10)],
)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_dequantize_is_what_onnx_computes(shape: tuple[int, ...], group_size: int, bits: int, symmetric: bool) -> None:
    tensor = random_tensor(shape, bits, group_size, symmetric, seed=1)
    kind = int(tensor.dtype)

    def constant(name: str, array: IntegerArray, of: tuple[int, ...]) -> TensorProto:
        return TensorProto(name=name, data_type=kind, dims=of, raw_data=array.tobytes())

    initializers = [
        constant("q", tensor.values, tensor.shape),
        numpy_helper.from_array(tensor.scales, "s"),
        *([] if tensor.zero_points is None else [constant("z", tensor.zero_points, tensor.scale_shape)]),
    ]
    node = helper.make_node(
        "DequantizeLinear", ["q", "s", "z"][: len(initializers)], ["w"], output_dtype=1, **tensor.attributes
    )
    output = helper.make_tensor_value_info("w", TensorProto.FLOAT, list(shape))
    graph = helper.make_graph([node], "g", [], [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    (expected,) = ReferenceEvaluator(model).run(None, {})
    np.testing.assert_allclose(tensor.dequantize(), expected, rtol=1e-6)


def test_sizes() -> None:
    tensor = random_tensor((4, 128), 4, 64, symmetric=False, seed=0)
    assert tensor.nbytes == 4 * 64 + 4 * 2 * 2 + 4
    assert tensor.bits_per_weight == pytest.approx(4 + 16 / 64 + 4 / 64)
    assert random_tensor((4, 128), 4, 64, symmetric=True, seed=0).bits_per_weight == 4.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": np.ones((4, 3), np.float16)}, r"expected float16 or float32 \[4, 2\]"),
        ({"scales": np.ones((4, 2), np.float64)}, "scales are float64"),
        ({"zero_points": None}, "zero points belong to asymmetric"),
        ({"values": np.zeros((4, 128), np.uint8)}, r"expected uint8 \[256\]"),
        ({"bits": 5}, "4 or 8 bits"),
        ({"group_size": 0}, "neither positive"),
        ({"shape": (512,)}, "does not go with"),
    ],
)
def test_parts_that_do_not_belong_together(change: dict[str, object], message: str) -> None:
    right = random_tensor((4, 128), 4, 64, symmetric=False, seed=0)
    parts = {
        name: getattr(right, name)
        for name in ("values", "scales", "zero_points", "bits", "group_size", "symmetric", "shape")
    }
    with pytest.raises(QuantizationError, match=message):
        QuantizedTensor(**{**parts, **change})
