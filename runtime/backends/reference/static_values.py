"""What does not depend on the step: initializers, and what nodes compute from them alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.runtime.backends.reference import interpreter

LARGE_ELEMENTS = 1 << 26
"""A weight with more elements is used some rows at a time when weights are not kept."""

_SMALL_BYTES = 1 << 12


class StaticValues:
    """Evaluates static values of a graph: once and kept, or anew at each use so that memory stays bounded."""

    def __init__(self, graph: ir.Graph, *, keep: bool) -> None:
        self.keep = keep
        self._sources: dict[str, ir.Node | ir.Value] = {str(v.name): v for v in graph.initializers.values()}
        self._kept: dict[str, Tensor] = {}
        # Made of next to nothing, like tables of angles: they take longer to compute than a weight to read.
        self._computed = {name for name, value in graph.initializers.items() if _is_small(value)}
        for node in graph:
            if all(v is None or str(v.name) in self._sources for v in node.inputs):
                self._sources.update({str(v.name): node for v in node.outputs})
                unpacks = node.op_type == "DequantizeLinear"  # a small weight is still a weight
                if not unpacks and all(v is None or str(v.name) in self._computed for v in node.inputs):
                    self._computed.update(str(v.name) for v in node.outputs)

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def is_kept(self, name: str) -> bool:
        """Tell whether a value was computed and stays in memory."""
        return name in self._kept

    def get(self, name: str) -> Tensor:
        """Return a static value whole."""
        if name in self._kept:
            return self._kept[name]
        source = self._sources[name]
        if isinstance(source, ir.Value):
            result = interpreter.to_tensor(_constant(source))
            _release(source)
            keep = not any(str(user.outputs[0].name) in self._sources for user in source.consumers())
        else:
            inputs = [None if v is None else self.get(str(v.name)) for v in source.inputs]
            outputs = interpreter.run_node(source, inputs)
            result = dict(zip((str(v.name) for v in source.outputs), outputs, strict=True))[name]
            keep = True
        if keep and (self.keep or (name in self._computed and not isinstance(source, ir.Value))):
            self._kept[name] = result
        return result

    def is_large(self, value: ir.Value) -> bool:
        """Tell whether a static matrix should be used some rows at a time."""
        if self.keep or value.shape is None or str(value.name) not in self._sources or len(value.shape) != 2:
            return False
        return int(value.shape.numpy()[0]) * int(value.shape.numpy()[1]) > LARGE_ELEMENTS

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Return `get(name)[index]`, reading and converting only those rows where the graph allows it."""
        source = self._sources[name]
        if isinstance(source, ir.Value):
            result = _initializer_rows(source, index)
            _release(source)
            return result
        data = source.inputs[0]
        per_row = source.op_type in ("Cast", "DequantizeLinear") and data is not None
        if not per_row or data is None:
            return self.get(name)[index]
        inputs = [None if v is None else self.rows(str(v.name), index) for v in source.inputs]
        return interpreter.run_node(source, inputs)[0]

    def chunks(self, value: ir.Value) -> Sequence[Callable[[], Tensor]]:
        """Return what computes the row blocks of a large matrix, one after the other."""
        rows, width = int(value.shape.numpy()[0]), int(value.shape.numpy()[1])  # type: ignore[union-attr]
        step = max(1, LARGE_ELEMENTS // width)
        name = str(value.name)
        return [
            lambda start=start: self.rows(name, torch.arange(start, min(start + step, rows)))  # type: ignore[misc]
            for start in range(0, rows, step)
        ]


def _is_small(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.nbytes <= _SMALL_BYTES


def _constant(value: ir.Value) -> ir.TensorProtocol:
    assert value.const_value is not None, f"initializer {value.name} has no value"
    return value.const_value


def _initializer_rows(value: ir.Value, index: Tensor) -> Tensor:
    """Read rows of an initializer; of a memory-mapped one only their pages are touched."""
    tensor = _constant(value)
    array = tensor.numpy()[index.numpy()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return interpreter.to_tensor(ir.Tensor(array, dtype=tensor.dtype))


def _release(value: ir.Value) -> None:
    """Let go of what a memory-mapped tensor holds on to, unpacked 4-bit values above all; it was copied."""
    if isinstance(value.const_value, ir.ExternalTensor):
        value.const_value.release()
