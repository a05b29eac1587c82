"""Exchanges of results with other ranks: calls of a communicator between the launches of a step."""

from __future__ import annotations

from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Node, Value
from inferencex.runtime.backends.triton.lowering.context import Lowering
from inferencex.runtime.backends.triton.lowering.program import Values
from inferencex.runtime.backends.triton.step_inputs import StepInputs
from inferencex.runtime.parallel.communicator import Communicator
from inferencex.runtime.parallel.names import ALL_GATHER, ALL_REDUCE, PARALLEL_DOMAIN

_MAKES_NEW = {("", "Gemm"), ("", "MatMul"), ("", "Add"), ("", "Where"), (DOMAIN, "Experts"), (DOMAIN, "ExpertLinear")}
"""Operators whose results share no memory with other values."""


def lower_all_reduce(lowering: Lowering, node: Node) -> bool:
    """Add up a value in the type of activations, the same on all ranks, and where it lies if nobody else reads it."""
    communicator, value = _communicator(lowering), node.inputs[0]
    x, is_alone = lowering.activations(value), _is_alone(value)

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        terms = x(values)
        total = terms if is_alone else terms.clone()
        if total.numel():
            communicator.all_reduce(total)
        return (total,)

    lowering.emit(node, "exchange", run)
    return True


def lower_all_gather(lowering: Lowering, node: Node) -> bool:
    """Put the columns of all ranks side by side."""
    communicator, x = _communicator(lowering), lowering.activations(node.inputs[0])
    sizes = [int(size) for size in node.attributes.get_ints("sizes")]

    def run(values: Values, step: StepInputs) -> tuple[Tensor]:
        part = x(values)
        whole = part.new_empty((*part.shape[:-1], sum(sizes)))
        if whole.numel():
            communicator.all_gather(part.reshape(-1, part.shape[-1]), whole.view(-1, sum(sizes)), sizes)
        return (whole,)

    lowering.emit(node, "exchange", run)
    return True


def _communicator(lowering: Lowering) -> Communicator:
    if lowering.communicator is None:
        raise BackendError("the graph is one rank's part of a model, and there are no other ranks here")
    return lowering.communicator


def _is_alone(value: Value | None) -> bool:
    """Tell whether nothing but one node reads a value's memory."""
    producer = None if value is None else value.producer()
    return (
        value is not None
        and producer is not None
        and (producer.domain, producer.op_type) in _MAKES_NEW
        and len(value.consumers()) == 1
    )


HANDLERS = {
    (PARALLEL_DOMAIN, ALL_REDUCE): (lower_all_reduce,),
    (PARALLEL_DOMAIN, ALL_GATHER): (lower_all_gather,),
}
