"""From the IR graph to a list of launches on a device, and the weights that they read."""

from inferencex.runtime.backends.triton.lowering.lower import lower_graph
from inferencex.runtime.backends.triton.lowering.program import Instruction, Program

__all__ = ["Instruction", "Program", "lower_graph"]
