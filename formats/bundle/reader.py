"""Opening a bundle: everything is checked before anything is believed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.bundle.header import read_header
from inferencex.formats.bundle.initializers import (
    QuantizedUse,
    UnpackedBits,
    match_initializers,
    quantized_uses,
)
from inferencex.formats.bundle.layout import GRAPH_FILE, MANIFEST_FILE, MAX_GRAPH_SIZE, MAX_MANIFEST_SIZE, is_shard_name
from inferencex.formats.bundle.manifest import FileRecord, Manifest, parse_manifest
from inferencex.formats.bundle.mapped_file import MappedFile
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.dtypes import DataType, storage_dtype, storage_shape
from inferencex.formats.errors import BundleError, QuantizationError
from inferencex.formats.graph import Graph, read_graph
from inferencex.formats.packing import QuantizedTensor, group_count

if TYPE_CHECKING:
    import onnx_ir as ir


class Bundle:
    """A bundle on disk, checked; made by `Bundle.open`.

    path:      the bundle's folder
    manifest:  what `bundle.json` says
    graph:     the IR graph to read from; what its initializers hold comes from `tensor`
    stored:    every tensor of the weight files by name: type, shape, file, offset
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        proto: onnx.ModelProto,
        graph: Graph,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.graph = graph
        self.stored = stored
        self._proto = proto
        self._files: dict[str, MappedFile] = {}
        self._tensors: dict[str, NDArray[Any]] = {}

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Self:
        """Open the bundle in the folder `path`.

        Raises BundleError, naming the culprit, unless every file has its size (with `verify`, its hash), every
        initializer of the graph is filled by the tensor of its name, every stored tensor is used, every value a node
        uses is made, quantized weights fit their scales and zero points, and every scale is finite.
        """
        try:
            return cls._open(path, verify=verify)
        except OSError as error:
            raise BundleError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error
        except BundleError as error:
            if str(path) in str(error):
                raise
            raise BundleError(f"{path}/{error}") from error  # what checks a part knows only the file's name

    @classmethod
    def _open(cls, path: Path, *, verify: bool) -> Self:
        if not path.is_dir():
            raise BundleError(f"{path}: is not a folder; a bundle is the folder that inferencex-convert writes")
        manifest = parse_manifest(_read(path, MANIFEST_FILE, MAX_MANIFEST_SIZE))
        for name, record in manifest.files.items():
            _check_file(path, name, record, verify=verify)
        if GRAPH_FILE not in manifest.files:
            raise BundleError(f"{path / MANIFEST_FILE}: lists no {GRAPH_FILE}; the bundle is incomplete")
        shards = {name: read_header(path / name) for name in sorted(manifest.files) if is_shard_name(name)}
        proto = _parse_graph(path)
        try:
            graph = read_graph(proto)
        except BundleError as error:
            raise BundleError(f"{path / GRAPH_FILE}: {error}") from error
        bundle = cls(path, manifest, proto, graph, match_initializers((graph, *graph.inner), shards))
        bundle._check_quantization()
        return bundle

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Every file that the manifest lists, with size and hash."""
        return self.manifest.files

    @cached_property
    def model(self) -> ir.Model:
        """The IR graph to edit and to serialize; its initializers read from the weight files when asked for values.

        This needs the package onnx-ir, which comes with the extra `convert`; the runtime reads `graph`.
        """
        import onnx_ir as ir

        try:
            model = ir.serde.deserialize_model(self._proto)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError) as error:
            raise BundleError(f"{self.path / GRAPH_FILE}: is not a valid graph: {str(error)[:300]}") from error
        for graph in (model.graph, *model.graph.subgraphs()):
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    value.const_value.base_dir = self.path
        return model

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a stored tensor, memory-mapped and read-only, in its storage type and shape.

        Packed types come as uint8 `[nbytes]`, see `packing.unpack_int4`. Raises BundleError for an unknown name.
        """
        found = self._tensors.get(name)  # whoever checks a tensor asks for it, and whoever compiles it asks again
        if found is None:
            found = self._tensors[name] = self._view(name)
        return found

    def _view(self, name: str) -> NDArray[Any]:
        stored = self.stored.get(name)
        if stored is None:
            raise BundleError(f"{self.path}: no tensor is named {name!r}")
        shape = storage_shape(stored.dtype, stored.shape)
        if stored.nbytes == 0:
            return np.empty(shape, dtype=storage_dtype(stored.dtype))
        data = self._mapped(stored.location)[stored.offset : stored.offset + stored.nbytes]
        return data.view(storage_dtype(stored.dtype)).reshape(shape)

    def mapped_files(self) -> list[MappedFile]:
        """Return the weight files."""
        return [self._file(location) for location in sorted({stored.location for stored in self.stored.values()})]

    def _mapped(self, location: str) -> NDArray[Any]:
        return self._file(location).data

    def _file(self, location: str) -> MappedFile:
        file = self._files.get(location)
        if file is None:
            file = self._files[location] = MappedFile.map(self.path / location)
        return file

    def release(self) -> None:
        """Let the system take back the memory of weights that were read; reading them again brings them back."""
        for file in self._files.values():
            file.release()

    def quantized(self, name: str) -> QuantizedTensor:
        """Return a quantized weight with its scales and zero points, memory-mapped.

        Raises BundleError when the manifest lists no quantized tensor of this name, or one that does not fit.
        """
        entry = self.manifest.quantization.get(name)
        if entry is None:
            raise BundleError(f"{self.path}: {name!r} is not a quantized tensor")
        try:
            tensor = QuantizedTensor(
                values=self.tensor(name),
                scales=self.tensor(entry.scales),
                zero_points=None if entry.zero_points is None else self.tensor(entry.zero_points),
                bits=entry.bits,
                group_size=entry.group_size,
                symmetric=entry.symmetric,
                shape=entry.shape,
                number=entry.number,
                tensor_scale=None if entry.tensor_scale is None else self.tensor(entry.tensor_scale),
            )
        except QuantizationError as error:
            raise BundleError(f"{self.path / MANIFEST_FILE}: quantization of {name!r}: {error}") from error
        if self.stored[name].dtype is not tensor.dtype:
            raise BundleError(
                f"{self.path / MANIFEST_FILE}: quantization of {name!r} says {tensor.dtype.name}, "
                f"{GRAPH_FILE} says {self.stored[name].dtype.name}"
            )
        return tensor

    def _check_quantization(self) -> None:
        scales: set[str] = set()
        for use in quantized_uses((self.graph, *self.graph.inner)):
            self._check_use(use)
            scales.update((use.scales, use.tensor_scale or use.scales))
        for name in self.manifest.quantization:
            self.quantized(name)
            scales.add(self.manifest.quantization[name].scales)
        for name in sorted(scales & set(self.stored)):
            if not _all_finite(self.tensor(name)):
                raise BundleError(f"{self.path}: scales {name!r} are not all finite; the bundle is damaged")

    def _check_use(self, use: QuantizedUse) -> None:
        """Check one DequantizeLinear against ONNX's rules for the shapes and types of its inputs."""
        if use.values not in self.stored or use.scales not in self.stored:
            return
        values, scales = self.stored[use.values], self.stored[use.scales]
        where = f"{GRAPH_FILE}: node {use.node[:80]!r}"
        shape = values.shape
        if use.unpacked is not None:
            shape = use.unpacked.shape
            self._check_stream(use.values, use.unpacked)
        rank = len(shape)
        if use.gathered and use.axis >= rank:
            # Indices of more than one dimension add axes in front, and the stored tensor does not show how many.
            return
        if not -rank <= use.axis < rank or use.block_size < 0:
            raise BundleError(f"{where}: axis {use.axis} and block size {use.block_size} do not fit rank {rank}")
        axis = use.axis % rank
        if use.block_size:
            blocks = group_count(shape[axis], use.block_size)
            expected: tuple[int, ...] = (*shape[:axis], blocks, *shape[axis + 1 :])
        else:
            expected = (shape[axis],)
        if scales.shape != expected and scales.shape != ():
            raise BundleError(f"{where}: scales {use.scales!r} are {list(scales.shape)}, expected {list(expected)}")
        entry = self.manifest.quantization.get(use.values)
        if entry is not None and use.block_size != max(entry.group_size, 0):
            raise BundleError(
                f"{where}: block size {use.block_size}, {MANIFEST_FILE} says {use.values!r} has groups of "
                f"{entry.group_size}"
            )
        if entry is not None and use.tensor_scale != entry.tensor_scale:
            raise BundleError(
                f"{where}: the scales' own scale is {use.tensor_scale!r}, {MANIFEST_FILE} says {entry.tensor_scale!r}"
            )
        self._check_zero_points(use, where, scales.shape, values.dtype)

    def _check_zero_points(
        self, use: QuantizedUse, where: str, expected: tuple[int, ...], expected_dtype: DataType
    ) -> None:
        if use.zero_points is None or use.zero_points not in self.stored:
            return
        zero_points = self.stored[use.zero_points]
        shape = zero_points.shape
        if use.unpacked_zero_points is not None:
            shape = use.unpacked_zero_points.shape
            self._check_stream(use.zero_points, use.unpacked_zero_points)
        if shape != expected or zero_points.dtype is not expected_dtype:
            raise BundleError(
                f"{where}: zero points {use.zero_points!r} are {zero_points.dtype.name} {list(shape)}, "
                f"expected {expected_dtype.name} {list(expected)}"
            )

    def _check_stream(self, name: str, unpacked: UnpackedBits) -> None:
        """Check that a stored stream of bits is as long as what is made of it."""
        stored = self.stored[name]
        expected = ((math.prod(unpacked.shape) * unpacked.bits + 7) // 8,)
        if stored.dtype is not DataType.UINT8 or stored.shape != expected:
            raise BundleError(
                f"{GRAPH_FILE}: {name!r} is {stored.dtype.name} {list(stored.shape)}; {unpacked.bits}-bit integers of "
                f"shape {list(unpacked.shape)} need UINT8 {list(expected)}"
            )


def _all_finite(values: NDArray[Any]) -> bool:
    if values.dtype == np.float16 and values.size:
        # An exponent of all ones is that of infinities and NaN; to look at it is 20 times as fast as converting, and
        # without a sign, which few scales have, the largest number shows it.
        bits = values.view(np.uint16)
        return bool(bits.max() < 0x7C00 or (bits & np.uint16(0x7FFF)).max() < 0x7C00)
    return bool(np.isfinite(values.astype(np.float32, copy=False)).all())


def _check_file(path: Path, name: str, record: FileRecord, *, verify: bool) -> None:
    file = path / name
    if not Path(os.path.realpath(file)).is_relative_to(os.path.realpath(path)):
        raise BundleError(f"{file}: is a link that leads out of the bundle")
    if not file.is_file():
        raise BundleError(f"{file}: is missing; copy the whole bundle again, or convert the model again")
    size = file.stat().st_size
    if size != record.size:
        raise BundleError(
            f"{file}: has {size} bytes, {MANIFEST_FILE} says {record.size}; copy the bundle again, or convert again"
        )
    if verify:
        import hashlib

        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != record.sha256:
            raise BundleError(f"{file}: its sha256 is {digest}, {MANIFEST_FILE} says {record.sha256}; it is damaged")


def _read(path: Path, name: str, limit: int) -> bytes:
    file = path / name
    if not file.is_file():
        raise BundleError(f"{path}: holds no {name}; it is not a bundle, or its conversion did not finish")
    size = file.stat().st_size
    if size > limit:
        raise BundleError(f"{file}: {size} bytes, the limit is {limit}")
    return file.read_bytes()


def _parse_graph(path: Path) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(_read(path, GRAPH_FILE, MAX_GRAPH_SIZE))
    except DecodeError as error:
        raise BundleError(f"{path / GRAPH_FILE}: is not an ONNX model: {error}") from error
    if not proto.HasField("graph") or not proto.opset_import:
        raise BundleError(f"{path / GRAPH_FILE}: holds no graph; it is not an ONNX model")
    return proto
