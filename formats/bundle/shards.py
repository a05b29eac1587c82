"""Weight files: safetensors written as a stream, one tensor at a time, without knowing what is to come."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.bundle.layout import HEADER_RESERVE, MAX_NAME_LENGTH, TENSOR_ALIGNMENT, shard_name
from inferencex.formats.dtypes import DataType, safetensors_code, storage_dtype, storage_nbytes, storage_shape
from inferencex.formats.errors import BundleError
from inferencex.formats.records import record

Chunks = NDArray[Any] | Iterable[NDArray[Any]]

_COPY_SIZE = 16 << 20


@record(frozen=True)
class StoredTensor:
    """Where a tensor lies. `offset` counts bytes from the start of the file `location`."""

    name: str
    dtype: DataType
    shape: tuple[int, ...]
    location: str
    offset: int
    nbytes: int


class _Shard:
    """One weight file being written: tensors back to back behind the space kept for the header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("w+b")
        self.file.seek(HEADER_RESERVE)
        self.end = HEADER_RESERVE
        self.header: dict[str, object] = {}
        self.header_size = len(b"{}") + 8

    def has_room(self, nbytes: int, entry_size: int, limit: int) -> bool:
        if not self.header:
            return True
        return self.end + nbytes <= limit and self.header_size + entry_size <= HEADER_RESERVE

    def place(self, name: str, dtype: DataType, shape: tuple[int, ...]) -> StoredTensor:
        """Give the next bytes of the file to a tensor; the caller then writes them."""
        nbytes = storage_nbytes(dtype, shape)
        begin = self.end - HEADER_RESERVE
        self.header[name] = _header_entry(dtype, shape, begin)
        self.header_size += _entry_size(name, dtype, shape)
        stored = StoredTensor(name, dtype, shape, self.path.name, self.end, nbytes)
        self.end += nbytes
        return stored

    def close(self) -> None:
        """Write the header and make the file durable."""
        text = json.dumps(self.header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (HEADER_RESERVE - 8 - len(text))
        self.file.seek(0)
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()


class ShardWriter:
    """Writes tensors into numbered weight files of at most `max_shard_size` bytes.

    safetensors permits no gaps between tensors, so a tensor whose size is not a multiple of 64 bytes would misalign
    all that follow. Such tensors wait in a file of their own and go to the end, those divisible by the larger
    powers of two first: every tensor then starts at a multiple of 64, or of the power of two in its own size.
    """

    def __init__(self, directory: Path, max_shard_size: int) -> None:
        self._directory = directory
        self._max_shard_size = max_shard_size
        self._shards: list[_Shard] = []
        self._odd_file: IO[bytes] | None = None
        self._odd_path = directory / "weights-odd.partial"
        self._odd: dict[str, StoredTensor] = {}
        self._stored: dict[str, StoredTensor] = {}

    def holds(self, name: str) -> bool:
        """Whether a tensor of this name was added."""
        return name in self._stored or name in self._odd

    def add(self, name: str, data: Chunks, dtype: DataType, shape: tuple[int, ...]) -> None:
        """Write one tensor; raises BundleError when name, type or size are not what was said."""
        _check_name(name)
        if self.holds(name):
            raise BundleError(f"tensor {name!r} is stored twice; every tensor of a bundle needs its own name")
        safetensors_code(dtype)
        nbytes = storage_nbytes(dtype, shape)
        if nbytes % TENSOR_ALIGNMENT == 0:
            shard = self._shard_for(name, dtype, shape)
            self._stored[name] = shard.place(name, dtype, shape)
            _write_chunks(shard.file, name, data, dtype, nbytes)
        else:
            if self._odd_file is None:
                self._odd_file = self._odd_path.open("w+b")
            offset = self._odd_file.tell()
            self._odd[name] = StoredTensor(name, dtype, shape, self._odd_path.name, offset, nbytes)
            _write_chunks(self._odd_file, name, data, dtype, nbytes)

    def finish(self) -> dict[str, StoredTensor]:
        """Write the waiting tensors, close and name the files; return where every tensor lies."""
        self._place_odd()
        if not self._shards:
            return {}
        names: dict[str, str] = {}
        for index, shard in enumerate(self._shards, start=1):
            if not shard.file.closed:
                shard.close()
            names[shard.path.name] = shard_name(index, len(self._shards))
            shard.path.rename(self._directory / names[shard.path.name])
        self._shards = []
        return {name: replace(stored, location=names[stored.location]) for name, stored in self._stored.items()}

    def close(self) -> None:
        """Close the files without finishing them; for an abandoned bundle."""
        for shard in self._shards:
            shard.file.close()
        if self._odd_file is not None:
            self._odd_file.close()

    def _place_odd(self) -> None:
        if self._odd_file is None:
            return
        for odd in sorted(self._odd.values(), key=lambda tensor: -_largest_power_of_two_in(tensor.nbytes)):
            shard = self._shard_for(odd.name, odd.dtype, odd.shape)
            self._stored[odd.name] = shard.place(odd.name, odd.dtype, odd.shape)
            self._odd_file.seek(odd.offset)
            left = odd.nbytes
            while left:
                piece = self._odd_file.read(min(left, _COPY_SIZE))
                shard.file.write(piece)
                left -= len(piece)
        self._odd_file.close()
        self._odd_path.unlink()
        self._odd_file, self._odd = None, {}

    def _shard_for(self, name: str, dtype: DataType, shape: tuple[int, ...]) -> _Shard:
        nbytes, entry_size = storage_nbytes(dtype, shape), _entry_size(name, dtype, shape)
        if self._shards:
            shard = self._shards[-1]
            if shard.has_room(nbytes, entry_size, self._max_shard_size):
                return shard
            shard.close()
        shard = _Shard(self._directory / f"weights-{len(self._shards) + 1:05d}.partial")
        self._shards.append(shard)
        return shard


def _write_chunks(file: IO[bytes], name: str, data: Chunks, dtype: DataType, nbytes: int) -> None:
    expected = storage_dtype(dtype)
    written = 0
    for chunk in (data,) if isinstance(data, np.ndarray) else data:
        if chunk.dtype != expected:
            raise BundleError(f"tensor {name!r}: a chunk is {chunk.dtype}, expected {expected} for {dtype.name}")
        if written + chunk.nbytes <= nbytes:
            # Not every type of ml_dtypes exports a buffer, its bytes do.
            file.write(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
        written += chunk.nbytes
    if written != nbytes:
        raise BundleError(f"tensor {name!r}: {written} bytes were given, its type and shape need {nbytes}")


def _check_name(name: str) -> None:
    if not name or name == "__metadata__" or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise BundleError(f"{name[:80]!r} cannot name a tensor: expected 1 to {MAX_NAME_LENGTH} printable characters")


def _header_entry(dtype: DataType, shape: tuple[int, ...], begin: int) -> dict[str, object]:
    return {
        "dtype": safetensors_code(dtype),
        "shape": list(storage_shape(dtype, shape)),
        "data_offsets": [begin, begin + storage_nbytes(dtype, shape)],
    }


def _entry_size(name: str, dtype: DataType, shape: tuple[int, ...]) -> int:
    """Bytes a tensor takes in the header, with offsets as long as they can get."""
    entry = {name: _header_entry(dtype, shape, 10**15)}
    return len(json.dumps(entry, separators=(",", ":"), ensure_ascii=False).encode())


def _largest_power_of_two_in(nbytes: int) -> int:
    return nbytes & -nbytes
