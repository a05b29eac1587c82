from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferencex.convert.source.gguf_file import read_gguf, read_gguf_parts
from inferencex.formats.errors import SourceError

Type = gguf.GGMLQuantizationType
QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ4_NL]


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_bytes(
    tensors: list[tuple[str, list[int], int, int]],
    data: int,
    *,
    entries: list[bytes] | None = None,
    version: int = 3,
) -> bytes:
    """A GGUF file of any table, right or wrong; each tensor is (name, dimensions innermost first, type, offset)."""
    entries = entries or []
    raw = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    for name, dims, kind, offset in tensors:
        raw += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return raw + bytes(-len(raw) % 32) + bytes(data)


GOOD = ("w", [8, 4], 0, 0)


def test_reads_what_the_gguf_package_wrote(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path)
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 2
    assert file.strings["tokenizer.ggml.tokens"] == 96
    assert list(file.tensors) == list(written)
    for name, value in written.items():
        handle = file.tensors[name]
        assert (handle.shape, handle.dtype, handle.stored) == (value.shape, torch.float32, "F32")
        assert np.array_equal(handle.load().numpy(), value)
        assert np.array_equal(handle.rows(3, 9).numpy(), value[3:9])


@pytest.mark.parametrize("ggml_type", QUANTIZED, ids=lambda ggml_type: ggml_type.name)
def test_blocks_are_dequantized_as_the_gguf_package_does(tmp_path: Path, ggml_type: gguf.GGMLQuantizationType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    packed = np.random.default_rng(0).integers(0, 100, (3, 5, 2 * size), dtype=np.uint8)
    path = tmp_path / "blocks.gguf"
    raw = gguf_bytes([("w", [2 * block, 5, 3], int(ggml_type), 0)], 0) + packed.tobytes()
    path.write_bytes(raw)
    handle = read_gguf(path).tensors["w"]
    expected = gguf.quants.dequantize(packed, ggml_type)
    assert handle.shape == (3, 5, 2 * block) and handle.stored == ggml_type.name and handle.nbytes == packed.nbytes
    value = handle.load()
    assert value.dtype == torch.float32 and np.array_equal(value.numpy(), expected, equal_nan=True)
    assert np.array_equal(handle.rows(1, 3).numpy(), expected[1:3], equal_nan=True)
    assert handle.rows(2, 2).shape == (0, 5, 2 * block)


def test_half_types_are_kept_as_stored(tmp_path: Path) -> None:
    values = torch.arange(16.0).reshape(2, 8)
    for kind, dtype in ((Type.F16, torch.float16), (Type.BF16, torch.bfloat16)):
        path = tmp_path / f"{kind.name}.gguf"
        raw = values.to(dtype).view(torch.uint8).numpy().tobytes()
        path.write_bytes(gguf_bytes([("w", [8, 2], int(kind), 0)], 0) + raw)
        assert torch.equal(read_gguf(path).tensors["w"].load(), values.to(dtype))


def test_vector_of_blocks(tmp_path: Path) -> None:
    packed = np.random.default_rng(0).integers(0, 100, (1, 68), dtype=np.uint8)
    path = tmp_path / "vector.gguf"
    path.write_bytes(gguf_bytes([("v", [64], int(Type.Q8_0), 0)], 0) + packed.tobytes())
    handle = read_gguf(path).tensors["v"]
    expected = gguf.quants.dequantize(packed, Type.Q8_0)[0]
    assert np.array_equal(handle.load().numpy(), expected, equal_nan=True)
    assert np.array_equal(handle.rows(3, 50).numpy(), expected[3:50], equal_nan=True)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF", "truncated inside its header"),
        (gguf_bytes([GOOD], 128, version=1), "version 1"),
        (gguf_bytes([GOOD], 128, version=0x03000000), "version"),
        (gguf_bytes([GOOD], 127), "truncated: tensor 'w' ends at byte"),
        (gguf_bytes([GOOD, GOOD], 128), "'w' is listed twice"),
        (gguf_bytes([GOOD, ("v", [8], 0, 96)], 128), "'v' overlaps 'w'"),
        (gguf_bytes([("w", [8, 4], 0, 4)], 132), "not a multiple of the alignment"),
        (gguf_bytes([("w", [8, 4], 4, 0)], 128), "unknown GGML type 4"),
        (gguf_bytes([("w", [8, 4], 999, 0)], 128), "unknown GGML type 999"),
        (gguf_bytes([("w", [8, 4], int(Type.Q8_1), 0)], 128), "cannot dequantize|not whole"),
        (gguf_bytes([("w", [33, 1], int(Type.Q8_0), 0)], 128), "not whole Q8_0 blocks"),
        (gguf_bytes([("w", [0, 4], 0, 0)], 128), "empty shape"),
        (gguf_bytes([("w", [1] * 9, 0, 0)], 128), "9 axes"),
        (gguf_bytes([("w", [1 << 63, 1 << 63], 0, 0)], 128), "truncated"),
        (gguf_bytes([], 0, entries=[text("k") + struct.pack("<IB", 99, 0)]), "unknown value type 99"),
        (gguf_bytes([], 0, entries=[text("k") + struct.pack("<IB", 0, 0)] * 2), "repeats the metadata key 'k'"),
        (gguf_bytes([], 0, entries=[text("k") + struct.pack("<IIQ", 9, 9, 1)]), "unsupported type 9"),
        (gguf_bytes([], 0, entries=[text("k") + struct.pack("<IIQ", 9, 0, 1 << 60)]), "claims"),
        (gguf_bytes([], 0, entries=[text("k") + struct.pack("<IIQQ", 9, 8, 1 << 60, 1 << 63)]), "truncated"),
        (gguf_bytes([], 0, entries=[struct.pack("<Q", 1 << 62)]), "runs past the end"),
        (gguf_bytes([], 0, entries=[struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 0)]), "not UTF-8"),
        (
            gguf_bytes([GOOD], 128, entries=[text("general.alignment") + struct.pack("<II", 4, 24)]),
            "general.alignment is 24",
        ),
    ],
)
def test_hostile_file_is_refused_naming_it(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=message) as caught:
        read_gguf(path)
    assert "bad.gguf" in str(caught.value)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_file_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    entry = text("general.name") + struct.pack("<I", 8) + text("x")
    words = text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    raw = bytearray(gguf_bytes([GOOD, ("v", [8], 0, 128)], 160, entries=[entry, words]))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(4, len(raw) - 161))] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 127, 255]))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) // 2, len(raw) - 1]))]))
    try:
        file = read_gguf(path)
    except SourceError as error:
        assert "fuzz.gguf" in str(error)
        return
    for handle in file.tensors.values():
        assert tuple(handle.load().shape) == handle.shape


def test_parts_of_a_split_model_are_one(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    written = write_gguf(tmp_path / "model.gguf", split_max_tensors=7)
    paths = sorted(tmp_path.glob("model-*.gguf"))
    assert len(paths) == 3
    for path in paths:
        parts = read_gguf_parts(path)
        assert {name for part in parts for name in part.tensors} == set(written)
        assert [part.path for part in parts] == paths


def test_split_model_with_an_absent_swapped_or_renamed_part(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    write_gguf(tmp_path / "model.gguf", split_max_tensors=7)
    first, second, third = sorted(tmp_path.glob("model-*.gguf"))
    content = second.read_bytes(), third.read_bytes()
    third.unlink()
    with pytest.raises(SourceError, match=r"not there: model-00003-of-00003\.gguf"):
        read_gguf_parts(first)
    second.write_bytes(content[1])
    third.write_bytes(content[0])
    with pytest.raises(SourceError, match=r"model-00002.*says it is part 2 of 3, expected 1 of 3"):
        read_gguf_parts(first)
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(first.read_bytes())
    with pytest.raises(SourceError, match=r"lone\.gguf: is one of 3 parts"):
        read_gguf_parts(lone)
