"""A graph ready to execute steps in torch float32, node by node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.formats.dialect.names import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.formats.kv_cache import KVScales, kv_scales_by_layer
from inferencex.runtime.backends.base import BackendOptions, Float32Array, ModelFacts, StepBatch
from inferencex.runtime.backends.head import find_head
from inferencex.runtime.backends.kv_cache import calibrated_scales
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.attention import AttentionState
from inferencex.runtime.backends.reference.static_values import StaticValues

_STEP_INPUTS = {"token_ids", "positions", "logit_rows", "prompt_lengths"}


def _width(value: ir.Value | None) -> int:
    """Return the last dimension of a value. Raises BackendError when the graph does not fix it."""
    shape = None if value is None else value.shape
    width = shape[-1] if shape else None
    if not isinstance(width, int):
        raise BackendError(f"value {value and value.name!r} has shape {shape}; expected an integer as last dimension")
    return width


def _has_rows_of(hidden: ir.Value, logits: ir.Value) -> bool:
    """Tell whether a value has one row for each row of logits."""
    return (
        hidden.shape is not None
        and logits.shape is not None
        and len(hidden.shape) == 2
        and str(hidden.shape[0]) == str(logits.shape[0])
        and isinstance(hidden.shape[1], int)
    )


def kv_bytes_per_token(graph: ir.Graph) -> tuple[int, int]:
    """Return the number of layers that keep keys and values, and their bytes per token in float32."""
    layers: dict[int, int] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type == "Attention":
            k, v = node.inputs[1], node.inputs[2]
            layers[int(node.attributes["layer"].value)] = 4 * (_width(k) + _width(v))
    return len(layers), sum(layers.values())


def _kv_scales(graph: ir.Graph) -> dict[int, KVScales]:
    nodes = [node for node in graph if node.domain == DOMAIN and node.op_type == "Attention"]
    return kv_scales_by_layer(
        (int(node.attributes["layer"].value), interpreter.attributes_of(node), str(node.outputs[0].name))
        for node in nodes
    )


Environment = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Instruction:
    """A node that runs in every step, with what it needs looked up once.

    run:      computes its outputs from the step's values
    outputs:  names of those
    ended:    names of the values that nobody reads after it
    """

    run: Callable[[Environment], tuple[Tensor, ...]]
    outputs: tuple[str, ...]
    ended: tuple[str, ...]


class ReferenceExecutable:
    """Executes a token-major graph of the IR dialect.

    `model` has inputs `token_ids`, `positions`, `logit_rows` (and `prompt_lengths` where RoPE asks for it), and one
    output `logits`. Weights are converted to float32 when first used and kept if `keep_weights`, else dropped after
    each use, so that a model larger than memory can still be executed.

    hidden_size: only there when the graph ends in a head, which makes this a `HiddenStatesExecutable`
    """

    hidden_size: int

    def __init__(
        self,
        model: ir.Model,
        options: BackendOptions,
        *,
        max_model_len: int,
        length_independent_up_to: int | None = None,
        keep_weights: bool = True,
    ) -> None:
        graph = model.graph
        self._graph = graph
        self._nodes = list(graph)
        self.static = StaticValues(graph, keep=keep_weights)
        head = find_head(graph.outputs[0], lambda value: str(value.name) in self.static)
        self._hidden = None if head is None or not _has_rows_of(head.hidden, graph.outputs[0]) else head.hidden
        if self._hidden is not None:
            self.hidden_size = _width(self._hidden)
        self._instructions = self._compile()
        (logits,) = graph.outputs
        layers, per_token = kv_bytes_per_token(graph)
        self.facts = ModelFacts(_width(logits), max_model_len, layers, per_token, length_independent_up_to)
        self.num_blocks, self.block_size = options.blocks_for(self.facts), options.block_size
        scales = calibrated_scales(options.kv_cache_dtype, _kv_scales(graph))
        self._state = AttentionState(self.num_blocks, self.block_size, scales)
        self._logits = str(logits.name)

    def _compile(self) -> list[_Instruction]:
        """Prepare the nodes that depend on the step, in order."""
        return [
            _Instruction(self._prepared(node), tuple(str(v.name) for v in node.outputs), tuple(ended))
            for node, ended in zip(self._nodes, self._liveness(), strict=True)
            if str(node.outputs[0].name) not in self.static
        ]

    def _prepared(self, node: ir.Node) -> Callable[[Environment], tuple[Tensor, ...]]:
        """Return a function that computes a node's outputs from a step's values."""
        large = self._prepared_large(node)
        if large is not None:
            return large
        names = [None if v is None else str(v.name) for v in node.inputs]

        def inputs(values: Environment) -> list[Tensor | None]:
            return [
                None if name is None else values[name] if name in values else self.static.get(name) for name in names
            ]

        if node.domain == DOMAIN and node.op_type == "Attention":
            attributes = interpreter.attributes_of(node)
            return lambda values: (self._state.run(inputs(values), attributes),)
        run = interpreter.bind(node)
        return lambda values: run(inputs(values))

    def _prepared_large(self, node: ir.Node) -> Callable[[Environment], tuple[Tensor, ...]] | None:
        """Do as `_prepared` for a lookup or a linear on a weight too large to be converted whole, else return None."""
        if node.domain != "" or node.op_type not in ("Gather", "Gemm"):
            return None
        gathers = node.op_type == "Gather"
        weight, data = node.inputs[:2] if gathers else reversed(node.inputs[:2])
        if data is None or weight is None or not self.static.is_large(weight):
            return None
        name, bias = str(data.name), node.inputs[2] if len(node.inputs) > 2 else None

        def look_up(values: Environment) -> tuple[Tensor, ...]:
            index = values[name]
            return (self.static.rows(str(weight.name), index.reshape(-1)).reshape((*index.shape, -1)),)

        def multiply(values: Environment) -> tuple[Tensor, ...]:
            parts = [values[name] @ block().to(torch.float32).T for block in self.static.chunks(weight)]
            y = torch.cat(parts, dim=-1)
            return (y if bias is None else y + self.static.get(str(bias.name)),)

        return look_up if gathers else multiply

    def _liveness(self) -> list[list[str]]:
        """List, per node, the values that nobody reads after it."""
        last: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            for value in node.inputs:
                if value is not None:
                    last[str(value.name)] = index
        kept = {str(v.name) for v in (*self._graph.outputs, self._hidden) if v is not None}
        ends: list[list[str]] = [[] for _ in self._nodes]
        for name, index in last.items():
            if name not in kept and name not in self.static:
                ends[index].append(name)
        return ends

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step; see `Executable.step`."""
        return self._run(batch, self._logits)

    def hidden_states(self, batch: StepBatch) -> Float32Array:
        """Run one step up to the head; see `HiddenStatesExecutable`."""
        if self._hidden is None:
            raise BackendError("this bundle's graph does not end in a linear layer, so it has no hidden states to give")
        return self._run(batch, str(self._hidden.name))

    def _run(self, batch: StepBatch, wanted: str) -> Float32Array:
        """Run a step until the value called `wanted` is there, and return it."""
        with torch.inference_mode():
            environment: Environment = {}
            for value in self._graph.inputs:
                name = str(value.name)
                if name not in _STEP_INPUTS:
                    raise BackendError(
                        f"the graph has an unknown input {name!r}; expected {', '.join(sorted(_STEP_INPUTS))}"
                    )
                environment[name] = torch.from_numpy(np.asarray(getattr(batch, name), dtype=np.int64))
            self._state.begin(batch)
            for instruction in self._instructions:
                environment.update(zip(instruction.outputs, instruction.run(environment), strict=False))
                for name in instruction.ended:
                    environment.pop(name, None)
                if wanted in instruction.outputs:
                    break
            rows: Any = environment[wanted].to(torch.float32).numpy()
            return np.ascontiguousarray(rows)
