from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from inferencex.formats.errors import QuantizationError
from inferencex.formats.packing import (
    PER_CHANNEL,
    IntegerArray,
    QuantizedTensor,
    pack_bits,
    pack_int4,
    unpack_bits,
    unpack_int4,
)

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


def random_tensor(
    shape: tuple[int, ...], bits: int, group_size: int, symmetric: bool, seed: int, half: bool = True
) -> QuantizedTensor:
    """Return a tensor of random integers, scales and zero points."""
    rng = np.random.default_rng(seed)
    low, high = (0, (1 << bits) - 1) if bits < 8 and not symmetric else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    kind = np.uint8 if low == 0 else np.int8
    scale_shape = shape[:-1] if group_size == PER_CHANNEL else (*shape[:-1], math.ceil(shape[-1] / group_size))

    def integers(of: tuple[int, ...]) -> IntegerArray:
        drawn = rng.integers(low, high, of, endpoint=True).astype(kind)
        return pack_bits(drawn, bits) if bits < 8 else drawn

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


@given(SHAPES, st.integers(1, 8), st.booleans(), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing_of_any_number_of_bits(
    shape: tuple[int, ...], bits: int, signed: bool, seed: int
) -> None:
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    values = np.random.default_rng(seed).integers(low, high, shape).astype(np.int8 if signed else np.uint8)
    packed = pack_bits(values, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (math.ceil(values.size * bits / 8),)
    unpacked = unpack_bits(packed, bits, shape, signed=signed)
    assert unpacked.dtype == values.dtype
    np.testing.assert_array_equal(unpacked, values)
    if bits == 4:
        np.testing.assert_array_equal(packed, pack_int4(values))


@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_the_stream_of_bits_is_the_definition(bits: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << bits, count).astype(np.uint8)
    stream = "".join(format(int(value), f"0{bits}b")[::-1] for value in values)
    stream += "0" * (-len(stream) % 8)
    expected = [int(stream[i : i + 8][::-1], 2) for i in range(0, len(stream), 8)]
    assert pack_bits(values, bits).tolist() == expected


@pytest.mark.parametrize("size", [0, 2, 4])
def test_a_stream_of_the_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(QuantizationError, match=r"3-bit integers of shape \[7\]: expected 3 bytes"):
        unpack_bits(np.zeros(size, dtype=np.uint8), 3, (7,))


def random_floats(shape: tuple[int, ...], kind: str, group_size: int, seed: int) -> QuantizedTensor:
    """Return a tensor of random floats of 8 or 4 bits: `fp8`, `nvfp4` or `mxfp4`."""
    rng = np.random.default_rng(seed)
    scale_shape = shape[:-1] if group_size == PER_CHANNEL else (*shape[:-1], math.ceil(shape[-1] / group_size))
    scales: Any = rng.uniform(0.5, 2, scale_shape)
    if kind == "fp8":
        values: Any = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedTensor(values, scales.astype(np.float16), None, 8, group_size, True, shape, "e4m3")
    values = pack_int4(rng.integers(0, 16, shape).astype(np.uint8))
    if kind == "mxfp4":
        scales = scales.astype(ml_dtypes.float8_e8m0fnu)
        return QuantizedTensor(values, scales, None, 4, group_size, True, shape, "e2m1")
    scales, factor = scales.astype(ml_dtypes.float8_e4m3fn), np.array(0.25, dtype=np.float32)
    return QuantizedTensor(values, scales, None, 4, group_size, True, shape, "e2m1", factor)


_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@given(
    n=st.integers(1, 5),
    k=st.integers(1, 40),
    kind=st.sampled_from(["fp8", "nvfp4", "mxfp4"]),
    group_size=st.sampled_from([1, 3, 16, 32]),
    experts=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dequantized_floats_are_the_definition(
    n: int, k: int, kind: str, group_size: int, experts: int, seed: int
) -> None:
    shape = (experts, n, k) if experts else (n, k)
    tensor = random_floats(shape, kind, group_size, seed)
    found = tensor.dequantize()
    for index in np.ndindex(shape):
        scale = float(tensor.scales[*index[:-1], index[-1] // group_size])
        if kind == "fp8":
            value = float(tensor.values[index])
        else:
            code = int(tensor.integers()[index])
            value = _E2M1[code & 7] * (-1 if code & 8 else 1) * (0.25 if kind == "nvfp4" else 1)
        assert found[index] == np.float32(value * scale)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 4}, "e4m3 numbers have 8 bits, not 4"),
        ({"number": "e2m1", "bits": 8}, "e2m1 numbers have 4 bits, not 8"),
        ({"scales": np.ones((4, 2), ml_dtypes.float8_e8m0fnu)}, "expected float16 or float32"),
        ({"values": np.zeros((4, 20), np.int8)}, "values are int8"),
        ({"tensor_scale": np.ones((), np.float32)}, "a tensor scale belongs to scales of float8_e4m3fn"),
        ({"symmetric": False, "zero_points": np.zeros((4, 2), np.int8)}, "have no zero points"),
    ],
)
def test_floats_whose_parts_do_not_belong_together(change: dict[str, Any], message: str) -> None:
    parts = vars(random_floats((4, 20), "fp8", 16, 0)) | change
    with pytest.raises(QuantizationError, match=message):
        QuantizedTensor(**parts)


@pytest.mark.parametrize("factor", [None, 0.0, math.inf, math.nan])
def test_a_tensor_scale_that_is_none(factor: float | None) -> None:
    parts = vars(random_floats((4, 20), "nvfp4", 16, 0))
    parts["tensor_scale"] = None if factor is None else np.array(factor, dtype=np.float32)
    with pytest.raises(QuantizationError, match="tensor scale"):
        QuantizedTensor(**parts)


@pytest.mark.parametrize(
    ("kind", "group_size", "bits"), [("fp8", PER_CHANNEL, 8 + 16 / 64), ("nvfp4", 16, 4.5), ("mxfp4", 32, 4.25)]
)
def test_bits_of_floats(kind: str, group_size: int, bits: float) -> None:
    tensor = random_floats((64, 64), kind, group_size, 0)
    assert tensor.bits_per_weight == pytest.approx(bits, abs=0.01)


def test_odd_count_pads_with_zero() -> None:
    assert pack_int4(np.array([-1, 2, -3], dtype=np.int8)).tolist() == [0x2F, 0x0D]


def test_unpacking_refuses_the_wrong_number_of_bytes() -> None:
    with pytest.raises(QuantizationError, match="expected 3 bytes"):
        unpack_int4(np.zeros(4, dtype=np.uint8), (5,), signed=True)


@given(
    n=st.integers(1, 7),
    k=st.integers(1, 40),
    bits=st.sampled_from([3, 4, 5, 6, 8]),
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
        ({"bits": 7}, "6 or 8 bits"),
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
