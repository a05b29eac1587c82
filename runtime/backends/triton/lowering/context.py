"""The state of one lowering: what values are, and the instructions so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Node, Value
from inferencex.runtime.backends.triton.kernels.kv_pages import KVPages
from inferencex.runtime.backends.triton.lowering.constants import Constants
from inferencex.runtime.backends.triton.lowering.program import Instruction, Run, Values
from inferencex.runtime.parallel.communicator import Communicator

Read = Callable[[Values], Tensor]


@dataclass
class Lowering:
    """Turns nodes into instructions, one after the other.

    constants:     static values on the device
    pages:         the pages of a layer: asked for in each step, since the pool is made after a step was measured
    max_model_len: rows that tables of angles need
    communicator:  to the other ranks, where the graph is one rank's part
    kept:          values that are asked for by name, whether instructions read them or not
    on_host:       values that are computed on the host: shapes, and what follows from them
    fallbacks:     operators that run through `onnx.reference`
    waiting:       operators that the host can launch only when it knows numbers that the device computes
    along:         values that an instruction of another node computes along with its own
    """

    graph: Graph
    constants: Constants
    pages: Callable[[int], KVPages]
    max_model_len: int
    communicator: Communicator | None = None
    kept: frozenset[str] = frozenset()
    on_host: set[str] = field(default_factory=set)
    along: set[str] = field(default_factory=set)
    instructions: list[Instruction] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)

    @property
    def device(self) -> torch.device:
        """Where the values of a step lie."""
        return self.constants.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        return self.constants.dtype

    def is_static(self, value: Value | None) -> bool:
        """Tell whether a value does not depend on the step."""
        return value in self.constants

    def read(self, value: Value | None, *, on_host: bool = False) -> Read:
        """Return what gives a value in a step, on the device or on the host. Raises BackendError for None."""
        if value is None:
            raise BackendError("an operator lacks an input that it needs")
        if self.is_static(value):
            constant = self.constants.on_host(value) if on_host else self.constants.on_device(value)
            return lambda values: constant
        name = value.name
        if on_host or name not in self.on_host:
            return lambda values: values[name]
        device = self.device
        return lambda values: _put(values[name], device)

    def activations(self, value: Value | None) -> Read:
        """Return what gives a value in the type of activations, contiguous."""
        read, dtype = self.read(value), self.dtype
        return lambda values: read(values).to(dtype).contiguous()

    def emit(
        self,
        node: Node,
        runs_on: str,
        run: Run,
        *,
        reads: Sequence[Value | None] | None = None,
        along: Sequence[Value] = (),
    ) -> None:
        """Append what computes a node's outputs, and behind them those `along` it, of other nodes.

        `reads` are its inputs unless said otherwise.
        """
        taken = node.inputs if reads is None else reads
        self.along.update(value.name for value in along)
        self.instructions.append(
            Instruction(
                name=node.outputs[0].name,
                operator=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
                runs_on=runs_on,
                reads=tuple(v.name for v in taken if v is not None and not self.is_static(v)),
                writes=tuple(v.name or None for v in (*node.outputs, *along)),
                run=run,
            )
        )


def _put(numbers: Tensor, device: torch.device) -> Tensor:
    """Return the few numbers of a shape on the device, without a copy, which waits and which no recording can hold."""
    parts = [torch.full((1,), number, dtype=numbers.dtype, device=device) for number in numbers.reshape(-1).tolist()]
    if not parts:
        return torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
    return torch.cat(parts).view(numbers.shape)


def input_of(node: Node, place: int) -> Value | None:
    """Return an input, or None where the node leaves it out."""
    return node.inputs[place] if place < len(node.inputs) else None


Handler = Callable[[Lowering, Node], bool]
Handlers = Mapping[tuple[str, str], tuple[Handler, ...]]
