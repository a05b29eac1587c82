from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from inferencex.formats import dtypes
from inferencex.formats.dtypes import DataType
from inferencex.formats.errors import BundleError


def test_types_are_those_of_onnx() -> None:
    assert {dtype.name: dtype.value for dtype in DataType}.items() <= dict(onnx.TensorProto.DataType.items()).items()


@pytest.mark.parametrize("dtype", [dtype for dtype in DataType if dtype.name not in ("UNDEFINED", "STRING")])
def test_types_agree_with_those_of_the_converter(dtype: DataType) -> None:
    same = ir.DataType(dtype)
    assert (same.name, same.bitwidth, same.numpy()) == (dtype.name, dtype.bitwidth, dtype.numpy())
    assert {dtype: True}[same], "one finds the other in a table"


@pytest.mark.parametrize("dtype", [DataType.UNDEFINED, DataType.STRING])
def test_types_without_a_size(dtype: DataType) -> None:
    with pytest.raises(BundleError, match=dtype.name):
        assert dtype.bitwidth


def test_packed_types_are_flat_bytes() -> None:
    assert dtypes.is_packed(DataType.UINT4)
    assert dtypes.storage_shape(DataType.UINT4, (3, 5)) == (8,)
    assert dtypes.storage_dtype(DataType.INT4) == np.uint8
    assert dtypes.safetensors_code(DataType.INT4) == "U8"


def test_plain_types_keep_their_shape() -> None:
    assert dtypes.storage_shape(DataType.BFLOAT16, (3, 5)) == (3, 5)
    assert dtypes.storage_nbytes(DataType.BFLOAT16, (3, 5)) == 30
    assert dtypes.storage_dtype(DataType.BFLOAT16) == ml_dtypes.bfloat16
    assert dtypes.CODE_ITEMSIZES["BF16"] == 2
    assert dtypes.CODE_ITEMSIZES["U8"] == 1


def test_scalars_and_empty_tensors() -> None:
    assert dtypes.storage_nbytes(DataType.FLOAT, ()) == 4
    assert dtypes.storage_nbytes(DataType.INT4, (0, 7)) == 0


def test_types_that_bundles_do_not_store() -> None:
    with pytest.raises(BundleError, match="COMPLEX64"):
        dtypes.safetensors_code(DataType.COMPLEX64)
