"""A graph as a list of launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from inferencex.runtime.backends.triton.step_inputs import StepInputs

Values = dict[str, Tensor]
"""What a step has computed so far, by name."""

Run = Callable[[Values, StepInputs], tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class Instruction:
    """What computes some values of a step.

    name:     of its first result
    operator: of the graph
    runs_on:  "triton", "torch", "host" for shapes, "exchange" with other ranks, or "onnx.reference", which copies to
              the host and back
    reads:    the step's values that it takes
    writes:   the values that it gives; None where nobody reads one
    run:      computes them, in this order
    """

    name: str
    operator: str
    runs_on: str
    reads: tuple[str, ...]
    writes: tuple[str | None, ...]
    run: Run = field(repr=False)


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions in an order in which they can run.

    ended:      for each instruction, the values that nobody reads after it
    logits:     name of the result `[rows, vocab]`
    hidden:     name of what the head reads; None where the graph does not end in a head that reads `[rows, hidden]`
    hidden_size: its width
    fallbacks:  operators that run through `onnx.reference`
    exchanges_stay: whether exchanges with other ranks, if there are any, go from device to device
    waiting:    operators that read, on the host, numbers which the step computes, such as how many to take
    """

    instructions: tuple[Instruction, ...]
    ended: tuple[tuple[str, ...], ...]
    logits: str
    hidden: str | None
    hidden_size: int | None
    fallbacks: Mapping[str, int]
    exchanges_stay: bool = True
    waiting: Mapping[str, int] = field(default_factory=dict)

    @property
    def stays_on_device(self) -> bool:
        """Tell whether a step can be captured in a graph: nothing in it waits for the device."""
        return not self.fallbacks and not self.waiting and self.exchanges_stay

    def run(self, inputs: Values, step: StepInputs, wanted: str) -> Tensor:
        """Launch a step on the current stream until the value `wanted` is there, and return it."""
        values = dict(inputs)
        for instruction, ended in zip(self.instructions, self.ended, strict=True):
            results = instruction.run(values, step)
            for name, result in zip(instruction.writes, results, strict=False):
                if name is not None and result is not None:
                    values[name] = result
            if wanted in instruction.writes:
                break
            for name in ended:
                values.pop(name, None)
        return values[wanted]
