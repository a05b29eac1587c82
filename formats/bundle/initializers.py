"""Checking what a graph says about its weights against what the weight files hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from inferencex.formats import onnx_messages as onnx
from inferencex.formats.bundle.header import HeaderEntry
from inferencex.formats.bundle.layout import GRAPH_FILE, MAX_ELEMENTS, MAX_RANK, check_file_name
from inferencex.formats.bundle.shards import StoredTensor
from inferencex.formats.dtypes import DataType, safetensors_code, storage_nbytes, storage_shape
from inferencex.formats.errors import BundleError
from inferencex.formats.graph import Graph, Node, Value
from inferencex.formats.records import record

_DIALECT = "inferencex"  # the domain of formats.dialect, whose import takes longer than opening a bundle
_OF_WEIGHTS = frozenset({"DequantizeLinear", "Gather", "UnpackBits"})
_WEIGHT_TYPES = frozenset(DataType) - {DataType.UNDEFINED, DataType.STRING}


@record(frozen=True)
class UnpackedBits:
    """What an UnpackBits makes of a stream of bits."""

    shape: tuple[int, ...]
    bits: int
    is_signed: bool


@record(frozen=True)
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


def match_initializers(
    graphs: Sequence[Graph], shards: Mapping[str, Mapping[str, HeaderEntry]]
) -> dict[str, StoredTensor]:
    """Return every stored tensor by name, once graphs and weight files agree on all of them.

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
    forms: dict[Any, tuple[DataType, tuple[int, ...]]] = {}  # a graph has few, many times
    for graph in graphs:
        for name, value in graph.initializers.items():
            if name in seen:
                raise BundleError(f"{GRAPH_FILE}: two initializers are named {name!r}")
            seen.add(name)
            key = value.dtype, value.shape
            form = forms.get(key)
            if form is None:
                form = forms[key] = _form(value)
            dtype, shape = form
            if value.stored is not None:
                stored[name] = _match(name, dtype, shape, value.stored, shards)
            elif value.constant is not None:
                _check_inline(dtype, shape, value.constant)
    unused = sorted(set(owners) - set(stored))
    if unused:
        shown = ", ".join(f"{name!r} ({owners[name]})" for name in unused[:8])
        raise BundleError(f"{len(unused)} stored tensors are used by nothing in {GRAPH_FILE}: {shown}")
    return stored


def _where(name: str) -> str:
    return f"{GRAPH_FILE}: initializer {name[:80]!r}"


def _form(value: Value) -> tuple[DataType, tuple[int, ...]]:
    """Return the type and shape of an initializer. Raises BundleError for those that a weight cannot have."""
    dtype, shape = value.dtype, tuple([size for size in value.shape or () if isinstance(size, int)])
    if dtype is None or dtype not in _WEIGHT_TYPES:
        raise BundleError(f"{_where(value.name)}: element type {dtype} is not one a weight can have")
    if len(shape) > MAX_RANK or (shape and not 0 <= min(shape) <= max(shape) <= MAX_ELEMENTS):
        raise BundleError(f"{_where(value.name)}: shape {list(shape)[:MAX_RANK]} is not one a tensor can have")
    if math.prod(shape) > MAX_ELEMENTS:
        raise BundleError(f"{_where(value.name)}: {math.prod(shape)} elements, the limit is {MAX_ELEMENTS}")
    return dtype, shape


def _match(
    name: str,
    dtype: DataType,
    shape: tuple[int, ...],
    tensor: onnx.TensorProto,
    shards: Mapping[str, Mapping[str, HeaderEntry]],
) -> StoredTensor:
    external: dict[str, str] = {}
    for item in tensor.external_data:
        key, text = item.key, item.value
        if not isinstance(key, str) or not isinstance(text, str):
            raise BundleError(f"{_where(name)}: {key!r}, {text!r} is not valid UTF-8; the file is damaged")
        if key in external:
            raise BundleError(f"{_where(name)}: its {key[:40]!r} is given twice")
        external[key] = text
    location = external.get("location", "")
    if location not in shards:
        check_file_name(location, _where(name))
        raise BundleError(f"{_where(name)}: its data is in {location!r}, which is not a weight file of this bundle")
    entry = shards[location].get(name)
    if entry is None:
        raise BundleError(f"{_where(name)}: {location} holds no tensor of this name")
    offset, length = _number(external, "offset", name), _number(external, "length", name)
    if (offset, length) != (entry.offset, entry.nbytes):
        raise BundleError(
            f"{_where(name)}: points to {length} bytes at {offset} of {location}, "
            f"where the tensor of this name has {entry.nbytes} bytes at {entry.offset}"
        )
    code, stored_shape = _stored_form(dtype, shape)
    if entry.code != code or entry.shape != stored_shape:
        raise BundleError(
            f"{_where(name)}: {dtype.name} {list(shape)} is stored as {code} {list(stored_shape)}, "
            f"{location} holds {entry.code} {list(entry.shape)}"
        )
    return StoredTensor(name, dtype, shape, location, offset, length)


