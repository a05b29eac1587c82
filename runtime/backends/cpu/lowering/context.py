"""The state of one lowering: what every value has become, and the instructions so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Node, Value
from inferencex.formats.kv_cache import KVScales
from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.lowering.extents import Extent, product
from inferencex.runtime.backends.cpu.lowering.views import (
    ITEM_SIZES,
    Storage,
    View,
    constant_view,
    contiguous_strides,
)
from inferencex.runtime.backends.graph.layer_shapes import LayerShape
from inferencex.runtime.backends.graph.static_values import NATIVE_TYPES, StaticValues, StoredWeight

if TYPE_CHECKING:
    from inferencex.runtime.parallel.communicator import Communicator

Array = NDArray[Any]
AttributeValue = int | float | str | list[int]
FallbackFunction = Callable[[Sequence[Array | None], Sequence[Array | None]], None]


MOST_ELEMENTS = 1 << 40
"""Of a value of the arena, for each token or row where it grows with those."""


@record(frozen=True, eq=False)
class Instruction:
    """One operation of the program: its kind in the native module, operands and attributes."""

    kind: str
    name: str
    inputs: tuple[View | None, ...]
    outputs: tuple[View | None, ...]
    attributes: Mapping[str, AttributeValue]
    fallback: FallbackFunction | None = None


@record(frozen=True)
class LoweringOptions:
    """What the program is made for.

    integer_activations: quantize activations to INT8 in front of integer weights
    kv_dtype:            float32, float16, bfloat16 or int8: what the pool is made of
    kv_scales:           by layer, where keys and values are rounded with calibrated scales; FP8 lies in float16
    max_tokens, max_seqs, max_model_len: the largest step
    num_blocks, block_size: the pool of layer state
    communicator:        to the other ranks, where the graph is one rank's part of a model
    """

    integer_activations: bool
    kv_dtype: str
    max_tokens: int
    max_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)
    communicator: Communicator | None = None


@record(frozen=True)
class Quantized:
    """A value as the integer linears read it: the three parts of a QuantizedRows."""

    values: View
    scales: View
    sums: View


@record
class Lowering:
    """Turns nodes into instructions, one after the other.

    views:      values that a step computes
    integers:   one-dimensional or scalar integers that are known up to the step's size: shapes, above all
    absorbed:   nodes that another node's instruction computes along
    quantized:  quantized forms of values, by value name and block layout
    layers:     the state that each layer of attention keeps, in blocks that lie `block_stride` bytes apart
    weights:    what `quantization.integer_weight` found
    tables:     those of rotary embeddings, by name
    widened:    weights that no kernel reads as they are stored, and that were made float32
    kept:       values that are wanted as floats, whoever reads them
    """

    graph: Graph
    static: StaticValues
    options: LoweringOptions
    native_kinds: frozenset[str]
    block_layout: Callable[..., tuple[int, int]]
    views: dict[str, View] = field(default_factory=dict)
    integers: dict[str, tuple[Extent, ...] | Extent] = field(default_factory=dict)
    absorbed: set[str] = field(default_factory=set)
    quantized: dict[tuple[str, str], Quantized] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    states: dict[int, Storage] = field(default_factory=dict)
    layers: Mapping[int, LayerShape] = field(default_factory=dict)
    block_stride: int = 0
    weights: dict[Node, StoredWeight | None] = field(default_factory=dict)
    tables: dict[str, View] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)
    kept: list[Value] = field(default_factory=list)

    def view(self, value: Value | None) -> View:
        """Return where a value is; static ones become constants. Raises BackendError for one that is nowhere."""
        if value is None:
            raise BackendError("an operator lacks an input that it needs")
        found = self.views.get(value.name)
        if found is not None:
            return found
        if value not in self.static:
            raise BackendError(f"the value {value.name!r} was not computed; the graph is not one of the IR dialect")
        array = self.static.array(value)
        if array.dtype.kind == "V" or array.dtype.name in ("bfloat16", "float8_e4m3fn"):
            array = array.astype(np.float32)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        for name, numpy_type in NATIVE_TYPES.values():
            if array.dtype == numpy_type and name not in ("bf16", "f8e4m3"):
                view = constant_view(array, name)
                self.views[value.name] = view
                return view
        raise BackendError(f"{value.name!r} has elements of type {array.dtype}, which the CPU backend does not compute")

    def optional_view(self, node: Node, place: int) -> View | None:
        """Return an input's view, or None where the node leaves it out."""
        value = input_of(node, place)
        return None if value is None else self.view(value)

    def contiguous(self, view: View, name: str) -> View:
        """Return the view, or a copy of it whose elements follow each other."""
        if view.is_contiguous:
            return view
        copy = self.allocate(view.dtype, view.dims)
        self.emit("Copy", name, [view], [copy])
        return copy

    def with_contiguous_rows(self, view: View, name: str) -> View:
        """Return the view, or a copy, with neighbours in the last dimension next to each other in memory."""
        if view.rank and view.strides[-1] == Extent(1):
            return view
        return self.contiguous(view, name)

    def allocate(self, dtype: str, dims: Sequence[Extent]) -> View:
        """Return a new value in the arena. Raises BackendError for sizes that no machine has."""
        shape = tuple(dims)
        return View(Storage(_nbytes(dtype, shape)), dtype, shape, contiguous_strides(shape))

    def emit(
        self,
        kind: str,
        name: str,
        inputs: Sequence[View | None],
        outputs: Sequence[View | None],
        **attributes: AttributeValue,
    ) -> None:
        """Append an instruction."""
        self.instructions.append(Instruction(kind, name, tuple(inputs), tuple(outputs), attributes))

    def define(self, value: Value, dtype: str, dims: Sequence[Extent]) -> View:
        """Return a new place in the arena for a node's output."""
        view = self.allocate(dtype, dims)
        self.views[value.name] = view
        return view

    def needs_float(self, value: Value, absorbing: Callable[[Node], bool]) -> bool:
        """Tell whether anything but the consumers that `absorbing` accepts reads a value."""
        is_kept = any(value is kept for kept in (*self.graph.outputs, *self.kept))
        return is_kept or not all(absorbing(node) for node in value.consumers())


@lru_cache(maxsize=1024)  # a graph has few shapes, many times
def _nbytes(dtype: str, dims: tuple[Extent, ...]) -> Extent:
    """Return the bytes of a value of the arena. Raises BackendError for sizes that no machine has."""
    size = product(dims)
    if size.coefficient > MOST_ELEMENTS or any(extent.coefficient < 0 for extent in dims):
        raise BackendError(f"a value of shape [{', '.join(map(str, dims))}] is not one that a step can compute")
    return size * Extent(ITEM_SIZES[dtype])


def input_of(node: Node, place: int) -> Value | None:
    """Return an input, or None where the node leaves it out."""
    return node.inputs[place] if place < len(node.inputs) else None
