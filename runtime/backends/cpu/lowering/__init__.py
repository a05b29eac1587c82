"""From the IR graph to a program of the native module: instructions, their operands, and a memory plan."""

from inferencex.runtime.backends.cpu.lowering.context import Instruction, LoweringOptions
from inferencex.runtime.backends.cpu.lowering.lower import LoweredProgram, lower_graph
from inferencex.runtime.backends.graph.layer_shapes import LayerShape, kv_scales_of, layer_shapes
from inferencex.runtime.backends.graph.well_formed import check_nodes

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
