"""Ways to spoil a bundle: files that are well formed one by one, and say what no converter would write."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from inferencex.formats.bundle.layout import GRAPH_FILE, HEADER_RESERVE, MANIFEST_FILE
from inferencex.formats.dtypes import DataType, safetensors_code, storage_nbytes, storage_shape

SHARD = "weights-00001-of-00001.safetensors"

ABSURD = (
    *(-(2**63), -(2**31), -65, -2, -1, 0, 1, 2, 3, 5, 7, 31, 63, 65, 127),
    *(4096, 2**20, 2**31, 2**40, 2**62, 2**63 - 1),
)
NUMBERS = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-45, 0.5, 3.0, 1e30, 3e38)
TEXTS = (
    "silu", "gelu_tanh", "relu2", "swiglu_clamped", "interleaved", "concat", "tanh", "none", "", "\u0000", "x" * 300,
)  # fmt: skip
TYPES = (
    DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16, DataType.DOUBLE, DataType.FLOAT8E4M3FN, DataType.INT64,
    DataType.INT32, DataType.INT8, DataType.UINT8, DataType.INT4, DataType.UINT4, DataType.BOOL,
)  # fmt: skip
SIZES = ("tokens", "rows", "x", "", "2*tokens", "-1*rows", f"{2**62}*tokens", "*", "*tokens", "²*rows")
OPERATORS = (
    "Abs", "Add", "ArgMax", "Cast", "Clip", "Concat", "ConstantOfShape", "Cos", "CumSum", "DequantizeLinear", "Div",
    "Equal", "Expand", "Flatten", "Gather", "GatherElements", "Gelu", "Gemm", "Identity", "LayerNormalization",
    "MatMul", "Max", "Mod", "Mul", "Neg", "Not", "OneHot", "Pad", "Pow", "QuantizeLinear", "RMSNormalization",
    "Range", "ReduceMean", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding", "ScatterElements", "Shape", "Sigmoid",
    "Slice", "Softmax", "Split", "Squeeze", "Sub", "Tile", "TopK", "Transpose", "Unsqueeze", "Where",
    "NoSuchOperator", "inferencex::AddLayerNormalization", "inferencex::AddRMSNormalization",
    "inferencex::Attention", "inferencex::ExpertLinear", "inferencex::Experts", "inferencex::GatedActivation",
)  # fmt: skip

_integers = st.sampled_from(ABSURD)
_lists = st.lists(_integers, min_size=1, max_size=4)


@dataclass
class Parts:
    """A bundle in memory, to be changed and written."""

    model: onnx.ModelProto
    manifest: dict[str, Any]
    header: dict[str, Any]
    weights: bytearray

    @classmethod
    def read(cls, bundle: Path) -> Parts:
        """Read a bundle of one weight file."""
        data = (bundle / SHARD).read_bytes()
        return cls(
            onnx.load_from_string((bundle / GRAPH_FILE).read_bytes()),
            json.loads((bundle / MANIFEST_FILE).read_text()),
            json.loads(data[8:HEADER_RESERVE]),
            bytearray(data[HEADER_RESERVE:]),
        )

    def copy(self) -> Parts:
        """Return a copy that can be changed."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return Parts(
            model, json.loads(json.dumps(self.manifest)), json.loads(json.dumps(self.header)), bytearray(self.weights)
        )

    def write(self, bundle: Path) -> None:
        """Write the bundle over another; its manifest vouches for what the files hold."""
        length = HEADER_RESERVE - 8
        header = json.dumps(self.header).encode().ljust(length)
        files = {
            SHARD: length.to_bytes(8, "little") + header + bytes(self.weights),
            GRAPH_FILE: self.model.SerializeToString(),
        }
        for name, data in files.items():
            (bundle / name).write_bytes(data)
            record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            if isinstance(self.manifest.get("files"), dict):
                self.manifest["files"][name] = record
        (bundle / MANIFEST_FILE).write_text(json.dumps(self.manifest))


def spoil(parts: Parts, data: DataObject) -> str:
    """Change one thing; returns what, for the report of a failure."""
    mutation = data.draw(st.sampled_from(_MUTATIONS))
    return mutation(parts, data) or f"{mutation.__name__} found nothing to change"


def _a_node(parts: Parts, data: DataObject, needs: Callable[[onnx.NodeProto], bool]) -> onnx.NodeProto | None:
    nodes = [i for i, node in enumerate(parts.model.graph.node) if needs(node)]
    return parts.model.graph.node[data.draw(st.sampled_from(nodes))] if nodes else None


