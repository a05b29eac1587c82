"""Reading the header of a weight file from someone we do not trust."""

from __future__ import annotations

import math
import os
from pathlib import Path

from inferencex.formats.bundle.layout import MAX_ELEMENTS, MAX_HEADER_SIZE, MAX_NAME_LENGTH, MAX_RANK
from inferencex.formats.bundle.manifest import parse_json_object
from inferencex.formats.dtypes import CODE_ITEMSIZES
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

_FIELDS = {"dtype", "shape", "data_offsets"}


@record(frozen=True)
class HeaderEntry:
    """One tensor of a weight file: safetensors code, stored shape, offset from the file's start, bytes."""

    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Return the tensors of a safetensors file by name, in the order of their data.

    Raises BundleError, naming file and tensor, unless the header is well-formed and its tensors tile the rest of the
    file exactly: no overlap, no gap, nothing beyond the end.
    """
    where = path.name
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise BundleError(f"{where}: {size} bytes is too short for a safetensors file; it is truncated")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_SIZE:
            raise BundleError(f"{where}: a header of {length} bytes, the limit is {MAX_HEADER_SIZE}")
        if 8 + length > size:
            raise BundleError(f"{where}: the header needs {8 + length} bytes, the file has {size}; it is truncated")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise BundleError(f"{where}: the header does not start with '{{'; this is not a safetensors file")
    document = parse_json_object(text.rstrip(b" "), f"{where}: header", MAX_HEADER_SIZE)
    document.pop("__metadata__", None)
    data_begin = 8 + length
    entries: dict[str, HeaderEntry] = {}
    for name, entry in document.items():
        try:
            entries[name] = _entry(name, entry, data_begin)
        except BundleError as error:
            raise BundleError(f"{where}: tensor {name[:80]!r}: {error}") from None
    ordered = sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    end = data_begin
    for name, entry in ordered:
        if entry.offset < end:
            raise BundleError(f"{where}: tensor {name!r} overlaps the one before it by {end - entry.offset} bytes")
        if entry.offset > end:
            raise BundleError(f"{where}: a gap of {entry.offset - end} bytes in front of tensor {name!r}")
        end += entry.nbytes
    if end != size:
        raise BundleError(
            f"{where}: its tensors end at byte {end}, the file has {size} bytes; it is "
            f"{'truncated' if end > size else 'followed by bytes that belong to nothing'}"
        )
    return dict(ordered)


def _entry(name: str, entry: object, data_begin: int) -> HeaderEntry:
    if not name or len(name) > MAX_NAME_LENGTH:
        raise BundleError(f"names have 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise BundleError("expected exactly dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in CODE_ITEMSIZES:
        raise BundleError(f"type {str(code)[:40]!r} is not one of {', '.join(sorted(CODE_ITEMSIZES))}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_size, shape)):
        raise BundleError(f"shape {str(shape)[:80]} is not a list of up to {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise BundleError(f"data_offsets {str(offsets)[:80]} are not two positions in a file")
    nbytes = math.prod(shape) * CODE_ITEMSIZES[code]
    if offsets[1] - offsets[0] != nbytes:
        raise BundleError(f"{code} {shape} needs {nbytes} bytes, its data_offsets span {offsets[1] - offsets[0]}")
    return HeaderEntry(code, tuple(shape), data_begin + offsets[0], nbytes)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS  # a truth is an int to isinstance
