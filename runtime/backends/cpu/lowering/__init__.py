"""From the IR graph to a program of the native module: instructions, their operands, and a memory plan."""

from inferencex.runtime.backends.cpu.lowering.attention import kv_scales_of, layer_shapes
from inferencex.runtime.backends.cpu.lowering.context import Instruction, LayerShape, LoweringOptions
from inferencex.runtime.backends.cpu.lowering.lower import LoweredProgram, lower_graph
from inferencex.runtime.backends.cpu.lowering.well_formed import check_nodes

__all__ = [
    "Instruction",
    "LayerShape",
    "LoweredProgram",
    "LoweringOptions",
    "check_nodes",
    "kv_scales_of",
    "layer_shapes",
    "lower_graph",
]