@lru_cache(maxsize=1024)
def _stored_form(dtype: DataType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    return safetensors_code(dtype), storage_shape(dtype, shape)


def _check_inline(dtype: DataType, shape: tuple[int, ...], tensor: onnx.TensorProto) -> None:
    if tensor.HasField("raw_data"):
        found, expected = len(tensor.raw_data), storage_nbytes(dtype, shape)
        if found != expected:
            raise BundleError(
                f"{_where(tensor.name)}: {expected} bytes expected for {dtype.name} {list(shape)}, {found} found"
            )
        return
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    held = max(len(getattr(tensor, name)) for name in fields)
    elements = math.prod(shape)
    if held not in (elements, storage_nbytes(dtype, shape)):
        raise BundleError(f"{_where(tensor.name)}: is not filled: {held} values held, {elements} expected")


def _number(external: Mapping[str, str], key: str, name: str) -> int:
    text = external.get(key, "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BundleError(f"{_where(name)}: its {key} is {text[:40]!r}, expected a number of bytes")
    return int(text)


def quantized_uses(graphs: Sequence[Graph]) -> list[QuantizedUse]:
    """Return every DequantizeLinear whose inputs come from initializers: directly, unpacked, or by a Gather of rows.

    Raises BundleError for attributes of the wrong type.
    """
    uses: list[QuantizedUse] = []
    names = {name for graph in graphs for name in graph.initializers}
    for graph in graphs:
        gathered: dict[str, str] = {}
        streams: dict[str, tuple[str, UnpackedBits]] = {}
        scaled: dict[str, tuple[str, str]] = {}
        dequantizing: list[tuple[Node, list[str]]] = []
        for node in graph:
            if not node.inputs or not node.outputs or node.op_type not in _OF_WEIGHTS:
                continue
            inputs, output = ["" if value is None else value.name for value in node.inputs], node.outputs[0].name
            if node.op_type == "UnpackBits":
                if node.domain == _DIALECT:
                    streams[output] = inputs[0], _unpacked(node)
            elif node.domain:
                continue
            elif node.op_type == "Gather":
                gathered[output] = inputs[0]
            elif len(inputs) > 1:
                dequantizing.append((node, inputs))
                if len(inputs) == 2 and "block_size" not in node.attributes and names.issuperset(inputs):
                    scaled[output] = inputs[0], inputs[1]
        scales_of_others = {inputs[1] for _, inputs in dequantizing if inputs[1] in scaled}
        for node, inputs in dequantizing:
            if node.outputs[0].name in scales_of_others:
                continue
            is_gathered = inputs[0] in gathered
            inputs = [gathered.get(name, name) for name in inputs]
            unpacked = [streams[name][1] if name in streams else None for name in inputs]
            inputs = [streams[name][0] if name in streams else name for name in inputs]
            tensor_scale = scaled[inputs[1]][1] if inputs[1] in scaled else None
            inputs[1] = scaled[inputs[1]][0] if tensor_scale is not None else inputs[1]
            if inputs[0] not in names or inputs[1] not in names:
                continue
            has_zero_points = len(inputs) > 2 and inputs[2] != ""
            uses.append(
                QuantizedUse(
                    node=node.name or node.outputs[0].name,
                    values=inputs[0],
                    scales=inputs[1],
                    zero_points=inputs[2] if has_zero_points else None,
                    axis=node.attributes.get_int("axis", 1),
                    block_size=node.attributes.get_int("block_size", 0),
                    gathered=is_gathered,
                    unpacked=unpacked[0],
                    unpacked_zero_points=unpacked[2] if has_zero_points else None,
                    tensor_scale=tensor_scale,
                )
            )
    return uses


def _unpacked(node: Node) -> UnpackedBits:
    shape, bits = tuple(node.attributes.get_ints("shape", ())), node.attributes.get_int("bits", 0)
    where = f"{GRAPH_FILE}: node {(node.name or node.outputs[0].name)[:80]!r}"
    if not 1 <= bits <= 8:
        raise BundleError(f"{where}: {bits} bits, expected 1 to 8")
    if len(shape) > MAX_RANK or any(not 0 <= size <= MAX_ELEMENTS for size in shape) or math.prod(shape) > MAX_ELEMENTS:
        raise BundleError(f"{where}: shape {list(shape)[:MAX_RANK]} is not one a tensor can have")
    return UnpackedBits(shape, bits, bool(node.attributes.get_int("signed", 0)))
