"""Checking what a graph says about its weights against what the weight files hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.bundle.header import HeaderEntry
from inferencex.formats.bundle.layout import GRAPH_FILE, MAX_ELEMENTS, MAX_RANK, check_file_name
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.dtypes import DataType, safetensors_code, storage_nbytes, storage_shape
from inferencex.formats.errors import BundleError

_MAX_DEPTH = 16
_DIALECT = "inferencex"  # the domain of formats.dialect, whose import takes longer than opening a bundle
_WEIGHT_TYPES = frozenset(DataType) - {DataType.UNDEFINED, DataType.STRING}


@dataclass(frozen=True)
class UnpackedBits:
    """What an UnpackBits makes of a stream of bits."""

    shape: tuple[int, ...]
    bits: int
    is_signed: bool


@dataclass(frozen=True)
class QuantizedUse:
    """A DequantizeLinear of the graph whose values, scales and zero points are initializers, or made of such.

    values, zero_points: may be streams of bits, which an UnpackBits expands to the shape and number of bits that
                         `unpacked` and `unpacked_zero_points` say
    scales:              may be quantized themselves, with `tensor_scale` as their one scale
    gathered:            it sees rows of them, as an embedding does
    """

    node: str
    values: str
    scales: str
    zero_points: str | None
    axis: int
    block_size: int
    gathered: bool
    unpacked: UnpackedBits | None = None
    unpacked_zero_points: UnpackedBits | None = None
    tensor_scale: str | None = None


def check_names(model: onnx.ModelProto) -> None:
    """Refuse names that are not UTF-8, which protocol buffers hand over as bytes where the type says text.

    Raises BundleError.
    """
    for graph in _graphs(model.graph):
        texts: list[str] = [value.name for value in (*graph.input, *graph.output)]
        for tensor in graph.initializer:
            texts.append(tensor.name)
            for item in tensor.external_data:
                texts += (item.key, item.value)
        for node in graph.node:
            texts += (node.name, node.op_type, node.domain, *node.input, *node.output)
            texts += [attribute.name for attribute in node.attribute]
        try:
            "".join(texts)  # looks at the types of thousands of them at once
        except TypeError:
            text = next(text for text in texts if not isinstance(text, str))
            raise BundleError(f"{GRAPH_FILE}: the name {text!r} is not valid UTF-8; the file is damaged") from None


def match_initializers(
    model: onnx.ModelProto, shards: Mapping[str, Mapping[str, HeaderEntry]]
) -> dict[str, StoredTensor]:
    """Return every stored tensor by name, once graph and weight files agree on all of them.

    `shards` maps a weight file's name to its tensors. Raises BundleError for an initializer that is not filled, that
    points outside the bundle or to other bytes than the tensor of its name, or whose type and shape do not fit, for a
    stored tensor that no initializer uses, and for a name that occurs twice.
    """
    owners: dict[str, str] = {}
    for location, entries in shards.items():
        for name in entries:
            if name in owners:
                raise BundleError(f"tensor {name!r} is stored in both {owners[name]} and {location}")
            owners[name] = location
    stored: dict[str, StoredTensor] = {}
    seen: set[str] = set()
    for tensor in _tensors(model):
        if tensor.name in seen:
            raise BundleError(f"{GRAPH_FILE}: two initializers are named {tensor.name!r}")
        seen.add(tensor.name)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            stored[tensor.name] = _match(tensor, shards)
        else:
            _check_inline(tensor)
    unused = sorted(set(owners) - set(stored))
    if unused:
        shown = ", ".join(f"{name!r} ({owners[name]})" for name in unused[:8])
        raise BundleError(f"{len(unused)} stored tensors are used by nothing in {GRAPH_FILE}: {shown}")
    return stored


def _match(tensor: onnx.TensorProto, shards: Mapping[str, Mapping[str, HeaderEntry]]) -> StoredTensor:
    where = f"{GRAPH_FILE}: initializer {tensor.name[:80]!r}"
    dtype, shape = _dtype(tensor, where), _shape(tensor, where)
    external: dict[str, str] = {}
    for item in tensor.external_data:
        if item.key in external:
            raise BundleError(f"{where}: its {item.key[:40]!r} is given twice")
        external[item.key] = item.value
    location = external.get("location", "")
    check_file_name(location, where)
    if location not in shards:
        raise BundleError(f"{where}: its data is in {location!r}, which is not a weight file of this bundle")
    entry = shards[location].get(tensor.name)
    if entry is None:
        raise BundleError(f"{where}: {location} holds no tensor of this name")
    offset, length = _number(external, "offset", where), _number(external, "length", where)
    if (offset, length) != (entry.offset, entry.nbytes):
        raise BundleError(
            f"{where}: points to {length} bytes at {offset} of {location}, "
            f"where the tensor of this name has {entry.nbytes} bytes at {entry.offset}"
        )
    if entry.code != safetensors_code(dtype) or entry.shape != storage_shape(dtype, shape):
        raise BundleError(
            f"{where}: {dtype.name} {list(shape)} is stored as {safetensors_code(dtype)} "
            f"{list(storage_shape(dtype, shape))}, {location} holds {entry.code} {list(entry.shape)}"
        )
    return StoredTensor(tensor.name, dtype, shape, location, offset, length)


def _check_inline(tensor: onnx.TensorProto) -> None:
    where = f"{GRAPH_FILE}: initializer {tensor.name[:80]!r}"
    dtype, shape = _dtype(tensor, where), _shape(tensor, where)
    if tensor.HasField("raw_data"):
        found, expected = len(tensor.raw_data), storage_nbytes(dtype, shape)
        if found != expected:
            raise BundleError(f"{where}: {expected} bytes expected for {dtype.name} {list(shape)}, {found} found")
        return
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    held = max(len(getattr(tensor, name)) for name in fields)
    elements = math.prod(shape)
    if held not in (elements, storage_nbytes(dtype, shape)):
        raise BundleError(f"{where}: is not filled: {held} values held, {elements} expected")


def _dtype(tensor: onnx.TensorProto, where: str) -> DataType:
    if tensor.data_type not in _WEIGHT_TYPES:
        raise BundleError(f"{where}: element type {tensor.data_type} is not one a weight can have")
    return DataType(tensor.data_type)


def _shape(tensor: onnx.TensorProto, where: str) -> tuple[int, ...]:
    shape = tuple(tensor.dims)
    if len(shape) > MAX_RANK or any(not 0 <= size <= MAX_ELEMENTS for size in shape):
        raise BundleError(f"{where}: shape {list(shape)[:MAX_RANK]} is not one a tensor can have")
    if math.prod(shape) > MAX_ELEMENTS:
        raise BundleError(f"{where}: {math.prod(shape)} elements, the limit is {MAX_ELEMENTS}")
    return shape


def _number(external: Mapping[str, str], key: str, where: str) -> int:
    text = external.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BundleError(f"{where}: its {key} is {text[:40]!r}, expected a number of bytes")
    return int(text)


def _graphs(graph: onnx.GraphProto, depth: int = 0) -> Iterator[onnx.GraphProto]:
    if depth > _MAX_DEPTH:
        raise BundleError(f"{GRAPH_FILE}: graphs nested more than {_MAX_DEPTH} deep")
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g, depth + 1)
            for inner in attribute.graphs:
                yield from _graphs(inner, depth + 1)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in _graphs(model.graph):
        if graph.sparse_initializer:
            raise BundleError(f"{GRAPH_FILE}: sparse initializers are not part of this format")
        yield from graph.initializer


def quantized_uses(model: onnx.ModelProto) -> list[QuantizedUse]:
    """Return every DequantizeLinear whose inputs come from initializers: directly, unpacked, or by a Gather of rows."""
    uses: list[QuantizedUse] = []
    names = {tensor.name for tensor in _tensors(model)}
    for graph in _graphs(model.graph):
        gathered: dict[str, str] = {}
        streams: dict[str, tuple[str, UnpackedBits]] = {}
        scaled: dict[str, tuple[str, str]] = {}
        for node in graph.node:
            if not node.input or not node.output:
                continue
            if node.op_type == "Gather" and not node.domain:
                gathered[node.output[0]] = node.input[0]
            elif node.op_type == "UnpackBits" and node.domain == _DIALECT:
                streams[node.output[0]] = node.input[0], _unpacked(node)
            elif _has_one_scale(node) and set(node.input) <= names:
                scaled[node.output[0]] = node.input[0], node.input[1]
        scales_of_others = {name for node in graph.node for name in node.input[1:2] if name in scaled}
        for node in graph.node:
            if node.op_type != "DequantizeLinear" or node.domain or len(node.input) < 2:
                continue
            if node.output and node.output[0] in scales_of_others:
                continue
            inputs = [gathered.get(name, name) for name in node.input]
            unpacked = [streams[name][1] if name in streams else None for name in inputs]
            inputs = [streams[name][0] if name in streams else name for name in inputs]
            tensor_scale = scaled[inputs[1]][1] if inputs[1] in scaled else None
            inputs[1] = scaled[inputs[1]][0] if tensor_scale is not None else inputs[1]
            if not set(inputs[:2]) <= names:
                continue
            integers = {item.name: item.i for item in node.attribute}
            has_zero_points = len(inputs) > 2 and inputs[2] != ""
            uses.append(
                QuantizedUse(
                    node=node.name or node.output[0],
                    values=inputs[0],
                    scales=inputs[1],
                    zero_points=inputs[2] if has_zero_points else None,
                    axis=integers.get("axis", 1),
                    block_size=integers.get("block_size", 0),
                    gathered=node.input[0] in gathered,
                    unpacked=unpacked[0],
                    unpacked_zero_points=unpacked[2] if has_zero_points else None,
                    tensor_scale=tensor_scale,
                )
            )
    return uses


def _has_one_scale(node: onnx.NodeProto) -> bool:
    """Whether a node dequantizes as scales are that have a scale themselves."""
    is_dequantize = node.op_type == "DequantizeLinear" and not node.domain
    return is_dequantize and len(node.input) == 2 and all(item.name != "block_size" for item in node.attribute)


def _unpacked(node: onnx.NodeProto) -> UnpackedBits:
    integers = {item.name: item.i for item in node.attribute}
    shape = next((tuple(item.ints) for item in node.attribute if item.name == "shape"), ())
    bits = integers.get("bits", 0)
    where = f"{GRAPH_FILE}: node {(node.name or node.output[0])[:80]!r}"
    if not 1 <= bits <= 8:
        raise BundleError(f"{where}: {bits} bits, expected 1 to 8")
    if len(shape) > MAX_RANK or any(not 0 <= size <= MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise BundleError(f"{where}: shape {list(shape)[:MAX_RANK]} is not one a tensor can have")
    return UnpackedBits(shape, bits, bool(integers.get("signed", 0)))
