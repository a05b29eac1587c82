"""Exchanges of results with other ranks: calls of a communicator between the operations of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node
from inferencex.runtime.backends.cpu.lowering.context import FallbackFunction, Instruction, Lowering
from inferencex.runtime.backends.cpu.lowering.extents import Extent
from inferencex.runtime.backends.cpu.lowering.views import View

if TYPE_CHECKING:
    from inferencex.runtime.parallel.communicator import Communicator

Arrays = Sequence[NDArray[Any] | None]


def lower_all_reduce(lowering: Lowering, node: Node) -> bool:
    """Add up a value where it lies."""
    communicator = _communicator(lowering)
    name = node.outputs[0].name
    source = lowering.view(node.inputs[0])
    whole = source.storage.is_arena and source.is_contiguous and not source.offset
    if not whole:
        copy = lowering.allocate(source.dtype, source.dims)
        lowering.emit("Copy", name, [source], [copy])
        source = copy
    lowering.views[name] = source

    def run(inputs: Arrays, outputs: Arrays) -> None:
        (array,) = outputs
        if array is not None and array.size:
            communicator.all_reduce(array)

    _emit(lowering, node, source, source, run)
    return True


def lower_all_gather(lowering: Lowering, node: Node) -> bool:
    """Put the columns of all ranks side by side."""
    communicator = _communicator(lowering)
    sizes = [int(size) for size in node.attributes.get_ints("sizes")]
    name = node.outputs[0].name
    source = lowering.contiguous(lowering.view(node.inputs[0]), name)
    result = lowering.define(node.outputs[0], source.dtype, (*source.dims[:-1], Extent(sum(sizes))))

    def run(inputs: Arrays, outputs: Arrays) -> None:
        (part,), (whole,) = inputs, outputs
        if part is not None and whole is not None and whole.size:
            communicator.all_gather(part.reshape(-1, sizes[communicator.rank]), whole.reshape(-1, sum(sizes)), sizes)

    _emit(lowering, node, source, result, run)
    return True


def _communicator(lowering: Lowering) -> Communicator:
    if lowering.options.communicator is None:
        raise BackendError("the graph is one rank's part of a model, and there are no other ranks here")
    return lowering.options.communicator


def _emit(lowering: Lowering, node: Node, source: View, result: View, run: FallbackFunction) -> None:
    lowering.instructions.append(
        Instruction("Fallback", node.outputs[0].name, (source,), (result,), {"operator": node.op_type}, run)
    )
