"""Lower a whole graph: each node by the first way that fits, the most special one first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.graph import Graph, Node, Value
from inferencex.formats.records import record
from inferencex.runtime.backends.cpu.lowering import (
    arrangement,
    attention,
    collectives,
    experts,
    fallback,
    generic,
    linear,
    norms,
    quantization,
)
from inferencex.runtime.backends.cpu.lowering.context import Instruction, Lowering, LoweringOptions
from inferencex.runtime.backends.cpu.lowering.extents import Extent, Symbol, extent_named
from inferencex.runtime.backends.cpu.lowering.integers import evaluate_integers
from inferencex.runtime.backends.cpu.lowering.layer_state import StateLayout, layout_of
from inferencex.runtime.backends.cpu.lowering.memory_plan import MemoryPlan, plan_memory
from inferencex.runtime.backends.cpu.lowering.views import View
from inferencex.runtime.backends.cpu.native import _cpu
from inferencex.runtime.backends.graph.layer_shapes import layer_shapes
from inferencex.runtime.backends.graph.static_values import NATIVE_TYPES, StaticValues
from inferencex.runtime.backends.graph.well_formed import naming
from inferencex.runtime.backends.head import find_head
from inferencex.runtime.parallel.names import ALL_GATHER, ALL_REDUCE, PARALLEL_DOMAIN

Handler = Callable[[Lowering, Node], bool]

_INPUTS = {
    "token_ids": Symbol.TOKENS,
    "positions": Symbol.TOKENS,
    "logit_rows": Symbol.ROWS,
    "prompt_lengths": Symbol.TOKENS,
}

_SPECIAL: dict[tuple[str, str], tuple[Handler, ...]] = {
    ("", "Gemm"): (linear.lower_gemm,),
    ("", "MatMul"): (linear.lower_matmul,),
    ("", "DequantizeLinear"): (quantization.lower_dequantize,),
    ("", "Gather"): (experts.lower_embedding, arrangement.HANDLERS["Gather"]),
    ("", "RMSNormalization"): (norms.lower_norm,),
    ("", "LayerNormalization"): (norms.lower_norm,),
    ("", "RotaryEmbedding"): (attention.lower_rotary,),
    ("", "Gelu"): (norms.lower_activation,),
    ("", "Relu"): (norms.lower_activation,),
    ("", "Sigmoid"): (norms.lower_activation,),
    ("", "ConstantOfShape"): (generic.lower_fill,),
    (DOMAIN, "AddRMSNormalization"): (norms.lower_norm,),
    (DOMAIN, "AddLayerNormalization"): (norms.lower_norm,),
    (DOMAIN, "GatedActivation"): (norms.lower_gated,),
    (DOMAIN, "Attention"): (attention.lower_attention,),
    (DOMAIN, "Experts"): (experts.lower_experts,),
    (DOMAIN, "ExpertLinear"): (experts.lower_expert_linear,),
    (PARALLEL_DOMAIN, ALL_REDUCE): (collectives.lower_all_reduce,),
    (PARALLEL_DOMAIN, ALL_GATHER): (collectives.lower_all_gather,),
}


@record(frozen=True, eq=False)
class HiddenStates:
    """What the head reads.

    view:         its place in the arena, float32 `[rows, hidden]`
    instructions: how many of the program, from the first on, compute it
    """

    view: View
    instructions: int


@record(frozen=True, eq=False)
class LoweredProgram:
    """A graph as the native module runs it.

    inputs:    places of the graph's inputs in the arena, int64
    logits:    place of the result, float32 `[rows, vocab]`
    hidden:    None where the graph does not end in a head that reads one row for each row of logits
    state:     where each layer's state lies in the pool
    fallbacks: operators without a native kernel, which run through `onnx.reference`
    widened:   weights that no kernel reads as they are stored, and that take float32's memory instead
    """

    instructions: tuple[Instruction, ...]
    inputs: Mapping[str, View]
    logits: View
    hidden: HiddenStates | None
    state: StateLayout
    fallbacks: tuple[str, ...]
    widened: tuple[str, ...]
    memory: MemoryPlan


def lower_graph(graph: Graph, tensor: Callable[[str], NDArray[Any]], options: LoweringOptions) -> LoweredProgram:
    """Lower a graph of the IR dialect; `tensor(name)` returns a stored tensor, memory-mapped.

    Raises BackendError, naming the node, for what can be neither lowered nor run by `onnx.reference`.
    """
    layers = layer_shapes(graph)
    state = layout_of(layers, options.block_size, options.kv_dtype)
    lowering = Lowering(
        graph=graph,
        static=StaticValues(graph, tensor),
        options=options,
        native_kinds=frozenset(_cpu.operation_kinds()),
        block_layout=_cpu.block_layout,
        layers=layers,
        block_stride=state.block_stride,
    )
    inputs = _place_inputs(lowering)
    attention.absorb_rotations(lowering)
    head = find_head(graph.outputs[0], lambda value: value in lowering.static) if graph.outputs else None
    if head is not None:
        lowering.kept.append(head.hidden)
    _absorb_explicit_quantization(lowering)
    hidden = None
    for node in graph:
        if not lowering.static.holds_any(node.outputs):
            with naming(node):
                if head is not None and node is head.node:
                    hidden = _hidden_states(lowering, head.hidden)
                _lower_node(lowering, node)
    logits = _logits(lowering)
    instructions = tuple(lowering.instructions)
    kept_until = {logits.storage: len(instructions)}
    if hidden is not None:
        kept_until.setdefault(hidden.view.storage, hidden.instructions)
    memory = plan_memory(instructions, [*inputs.values()], options.max_tokens, options.max_tokens, kept_until)
    return LoweredProgram(
        instructions, inputs, logits, hidden, state, tuple(lowering.fallbacks), tuple(lowering.widened), memory
    )


def _place_inputs(lowering: Lowering) -> dict[str, View]:
    places = {}
    for value in lowering.graph.inputs:
        symbol = _INPUTS.get(value.name)
        if symbol is None:
            raise BackendError(f"the graph has an unknown input {value.name!r}; expected {', '.join(_INPUTS)}")
        places[value.name] = lowering.define(value, "i64", (Extent(1, symbol),))
    return places


def _absorb_explicit_quantization(lowering: Lowering) -> None:
    """Mark the nodes that quantize activations; integer linears, or what dequantizes, compute them along."""
    for node in lowering.graph:
        if node.op_type == "DequantizeLinear":
            with naming(node):
                quantization.absorb_quantization(lowering, node)


def _lower_node(lowering: Lowering, node: Node) -> None:
    if not lowering.absorbed.isdisjoint([value.name for value in node.outputs]):
        return
    if evaluate_integers(lowering, node):
        return
    special = _SPECIAL.get((node.domain, node.op_type), ())
    if not special and node.domain == "" and node.op_type in arrangement.HANDLERS:
        special = (arrangement.HANDLERS[node.op_type],)
    for handler in special:
        if handler(lowering, node):
            return
    if not generic.lower_generic(lowering, node):
        _lower_to_fallback(lowering, node)


def _lower_to_fallback(lowering: Lowering, node: Node) -> None:
    if node.domain == DOMAIN:
        raise BackendError("its operands are not those that the IR dialect describes")
    outputs: list[View | None] = []
    inputs = [None if value is None else lowering.view(value) for value in node.inputs]
    narrow = next((view.dtype for view in inputs if view is not None and view.dtype in ("f16", "bf16", "f8e4m3")), None)
    if narrow is not None:
        raise BackendError(
            f"operator {node.domain or 'ai.onnx'}::{node.op_type} has no native kernel, and one of its inputs is "
            f"{narrow}; only values of full width run through onnx.reference"
        )
    for value in node.outputs:
        dims = [extent_named(dimension) for dimension in value.shape or ()]
        dtype = NATIVE_TYPES.get(value.dtype) if value.dtype is not None else None
        if not value.name or (not value.consumers() and value is not node.outputs[0]):
            outputs.append(None)
            continue
        if value.shape is None or dtype is None or any(size is None for size in dims):
            raise BackendError(
                f"operator {node.domain or 'ai.onnx'}::{node.op_type} has no native kernel, and the graph does not say "
                f"what shape its result {value.name!r} has"
            )
        outputs.append(lowering.define(value, dtype[0], [size for size in dims if size is not None]))
    name = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    lowering.fallbacks.append(name)
    instruction = Instruction(
        "Fallback",
        node.outputs[0].name,
        tuple(inputs),
        tuple(outputs),
        {"operator": name},
        fallback.step_function(node),
    )
    lowering.instructions.append(instruction)


def _hidden_states(lowering: Lowering, value: Value) -> HiddenStates | None:
    """Return what the head, which is about to be lowered, reads; None where its rows are not those of the logits."""
    view = lowering.view(value)
    if view.rank != 2 or view.dtype != "f32" or view.dims[0] != Extent(1, Symbol.ROWS) or not view.dims[1].is_constant:
        return None
    if not view.storage.is_arena or view.offset or not view.is_contiguous:
        copy = lowering.allocate("f32", view.dims)
        lowering.emit("Copy", "hidden_states", [view], [copy])
        view = copy
    return HiddenStates(view, len(lowering.instructions))


def _logits(lowering: Lowering) -> View:
    outputs: Sequence[object] = lowering.graph.outputs
    if len(outputs) != 1:
        raise BackendError(f"the graph has {len(outputs)} outputs; expected the logits alone")
    view = lowering.view(lowering.graph.outputs[0])
    if view.rank != 2 or view.dtype != "f32" or view.dims[0] != Extent(1, Symbol.ROWS) or not view.dims[1].is_constant:
        raise BackendError(
            f"the logits are {view.dtype} [{', '.join(map(str, view.dims))}]; expected f32 [rows, vocab]"
        )
    if not view.storage.is_arena or view.offset or not view.is_contiguous:
        copy = lowering.allocate("f32", view.dims)
        lowering.emit("Copy", "logits", [view], [copy])
        return copy
    return view
