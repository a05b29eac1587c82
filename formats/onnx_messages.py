"""ONNX's protocol buffer messages, without the rest of the package `onnx`.

`import onnx` brings its checker, parser, version converter and schemas, and takes longer than reading a whole bundle.
The messages are one module of it, which needs none of that. It is loaded under its own name, so that the classes are
the same ones for those who import `onnx` later.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import AttributeProto as AttributeProto
    from onnx import GraphProto as GraphProto
    from onnx import ModelProto as ModelProto
    from onnx import NodeProto as NodeProto
    from onnx import TensorProto as TensorProto
    from onnx import TensorShapeProto as TensorShapeProto
    from onnx import TypeProto as TypeProto
    from onnx import ValueInfoProto as ValueInfoProto

_MODULE = "onnx.onnx_ml_pb2"


def _load() -> Any:
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    if "onnx" in sys.modules:
        return importlib.import_module(_MODULE)
    package = importlib.util.find_spec("onnx")  # finds the folder, and runs nothing
    if package is None:
        raise ModuleNotFoundError("No module named 'onnx'", name="onnx")
    for folder in package.submodule_search_locations or ():
        spec = importlib.util.spec_from_file_location(_MODULE, Path(folder) / "onnx_ml_pb2.py")
        if spec is None or spec.loader is None or not Path(folder, "onnx_ml_pb2.py").is_file():
            continue
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[_MODULE]
            raise
        return module
    return importlib.import_module(_MODULE)  # not laid out as files: the package as a whole


if not TYPE_CHECKING:
    _messages = _load()
    AttributeProto = _messages.AttributeProto
    GraphProto = _messages.GraphProto
    ModelProto = _messages.ModelProto
    NodeProto = _messages.NodeProto
    TensorProto = _messages.TensorProto
    TensorShapeProto = _messages.TensorShapeProto
    TypeProto = _messages.TypeProto
    ValueInfoProto = _messages.ValueInfoProto
