"""Lower a whole graph: each node by the first way that fits, the most special one first."""

from __future__ import annotations

from collections.abc import Callable

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Value
from inferencex.runtime.backends.graph.well_formed import naming
from inferencex.runtime.backends.head import find_head
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.lowering import attention, collectives, generic, linear, quantization, rows
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.lowering.context import Handlers, Lowering
from inferencex.runtime.backends.triton.lowering.program import Instruction, Program
from inferencex.runtime.parallel.communicator import Communicator

_INPUTS = ("token_ids", "positions", "logit_rows", "prompt_lengths")
_SPECIAL: Handlers = {
    **linear.HANDLERS,
    **quantization.HANDLERS,
    **rows.HANDLERS,
    **attention.HANDLERS,
    **collectives.HANDLERS,
    ("", "Gather"): (generic.lower_embedding,),
}


def lower_graph(
    graph: Graph,
    constants: Constants,
    pages: Callable[[int], KVPages],
    max_model_len: int,
    communicator: Communicator | None = None,
) -> Program:
    """Lower a graph of the IR dialect, and put its weights on the device.

    pages:         gives the pages of a layer, in each step
    max_model_len: the longest sequence, which tables of angles have rows for
    communicator:  to the other ranks, where the graph is one rank's part of a model

    Raises BackendError, naming the node, for what cannot be lowered.
    """
    unknown = [value.name for value in graph.inputs if value.name not in _INPUTS]
    if unknown or len(graph.outputs) != 1:
        raise BackendError(
            f"the graph has inputs {[value.name for value in graph.inputs]} and {len(graph.outputs)} outputs; expected "
            f"only {', '.join(_INPUTS)}, and the logits alone"
        )
    hidden = _hidden(graph, constants)
    kept = frozenset(value.name for value in (graph.outputs[0], hidden) if value is not None)
    lowering = Lowering(graph, constants, pages, max_model_len, communicator, kept)
    for node in graph:
        if not any(lowering.is_static(value) or value.name in lowering.along for value in node.outputs):
            with naming(node):
                handlers = _SPECIAL.get((node.domain, node.op_type), ())
                if not any(handler(lowering, node) for handler in handlers):
                    generic.lower_generic(lowering, node)
    return _program(lowering, hidden)


def _hidden(graph: Graph, constants: Constants) -> Value | None:
    """Return what the graph's head reads; None where it does not end in one that reads `[rows, hidden]`."""
    (logits,) = graph.outputs
    head = find_head(logits, lambda value: value in constants)
    return None if head is None or not _has_rows_of_logits(head.hidden.shape, logits.shape) else head.hidden


def _program(lowering: Lowering, head_reads: Value | None) -> Program:
    (logits,) = lowering.graph.outputs
    hidden = None if head_reads is None else head_reads.name
    instructions = _needed(lowering.instructions, {logits.name} if hidden is None else {logits.name, hidden})
    last: dict[str, int] = {}
    for index, instruction in enumerate(instructions):
        last.update((name, index) for name in (*instruction.reads, *(n for n in instruction.writes if n is not None)))
    kept = {logits.name, hidden}
    ended: list[tuple[str, ...]] = [
        tuple(
            name for name in dict.fromkeys((*one.reads, *one.writes)) if name and last[name] == i and name not in kept
        )
        for i, one in enumerate(instructions)
    ]
    return Program(
        tuple(instructions),
        tuple(ended),
        logits.name,
        hidden,
        None if head_reads is None else _width(head_reads),
        dict(lowering.fallbacks),
        lowering.communicator is None or lowering.communicator.can_be_recorded,
        dict(lowering.waiting),
    )


def _needed(instructions: list[Instruction], wanted: set[str]) -> list[Instruction]:
    """Return the instructions that anything wanted depends on, or that write state."""
    alive, kept = set(wanted), []
    for instruction in reversed(instructions):
        if alive.intersection(name for name in instruction.writes if name) or instruction.operator.endswith(
            "Attention"
        ):
            kept.append(instruction)
            alive.update(instruction.reads)
    return kept[::-1]


def _width(value: Value) -> int:
    width = value.shape[-1] if value.shape else None
    if not isinstance(width, int):
        raise BackendError(f"value {value.name!r} has no fixed number of features")
    return width


def _has_rows_of_logits(hidden: object, logits: object) -> bool:
    return (
        isinstance(hidden, tuple)
        and isinstance(logits, tuple)
        and len(hidden) == 2
        and str(hidden[0]) == str(logits[0])
        and isinstance(hidden[1], int)
    )
