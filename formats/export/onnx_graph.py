"""Building ONNX graphs node by node, with large constants in a data file that several graphs may share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_ALIGNMENT = 4096
"""Bytes; runtimes map tensors that begin at a page."""

_INLINE_BYTES = 1024
_IR_VERSION = 11
_OPSET = 23


class DataFile:
    """The constants of graphs that lie in one folder; each is written once, whoever asks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._places: dict[str, tuple[int, int]] = {}

    def place(self, key: str, data: NDArray[Any]) -> tuple[int, int]:
        """Return offset and length in bytes of the data called `key`, writing it when it is new."""
        if key not in self._places:
            self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
            offset = self._file.tell()
            self._file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            self._places[key] = (offset, data.nbytes)
        return self._places[key]

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class GraphBuilder:
    """A graph being built. Names of values are the caller's, or made of the stem that it gives."""

    def __init__(self, data: DataFile) -> None:
        self._data = data
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._domains = {""}
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """Return a name that no value has."""
        number = self._counts.get(stem, 0)
        self._counts[stem] = number + 1
        return f"{stem}.x{number}"

    def input(self, name: str, kind: int, shape: Sequence[int | str]) -> str:
        """Declare an input of the graph."""
        self._inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[int | str]) -> None:
        """Declare an output of the graph."""
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, values: Any, kind: type[np.generic] = np.int64, stem: str = "constant") -> str:
        """Return a small constant."""
        array = np.asarray(values, dtype=kind)
        name = f"{stem}.{array.dtype.name}{array.tolist()}".replace(" ", "")
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def stored(
        self, name: str, data: NDArray[Any], kind: int, shape: Sequence[int], *, same_as: str | None = None
    ) -> str:
        """Return a constant whose bytes `data` are laid out as ONNX has `kind`; large ones go to the data file.

        Constants of one name are the same in all graphs that share the file. `same_as` names one of another type or
        shape that has the same bytes.
        """
        if name in self._constants:
            return name
        tensor = TensorProto(name=name, data_type=kind, dims=shape)
        if data.nbytes <= _INLINE_BYTES:
            tensor.raw_data = np.ascontiguousarray(data).tobytes()
        else:
            offset, length = self._data.place(same_as or name, data)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self._data.path.name), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
        self._constants[name] = tensor
        return name

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: Sequence[str] | None = None,
    ) -> str:
        """Add a node and return its first output; absent inputs and outputs are empty names."""
        made = list(outputs) if outputs is not None else [self.fresh(op_type.lower())]
        name = next(output for output in made if output)
        self._nodes.append(
            helper.make_node(op_type, list(inputs), made, name=name, domain=domain, **(attributes or {}))
        )
        self._domains.add(domain)
        return made[0]

    def copy(self, node: onnx.NodeProto, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Add a node of another graph with other inputs and outputs."""
        copied = onnx.NodeProto()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(inputs)
        del copied.output[:]
        copied.output.extend(outputs)
        self._nodes.append(copied)

    def save(self, path: Path, name: str) -> None:
        """Write the graph."""
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, list(self._constants.values()))
        opsets = [helper.make_opsetid(domain, 1 if domain else _OPSET) for domain in sorted(self._domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="inferencex")
        path.write_bytes(model.SerializeToString(deterministic=True))
