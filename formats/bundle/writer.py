"""Writing a bundle: tensors streamed into weight files, then graph and side files, then put in place at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import onnx_ir as ir

from inferencex.formats.bundle.layout import (
    GRAPH_FILE,
    MANIFEST_FILE,
    MAX_GRAPH_SIZE,
    MAX_SHARD_SIZE,
    REPORT_FILES,
    check_file_name,
    is_reserved,
)
from inferencex.formats.bundle.manifest import FileRecord, JsonObject, Manifest, TensorQuantization
from inferencex.formats.bundle.origins import WeightOrigin
from inferencex.formats.bundle.shards import Chunks, ShardWriter, StoredTensor
from inferencex.formats.bundle.staging import Staging, check_destination, check_disk_space
from inferencex.formats.dtypes import DataType, is_packed
from inferencex.formats.errors import BundleError
from inferencex.formats.packing import QuantizedTensor, pack_int4

MAX_INLINE_BYTES = 1024
"""Constants up to this size stay inside `model.onnx`; larger ones are stored beside it like weights."""


class BundleWriter:
    """Writes one bundle; use as a context manager, in this order.

    1. `add_tensor` / `add_quantized`, each tensor once, in any order; nothing is kept in memory
    2. `write_graph`
    3. `add_side_file`
    4. `seal`, after which `staged` can be opened as a bundle, to compare it with the source
    5. `add_report`
    6. `commit`

    Leaving the context without `commit`, for whatever reason, leaves the destination as it was. All methods raise
    BundleError.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool = False,
        source: Path | None = None,
        expected_bytes: int = 0,
        max_shard_size: int = MAX_SHARD_SIZE,
    ) -> None:
        """Check the destination and the disk; `source` is a file or folder that must not be written over."""
        check_destination(path, overwrite=overwrite, source=source)
        check_disk_space(path, expected_bytes)
        self._path = path
        self._overwrite = overwrite
        self._source = source
        self._max_shard_size = max_shard_size
        self._quantization: dict[str, TensorQuantization] = {}
        self._made_of: dict[str, WeightOrigin] = {}
        self._stored: dict[str, StoredTensor] | None = None
        self._bound: list[ir.ExternalTensor] = []
        self._graph_written = False
        self._sealed = False

    def __enter__(self) -> Self:
        with self._written():
            self._staging = Staging(self._path)
        self._shards = ShardWriter(self._staging.path, self._max_shard_size)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._open:
            return
        self._open = False
        self._shards.close()
        self._staging.discard()
        if kind is None:
            raise BundleError(f"{self._path}: the bundle was left without being committed, and discarded")

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Say what a failure to write means for the bundle."""
        try:
            yield
        except OSError as error:
            where = error.filename or self._path
            raise BundleError(
                f"{where}: cannot be written: {error.strerror or error}; {self._path} is as it was before"
            ) from error

    @property
    def staged(self) -> Path:
        """The folder being written, hidden beside the destination."""
        return self._staging.path

    def add_tensor(self, name: str, data: Chunks, dtype: DataType | ir.DataType, shape: Iterable[int]) -> None:
        """Store a tensor of the graph under the name of its initializer.

        `data` is an array, or an iterable of arrays that follow each other in row-major order; its elements have the
        type `dtypes.storage_dtype(dtype)` (packed types: uint8, packed as `packing.pack_int4` does).
        """
        if self._stored is not None:
            raise BundleError(f"tensor {name!r}: the graph is written, no tensor can be added")
        with self._written():
            self._shards.add(name, data, DataType(dtype), tuple(shape))

    def add_quantized(self, name: str, tensor: QuantizedTensor, *, method: str) -> TensorQuantization:
        """Store a quantized weight as `name`, `name.scales`, and what else it has.

        That is `name.zero_points` when asymmetric, `name.tensor_scale` where its scales have one.
        """
        entry = TensorQuantization(
            bits=tensor.bits,
            group_size=tensor.group_size,
            symmetric=tensor.symmetric,
            shape=tensor.shape,
            scales=f"{name}.scales",
            zero_points=None if tensor.zero_points is None else f"{name}.zero_points",
            method=method,
            number=tensor.number,
            tensor_scale=None if tensor.tensor_scale is None else f"{name}.tensor_scale",
        )
        self.add_tensor(name, tensor.values, tensor.dtype, tensor.stored_shape(tensor.shape))
        self.add_tensor(entry.scales, tensor.scales, tensor.scale_dtype, tensor.scale_shape)
        if tensor.zero_points is not None and entry.zero_points is not None:
            shape = tensor.stored_shape(tensor.scale_shape)
            self.add_tensor(entry.zero_points, tensor.zero_points, tensor.dtype, shape)
        if tensor.tensor_scale is not None and entry.tensor_scale is not None:
            self.add_tensor(entry.tensor_scale, tensor.tensor_scale, DataType.FLOAT, ())
        self._quantization[name] = entry
        return entry

    def add_origin(self, name: str, origin: WeightOrigin) -> None:
        """Record which parameters of the checkpoint the tensor `name` is made of."""
        self._made_of[name] = origin

    def write_graph(self, model: ir.Model) -> None:
        """Write `model.onnx`; its initializers are bound to the stored tensors of the same name.

        The model is changed in place: initializers become external tensors with their logical type and shape.
        Constants of more than `MAX_INLINE_BYTES` that were not stored yet are stored first. Every stored tensor must
        be an initializer, and every initializer must be stored or hold a constant.
        """
        if self._stored is not None:
            raise BundleError("the graph is already written")
        initializers = _initializers(model)
        for name, value in initializers.items():
            constant = value.const_value
            if constant is not None and constant.nbytes > MAX_INLINE_BYTES and not self._shards.holds(name):
                array = constant.numpy()
                dtype = DataType(constant.dtype)
                data = pack_int4(array.view(np.uint8)) if is_packed(dtype) else array
                self.add_tensor(name, data, dtype, array.shape)
        unfilled = [
            name for name, value in initializers.items() if value.const_value is None and not self._shards.holds(name)
        ]
        if unfilled:
            raise BundleError(f"{len(unfilled)} initializers were never stored: {_listed(unfilled)}")
        with self._written():
            self._stored = self._shards.finish()
        unused = sorted(set(self._stored) - set(initializers))
        if unused:
            raise BundleError(f"{len(unused)} stored tensors are not initializers of the graph: {_listed(unused)}")
        for name, stored in self._stored.items():
            self._bound.append(_bind(initializers[name], stored, self._staging.path))
        data = ir.serde.serialize_model(model).SerializeToString(deterministic=True)
        if len(data) > MAX_GRAPH_SIZE:
            raise BundleError(f"{GRAPH_FILE}: {len(data)} bytes, the limit of the format is {MAX_GRAPH_SIZE}")
        with self._written():
            (self._staging.path / GRAPH_FILE).write_bytes(data)
        self._graph_written = True

    def add_side_file(self, name: str, content: Path | bytes) -> None:
        """Store a file of the source (tokenizer, config, chat template, ...) byte for byte under `name`."""
        check_file_name(name, str(self._path))
        target = self._staging.path / name
        if is_reserved(name) or target.exists():
            raise BundleError(f"{self._path}: the name {name!r} is taken; a side file needs its own")
        if self._sealed:
            raise BundleError(f"{self._path}: sealed, the side file {name!r} comes too late")
        data = content if isinstance(content, bytes) else content.read_bytes()
        with self._written():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)

    def seal(self, manifest: Manifest) -> Path:
        """Write `bundle.json`: `manifest` plus every file's size and hash and every tensor's quantization.

        Returns the staged folder, which `Bundle.open` accepts.
        """
        if not self._graph_written or self._sealed:
            raise BundleError(f"{self._path}: a bundle is sealed once, after its graph is written")
        folder = self._staging.path
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        records = {file.relative_to(folder).as_posix(): _record(file) for file in files}
        complete = replace(
            manifest,
            files=records,
            quantization={**manifest.quantization, **self._quantization},
            made_of={**manifest.made_of, **self._made_of},
        )
        data = complete.to_bytes()
        with self._written():
            (folder / MANIFEST_FILE).write_bytes(data)
        self._sealed = True
        return folder

    def add_report(self, report: JsonObject, markdown: str, plot: str | None = None) -> None:
        """Write `report.json`, `report.md` and, if there is one, `report.svg`; they hold timings and are not hashed."""
        texts = (json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False) + "\n", markdown, plot)
        for name, text in zip(REPORT_FILES, texts, strict=True):
            if text is not None:
                with self._written():
                    (self._staging.path / name).write_text(text, encoding="utf-8")

    def abandon(self) -> None:
        """Discard what was written, in favour of another bundle for the same place."""
        self._open = False
        self._shards.close()
        self._staging.discard()

    def commit(self) -> Path:
        """Put the bundle in place, in one step, and return its path."""
        if not self._sealed:
            raise BundleError(f"{self._path}: a bundle is committed after it is sealed")
        # Much can have happened to the destination since the conversion began.
        check_destination(self._path, overwrite=self._overwrite, source=self._source)
        with self._written():
            self._staging.commit()
        self._open = False
        for tensor in self._bound:
            tensor.base_dir = self._path
        return self._path


def _initializers(model: ir.Model) -> dict[str, ir.Value]:
    """Return the initializers of the graph and its subgraphs by name."""
    found: dict[str, ir.Value] = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        for name, value in graph.initializers.items():
            if name in found:
                raise BundleError(f"the graph has two initializers named {name!r}")
            found[name] = value
    return found


def _bind(value: ir.Value, stored: StoredTensor, folder: Path) -> ir.ExternalTensor:
    dtype = ir.DataType(stored.dtype)
    tensor = ir.ExternalTensor(
        stored.location,
        stored.offset,
        stored.nbytes,
        dtype,
        shape=ir.Shape(stored.shape),
        name=stored.name,
        base_dir=folder,
    )
    value.const_value = tensor
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(stored.shape)
    return tensor


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown}, ..."
