"""GGUF files: header, metadata and tensor table, checked before use; tensors dequantized one at a time.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package supplies
the block layouts and the dequantization; the header is walked here because a vocabulary's hundreds of thousands of
strings need only be stepped over, and because a hostile or truncated file must be named as such.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType

from inferencex.convert.source.safetensors_file import map_tensor
from inferencex.formats.errors import SourceError

Scalar = int | float | bool | str

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN: Mapping[GgmlType, torch.dtype] = {
    GgmlType.F32: torch.float32,
    GgmlType.F16: torch.float16,
    GgmlType.BF16: torch.bfloat16,
    GgmlType.F64: torch.float64,
    GgmlType.I8: torch.int8,
    GgmlType.I16: torch.int16,
    GgmlType.I32: torch.int32,
    GgmlType.I64: torch.int64,
}
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufHandle:
    """A tensor of a GGUF file; `shape` is outermost axis first, `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    path: Path
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        """As stored for plain types, float32 for block-quantized ones."""
        return _PLAIN.get(self.type, torch.float32)

    @property
    def stored(self) -> str:
        """Name of the GGML type."""
        return self.type.name

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    def load(self) -> torch.Tensor:
        """Return the tensor: a memory-mapped view when stored plain, else dequantized to float32."""
        return self.rows(0, self.shape[0])

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return rows `start:stop` of the first axis; only these are read and dequantized."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        offset = self.offset + start * (self.nbytes // self.shape[0])
        if self.type in _PLAIN:
            return map_tensor(self.path, offset, shape, _PLAIN[self.type])
        if len(shape) == 1:
            # Elements of a vector share blocks, so it is dequantized whole.
            return self._dequantized(self.offset, self.shape)[start:stop]
        return self._dequantized(offset, shape) if shape[0] else torch.empty(shape, dtype=torch.float32)

    def _dequantized(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        packed = map_tensor(self.path, offset, (*shape[:-1], self._row_bytes), torch.uint8)
        return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), self.type))


@dataclass(frozen=True)
class GgufFile:
    """One GGUF file's header.

    metadata:  scalar values, and arrays of numbers, by key
    strings:   number of entries of each array of strings
    entries:   byte span `(start, stop)` of each key-value pair in the file, in file order
    tensors:   the tensor table
    """

    path: Path
    size: int
    metadata: Mapping[str, Scalar | Sequence[Scalar]]
    strings: Mapping[str, int]
    entries: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, GgufHandle]


def read_gguf(path: Path) -> GgufFile:
    """Check and return the header of `path`.

    Raises SourceError naming the file, and the key or tensor, when the file is not GGUF, is truncated, repeats
    a name, or has a tensor of unknown type, impossible shape, or data outside the file or inside another tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise SourceError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            blob = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror or error})") from error
    with blob:
        try:
            return _Walk(path, blob, size).file()
        except (struct.error, OverflowError, IndexError) as error:
            raise SourceError(f"{path}: truncated inside its header ({size} bytes); fetch the file again") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{path}: the header holds text that is not UTF-8 ({error}); it is damaged") from error


def read_gguf_parts(path: Path) -> tuple[GgufFile, ...]:
    """Read `path`, and if it is one part of a split model (`-00001-of-0000N.gguf`), all parts in order.

    Raises SourceError when a part is absent, out of place, or repeats another part's tensor.
    """
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        part = read_gguf(path)
        count = part.metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            raise SourceError(
                f"{path}: is one of {count} parts but is not named like one; "
                f"expected NAME-00001-of-{count:05d}.gguf, beside the other parts"
            )
        return (part,)
    count = int(match["count"])
    paths = [path.with_name(f"{match['stem']}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise SourceError(f"{path}: parts of this split model are not there: {', '.join(absent)}; fetch them")
    parts = tuple(read_gguf(part) for part in paths)
    found_in: dict[str, str] = {}
    for number, part in enumerate(parts):
        stated = (part.metadata.get("split.no", number), part.metadata.get("split.count", count))
        if stated != (number, count):
            raise SourceError(f"{part.path}: says it is part {stated[0]} of {stated[1]}, expected {number} of {count}")
        for name in part.tensors:
            if name in found_in:
                raise SourceError(f"{part.path}: tensor {name!r} is also in {found_in[name]}")
            found_in[name] = part.path.name
    total = parts[0].metadata.get("split.tensors.count", len(found_in))
    if total != len(found_in):
        raise SourceError(f"{paths[0]}: the parts hold {len(found_in)} tensors, expected {total}")
    return parts


@lru_cache
def _can_dequantize(ggml_type: GgmlType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


class _Walk:
    """A cursor over one header."""

    def __init__(self, path: Path, blob: mmap.mmap, size: int) -> None:
        self.path, self.blob, self.size = path, blob, size
        self.position = 4

    def file(self) -> GgufFile:
        version, tensor_count, entry_count = self.take("IQQ")
        if version not in _VERSIONS:
            raise SourceError(f"{self.path}: GGUF version {version} is not supported, expected 2 or 3 (little-endian)")
        metadata: dict[str, Scalar | Sequence[Scalar]] = {}
        strings: dict[str, int] = {}
        entries: dict[str, tuple[int, int]] = {}
        for _ in range(entry_count):
            start = self.position
            key = self.text()
            if key in entries:
                raise SourceError(f"{self.path}: repeats the metadata key {key!r}")
            (kind,) = self.take("I")
            if kind == _ARRAY:
                self.array(key, metadata, strings)
            else:
                metadata[key] = self.scalar(key, kind)
            entries[key] = (start, self.position)
        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise SourceError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        base = -(-self.position // alignment) * alignment
        return GgufFile(self.path, self.size, metadata, strings, entries, self.tensors(infos, base, alignment))

    def take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + layout, self.blob, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        start, stop = self.position, self.position + length
        if stop > self.size:
            raise SourceError(f"{self.path}: a string at byte {start} runs past the end of the file; it is truncated")
        self.position = stop
        return self.blob[start:stop].decode("utf-8")

    def scalar(self, key: str, kind: int) -> Scalar:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALAR_FORMATS:
            raise SourceError(f"{self.path}: metadata key {key!r} has the unknown value type {kind}")
        return self.take(_SCALAR_FORMATS[kind])[0]

    def array(self, key: str, metadata: dict[str, Scalar | Sequence[Scalar]], strings: dict[str, int]) -> None:
        kind, count = self.take("IQ")
        if kind in _SCALAR_FORMATS:
            if count > self.size:
                raise SourceError(f"{self.path}: metadata key {key!r} claims {count} values; the file is damaged")
            metadata[key] = self.take(f"{count}{_SCALAR_FORMATS[kind]}")
        elif kind == _STRING:
            position, unpack = self.position, struct.Struct("<Q").unpack_from
            for _ in range(count):
                position += 8 + unpack(self.blob, position)[0]
            self.position = position
            strings[key] = count
        else:
            raise SourceError(f"{self.path}: metadata key {key!r} is an array of the unsupported type {kind}")

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text()
        (rank,) = self.take("I")
        if rank > 8:
            raise SourceError(f"{self.path}: tensor {name!r} claims {rank} axes; the file is damaged")
        # GGML counts axes innermost first.
        shape = tuple(reversed(self.take(f"{rank}Q"))) or (1,)
        kind, offset = self.take("IQ")
        return name, shape, kind, offset

    def tensors(
        self, infos: Sequence[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
    ) -> dict[str, GgufHandle]:
        handles: dict[str, GgufHandle] = {}
        for name, shape, kind, offset in infos:
            where = f"{self.path}: tensor {name!r}"
            if name in handles:
                raise SourceError(f"{where} is listed twice")
            if kind not in gguf.GGML_QUANT_SIZES:
                raise SourceError(f"{where} has the unknown GGML type {kind}; upgrade the gguf package")
            ggml_type = GgmlType(kind)
            if ggml_type not in _PLAIN and not _can_dequantize(ggml_type):
                raise SourceError(f"{where} has GGML type {ggml_type.name}, which gguf cannot dequantize")
            if 0 in shape:
                raise SourceError(f"{where} has the empty shape {shape}")
            block = gguf.GGML_QUANT_SIZES[ggml_type][0]
            if shape[-1] % block:
                raise SourceError(f"{where}: rows of {shape[-1]} are not whole {ggml_type.name} blocks of {block}")
            if offset % alignment:
                raise SourceError(f"{where}: its offset {offset} is not a multiple of the alignment {alignment}")
            handles[name] = GgufHandle(name, shape, ggml_type, self.path, base + offset)
        stop, before = base, ""
        for handle in sorted(handles.values(), key=lambda handle: handle.offset):
            if handle.offset < stop:
                raise SourceError(f"{self.path}: tensor {handle.name!r} overlaps {before!r}")
            stop, before = handle.offset + handle.nbytes, handle.name
            if stop > self.size:
                raise SourceError(
                    f"{self.path}: truncated: tensor {handle.name!r} ends at byte {stop}, "
                    f"but the file has {self.size}; fetch the file again"
                )
        return handles
