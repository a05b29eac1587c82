from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from inferencex.convert.source.safetensors_file import DTYPES, MAX_HEADER_BYTES, read_safetensors
from inferencex.formats.errors import SourceError

Write = Callable[[Path, Any, bytes], Path]
GOOD = {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {**GOOD["w"], **changes}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (GOOD, 12, "truncated: .* expected"),
        (GOOD, 20, "longer than its header says"),
        (entry(data_offsets=[0, 12]), 12, "takes 16 bytes"),
        (entry(data_offsets=[16, 0]), 16, "takes 16 bytes"),
        (entry(data_offsets=[0]), 16, "not a pair"),
        (entry(data_offsets=[-16, 0]), 16, "not a pair"),
        (entry(data_offsets="0:16"), 16, "not a pair"),
        (entry(dtype="FLOAT"), 16, "unknown dtype 'FLOAT'"),
        (entry(dtype=["F32"]), 16, "unknown dtype"),
        (entry(shape=[2, -2]), 16, "shape"),
        (entry(shape=[4.0]), 16, "shape"),
        (entry(shape=[True, 4]), 16, "shape"),
        (entry(shape=[1 << 70, 0]), 0, "shape"),
        (entry(shape=[1 << 62, 1 << 62]), 16, "takes"),
        (entry(extra=1), 16, "exactly dtype, shape and data_offsets"),
        ({"w": [1]}, 0, "exactly dtype, shape and data_offsets"),
        ({**GOOD, "v": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}, 20, "'v' overlaps"),
        ({**GOOD, "v": {"dtype": "F32", "shape": [1], "data_offsets": [20, 24]}}, 24, "'v' leaves a hole"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "'w' leaves a hole"),
        ({**GOOD, "__metadata__": {"a": 1}}, 16, "__metadata__"),
        ([], 0, "JSON list"),
        (b'{"w": ', 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (b"[" * 20_000, 0, "not valid JSON"),
        (b'{"w": ' + b"9" * 5000 + b"}", 0, "not valid JSON"),
        (b'{"w": {}, "w": {}}', 0, "repeats the name.*'w'"),
        (b'{"w": {"dtype": "F32", "dtype": "F16"}}', 0, "repeats the name.*'dtype'"),
    ],
)
def test_hostile_header_is_refused_naming_the_file(
    tmp_path: Path, write_safetensors: Write, header: Any, data: int, message: str
) -> None:
    path = write_safetensors(tmp_path / "bad.safetensors", header, bytes(data))
    with pytest.raises(SourceError, match=message) as caught:
        read_safetensors(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "too short"),
        (b"\x02\x00\x00", "too short"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "allowed"),
        (struct.pack("<Q", (1 << 64) - 1), "allowed"),
        (struct.pack("<Q", 100) + b"{}", "truncated inside its header"),
    ],
)
def test_damaged_prefix_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=message):
        read_safetensors(path)


def test_absent_file_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nothing\.safetensors: cannot be read"):
        read_safetensors(tmp_path / "nothing.safetensors")


def test_values_of_every_dtype_equal_the_library(tmp_path: Path) -> None:
    raw = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensors = {
        name: (raw % 2 if name == "BOOL" else raw.clone()).view(dtype).reshape(2, -1) for name, dtype in DTYPES.items()
    }
    path = tmp_path / "all.safetensors"
    save_file(tensors, path)
    handles = read_safetensors(path)
    for name, expected in load_file(path).items():
        value = handles[name].load()
        assert value.dtype == expected.dtype and handles[name].stored == name
        assert torch.equal(value.view(torch.uint8), expected.view(torch.uint8))
        assert handles[name].nbytes == 512
    assert torch.equal(handles["I32"].rows(1, 2), tensors["I32"][1:2])


def test_unaligned_data_is_read_right(tmp_path: Path, write_safetensors: Write) -> None:
    values = torch.arange(4, dtype=torch.float32).reshape(2, 2)
    header = json.dumps(GOOD).encode()
    header += b" " * ((5 - len(header)) % 8)
    path = write_safetensors(tmp_path / "odd.safetensors", header, values.numpy().tobytes())
    handle = read_safetensors(path)["w"]
    assert handle.offset % 4 != 0
    assert torch.equal(handle.load(), values)
    assert torch.equal(handle.rows(1, 2), values[1:])


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    path = tmp_path / "edge.safetensors"
    save_file({"empty": torch.empty(0, 3), "scalar": torch.tensor(5.0), "w": torch.ones(2)}, path)
    handles = read_safetensors(path)
    assert handles["empty"].load().shape == (0, 3)
    assert handles["empty"].rows(0, 4).shape == (0, 3)
    assert handles["scalar"].load().item() == 5.0
    assert handles["w"].rows(1, 1).shape == (0,)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(2)}, path)
    before = path.read_bytes()
    read_safetensors(path)["w"].load().zero_()
    assert path.read_bytes() == before


def test_file_cut_after_opening_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(1024)}, path)
    handle = read_safetensors(path)["w"]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match=r"w\.safetensors: cannot map"):
        handle.load()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3) | JSON, size=st.integers(0, 64))
@example(header=GOOD, size=16)
def test_any_header_loads_or_is_refused(tmp_path: Path, write_safetensors: Write, header: Any, size: int) -> None:
    path = write_safetensors(tmp_path / "fuzz.safetensors", header, bytes(size))
    try:
        handles = read_safetensors(path)
    except SourceError as error:
        assert "fuzz.safetensors" in str(error)
        return
    assert sum(handle.nbytes for handle in handles.values()) == size
    for handle in handles.values():
        assert tuple(handle.load().shape) == handle.shape


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=64))
def test_any_bytes_load_or_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw)
    try:
        read_safetensors(path)
    except SourceError as error:
        assert "fuzz.safetensors" in str(error)