def _change_attribute(parts: Parts, data: DataObject) -> str | None:
    node = _a_node(parts, data, lambda node: len(node.attribute) > 0)
    if node is None:
        return None
    place = data.draw(st.integers(0, len(node.attribute) - 1))
    name, kind = node.attribute[place].name, node.attribute[place].type
    del node.attribute[place]
    anything = (
        _integers | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.lists(_integers, min_size=1, max_size=4)
    )
    usual: dict[int, st.SearchStrategy[Any]] = {
        onnx.AttributeProto.INT: _integers,
        onnx.AttributeProto.FLOAT: st.sampled_from(NUMBERS),
        onnx.AttributeProto.STRING: st.sampled_from(TEXTS),
        onnx.AttributeProto.INTS: _lists,
    }
    action = data.draw(st.sampled_from(["usual", "usual", "usual", "anything", "remove"]))
    if action == "remove":
        return f"{node.op_type} {node.output[:1]}: {name} removed"
    value = data.draw(usual.get(kind, anything) if action == "usual" else anything)
    node.attribute.append(onnx.helper.make_attribute(name, value))
    return f"{node.op_type} {node.output[:1]}: {name} = {value!r}"


def _change_input(parts: Parts, data: DataObject) -> str | None:
    graph = parts.model.graph
    node = _a_node(parts, data, lambda node: len(node.input) > 0)
    if node is None:
        return None
    place = data.draw(st.integers(0, len(node.input) - 1))
    action = data.draw(st.sampled_from(["other", "other", "other", "swap", "none", "cut", "add"]))
    where = f"{node.op_type} {node.output[:1]}: input {place}"
    if action == "cut":
        del node.input[place:]
        return f"{where} and all behind it cut off"
    if action == "none":
        node.input[place] = ""
        return f"{where} left out"
    if action == "swap":
        node.input[place], node.input[0] = node.input[0], node.input[place]
        return f"{where} swapped with the first"
    names = [tensor.name for tensor in graph.initializer] + [value.name for value in graph.input]
    for earlier in graph.node:  # what comes later would be refused before anything is compiled
        if earlier is node or list(earlier.output) == list(node.output):
            break
        names += earlier.output
    name = data.draw(st.sampled_from([name for name in names if name]))
    if action == "add":
        node.input.append(name)
        return f"{where}: {name} added behind the last"
    node.input[place] = name
    return f"{where} is {name}"


def _change_node(parts: Parts, data: DataObject) -> str | None:
    graph = parts.model.graph
    node = _a_node(parts, data, lambda node: True)
    if node is None:
        return None
    where = f"{node.op_type} {node.output[:1]}"
    action = data.draw(st.sampled_from(["operator", "operator", "remove", "rename output", "cut outputs"]))
    if action == "operator":
        name = data.draw(st.sampled_from(OPERATORS))
        node.domain, _, node.op_type = name.rpartition("::")
        del node.input[data.draw(st.integers(1, 8)) :]
        if data.draw(st.booleans()):
            del node.output[1:]
        return f"{where} became {name}"
    if action == "remove":
        graph.node.remove(node)
        return f"{where} removed"
    if action == "rename output":
        node.output[-1] = data.draw(st.sampled_from(["", "renamed", *(value.name for value in graph.output)]))
        return f"{where}: last output became {node.output[-1]!r}"
    del node.output[1:]
    return f"{where}: all outputs but the first cut off"


def _change_output(parts: Parts, data: DataObject) -> str:
    graph = parts.model.graph
    names = [name for node in graph.node for name in node.output if name]
    graph.output[0].name = data.draw(st.sampled_from(names + [tensor.name for tensor in graph.initializer]))
    return f"the logits became {graph.output[0].name}"


def _change_declared_shape(parts: Parts, data: DataObject) -> str | None:
    graph = parts.model.graph
    infos = [*graph.value_info, *graph.output, *graph.output, *graph.input]
    shaped = [info for info in infos if info.type.tensor_type.shape.dim]
    if not shaped:
        return None
    info = shaped[data.draw(st.integers(0, len(shaped) - 1))]
    dims = info.type.tensor_type.shape.dim
    dim = dims[data.draw(st.integers(0, len(dims) - 1))]
    action = data.draw(st.sampled_from(["value", "value", "name", "clear", "drop", "type"]))
    if action == "type":
        info.type.tensor_type.elem_type = int(data.draw(st.sampled_from(TYPES)))
    elif action == "drop":
        del dims[:]
    elif action == "clear":
        dim.Clear()
    elif action == "name":
        dim.dim_param = data.draw(st.sampled_from(SIZES))
    else:
        dim.dim_value = data.draw(_integers)
    return f"the declared shape of {info.name}: {action}"


