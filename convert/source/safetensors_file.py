"""Safetensors files: every header is checked in full before any tensor is handed out.

The format: an 8-byte little-endian header length, a JSON object of `name -> {dtype, shape, data_offsets}`
(offsets are in bytes from the end of the header), then the data, which the tensors cover exactly once.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from inferencex.formats.errors import SourceError

# Far above any real header (a 1-trillion-parameter mixture of experts needs about 20 MB), and the limit that the
# safetensors library sets too: a damaged length must not make us read gigabytes as JSON.
MAX_HEADER_BYTES = 100_000_000

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Map `shape` elements of `dtype` at byte `offset` of `path` as a private, copy-on-write tensor.

    Only this tensor's pages are mapped, and they are unmapped with it, so resident memory follows what the
    caller holds. Data that is not aligned to its element size is copied instead.
    Raises SourceError when the file no longer reaches that far.
    """
    if prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    nbytes = prod(shape) * dtype.itemsize
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), offset + nbytes - start, offset=start, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path}: cannot map bytes {offset} to {offset + nbytes} ({error}); "
            "the file changed after it was opened: fetch it again"
        ) from error
    flat = torch.frombuffer(pages, dtype=torch.uint8, offset=offset - start, count=nbytes)
    if offset % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)


@dataclass(frozen=True)
class SafetensorsHandle:
    """A tensor of a safetensors file; `offset` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    stored: str
    path: Path
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """The torch form of `stored`."""
        return DTYPES[self.stored]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def load(self) -> torch.Tensor:
        """Return the tensor as a memory-mapped view."""
        return map_tensor(self.path, self.offset, self.shape, self.dtype)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of the first axis as a memory-mapped view."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        count = max(0, stop - start)
        row = prod(self.shape[1:]) * self.dtype.itemsize
        return map_tensor(self.path, self.offset + start * row, (count, *self.shape[1:]), self.dtype)


def read_safetensors(path: Path) -> dict[str, SafetensorsHandle]:
    """Check the whole header of `path` and return its tensors, in the order of their data.

    Raises SourceError naming the file, and the tensor where there is one, when the file is shorter or longer
    than its header says, or the header is oversized, not JSON, repeats a name, has an unknown dtype, a bad
    shape, or offsets that overlap, leave a hole, or contradict the shape.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise SourceError(f"{path}: {size} bytes is too short for a safetensors file; fetch it again")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise SourceError(
                    f"{path}: the header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed; "
                    "this is not a safetensors file, or it is damaged"
                )
            if 8 + length > size:
                raise SourceError(
                    f"{path}: truncated inside its header: {size} bytes, but the header ends at {8 + length}; "
                    "fetch the file again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    header = parse_object(raw, f"{path}: the header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SourceError(f"{path}: __metadata__ of the header is not an object of strings")
    spans = [_check_entry(path, name, entry) for name, entry in header.items()]
    spans.sort(key=lambda span: (span[1], span[2]))
    position = 0
    handles: dict[str, SafetensorsHandle] = {}
    for handle, begin, end in spans:
        if begin != position:
            problem = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise SourceError(
                f"{path}: tensor {handle.name!r} {problem}: its data starts at byte {begin}, expected {position}"
            )
        position = end
        data_start = 8 + length
        handles[handle.name] = SafetensorsHandle(handle.name, handle.shape, handle.stored, path, data_start + begin)
    expected = 8 + length + position
    if size != expected:
        problem = "truncated" if size < expected else "longer than its header says"
        raise SourceError(f"{path}: {problem}: {size} bytes, expected {expected}; fetch the file again")
    return handles


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse `raw` as one JSON object that repeats no key; `what` names it in errors (SourceError)."""

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = sorted({name for name in names if names.count(name) > 1}) if len(names) < 10_000 else []
            raise SourceError(f"{what} repeats the name(s) {repeated or '(many)'}")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise SourceError(f"{what} is a JSON {type(value).__name__}, expected an object")
    return value


def _is_count(value: object) -> bool:
    # bool is an int in Python, and `true` is no dimension. No file holds 2**63 bytes.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_entry(path: Path, name: str, entry: object) -> tuple[SafetensorsHandle, int, int]:
    """Return the handle (offset unset) and the byte span of one header entry."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{where}: the header entry must hold exactly dtype, shape and data_offsets, found {entry}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SourceError(f"{where}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise SourceError(f"{where}: the shape {shape} is not a list of non-negative 63-bit integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise SourceError(f"{where}: data_offsets {offsets} is not a pair of non-negative 63-bit integers")
    begin, end = offsets
    needed = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise SourceError(
            f"{where}: {dtype} {shape} takes {needed} bytes, but data_offsets {offsets} hold {end - begin}"
        )
    return SafetensorsHandle(name, tuple(shape), dtype, path, 0), begin, end