def _change_initializer(parts: Parts, data: DataObject) -> str | None:
    """Give a tensor another shape or type, in the graph and in the weight file alike; its bytes may be others'."""
    tensors = parts.model.graph.initializer
    if not tensors:
        return None
    tensor = tensors[data.draw(st.integers(0, len(tensors) - 1))]
    dims = list(tensor.dims)
    action = data.draw(st.sampled_from(["swap", "merge", "split", "type", "one", "absurd"]))
    if action == "swap":
        dims = dims[::-1]
    elif action == "merge":
        dims = [min(math.prod(dims), 2**63 - 1)]
    elif action == "split":
        dims = [*dims, 1] if data.draw(st.booleans()) else [1, *dims]
    elif action == "one" and dims:
        dims[data.draw(st.integers(0, len(dims) - 1))] = data.draw(st.integers(0, 9))
    elif action == "absurd" and dims:
        dims[data.draw(st.integers(0, len(dims) - 1))] = data.draw(_integers.filter(lambda size: size >= 0))
    if action == "type":
        tensor.data_type = int(data.draw(st.sampled_from(TYPES)))
    del tensor.dims[:]
    tensor.dims.extend(dims)
    dtype = DataType(tensor.data_type)
    nbytes = storage_nbytes(dtype, tuple(dims))
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        if nbytes < 1 << 20:
            raw = onnx.numpy_helper.to_array(tensor).tobytes() if not tensor.raw_data else tensor.raw_data
            for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.raw_data = (raw * (nbytes // max(len(raw), 1) + 1))[:nbytes]
        return f"{tensor.name} became {dtype.name} {dims}"
    entry = parts.header[tensor.name]
    entry["dtype"], entry["shape"] = safetensors_code(dtype), list(storage_shape(dtype, tuple(dims)))
    first, last = entry["data_offsets"]
    if nbytes != last - first:
        _resize(parts, tensor.name, nbytes)
    return f"{tensor.name} became {dtype.name} {dims}"


def _resize(parts: Parts, name: str, nbytes: int) -> None:
    """Give a tensor other bytes; those that follow it in the file move. Absurd sizes stay promises."""
    first, last = parts.header[name]["data_offsets"]
    room = min(nbytes, 1 << 20)
    old = bytes(parts.weights[first:last])
    parts.weights[first:last] = (old * (room // max(len(old), 1) + 1))[:room]
    parts.header[name]["data_offsets"] = [first, first + nbytes]
    moved = room - (last - first)
    for other, entry in parts.header.items():
        if other not in (name, "__metadata__") and entry["data_offsets"][0] >= last:
            entry["data_offsets"] = [place + moved for place in entry["data_offsets"]]
    for tensor in parts.model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL or tensor.name not in parts.header:
            continue
        start, end = parts.header[tensor.name]["data_offsets"]
        for item in tensor.external_data:
            if item.key in ("offset", "length"):
                item.value = str(start + HEADER_RESERVE if item.key == "offset" else end - start)


def _change_constant(parts: Parts, data: DataObject) -> str | None:
    """Change numbers of a small constant inside the graph: the target of a Reshape, the bounds of a Slice."""
    tensors = [t for t in parts.model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    tensors = [t for t in tensors if t.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.FLOAT)]
    if not tensors:
        return None
    tensor = tensors[data.draw(st.integers(0, len(tensors) - 1))]
    array = onnx.numpy_helper.to_array(tensor).copy().reshape(-1)
    if not array.size:
        return None
    value = data.draw(_integers if array.dtype.kind == "i" else st.sampled_from(NUMBERS))
    array[data.draw(st.integers(0, min(array.size, 64) - 1))] = value
    tensor.CopyFrom(onnx.numpy_helper.from_array(array.reshape(tuple(tensor.dims)), tensor.name))
    return f"the constant {tensor.name} holds {value}"


def _change_fact(parts: Parts, data: DataObject) -> str | None:
    facts = parts.manifest["architecture"]
    if not facts:
        return None
    name = data.draw(st.sampled_from(sorted(facts)))
    facts[name] = data.draw(_integers | st.sampled_from(TEXTS) | st.none() | st.booleans())
    return f"bundle.json: architecture.{name} = {facts[name]!r}"


def _change_quantization(parts: Parts, data: DataObject) -> str | None:
    entries = parts.manifest["quantization"]
    if not entries:
        return None
    name = data.draw(st.sampled_from(sorted(entries)))
    field = data.draw(st.sampled_from(sorted(entries[name])))
    entries[name][field] = data.draw(_integers | st.sampled_from(TEXTS) | st.none() | st.booleans())
    return f"bundle.json: quantization of {name}: {field} = {entries[name][field]!r}"


def _change_weights(parts: Parts, data: DataObject) -> str:
    """Overwrite a tensor's bytes, or cut the file short."""
    if data.draw(st.sampled_from([False, False, False, True])):
        size = data.draw(st.integers(0, len(parts.weights)))
        del parts.weights[size:]
        return f"weights cut to {size} bytes"
    name = data.draw(st.sampled_from(sorted(set(parts.header) - {"__metadata__"})))
    first, last = parts.header[name]["data_offsets"]
    pattern = data.draw(st.sampled_from([b"\xff", b"\x00", b"\x80", b"\x7f\x7f\x80\x7f", b"\x00\x7c", b"\x01"]))
    parts.weights[first:last] = (pattern * (last - first))[: last - first]
    return f"{name} filled with {pattern.hex()}"


_MUTATIONS: list[Callable[[Parts, DataObject], str | None]] = [
    _change_attribute,
    _change_attribute,
    _change_input,
    _change_node,
    _change_output,
    _change_declared_shape,
    _change_initializer,
    _change_constant,
    _change_fact,
    _change_quantization,
    _change_weights,
]
