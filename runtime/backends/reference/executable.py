"""A graph ready to execute steps in torch float32, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.errors import BackendError
from inferencex.runtime.backends.base import BackendOptions, Float32Array, ModelFacts, StepBatch
from inferencex.runtime.backends.reference import interpreter
from inferencex.runtime.backends.reference.attention import AttentionState

_STEP_INPUTS = {"token_ids", "positions", "logit_rows", "prompt_lengths"}


def _width(value: ir.Value | None) -> int:
    """Return the last dimension of a value. Raises BackendError when the graph does not fix it."""
    shape = None if value is None else value.shape
    width = shape[-1] if shape else None
    if not isinstance(width, int):
        raise BackendError(f"value {value and value.name!r} has shape {shape}; expected an integer as last dimension")
    return width


def kv_bytes_per_token(graph: ir.Graph) -> tuple[int, int]:
    """Return the number of layers that keep keys and values, and their bytes per token in float32."""
    layers: dict[int, int] = {}
    for node in graph:
        if node.domain == DOMAIN and node.op_type == "Attention":
            k, v = node.inputs[1], node.inputs[2]
            layers[int(node.attributes["layer"].value)] = 4 * (_width(k) + _width(v))
    return len(layers), sum(layers.values())


class ReferenceExecutable:
    """Executes a token-major graph of the IR dialect.

    `model` has inputs `token_ids`, `positions`, `logit_rows` (and `prompt_lengths` where RoPE asks for it), and one
    output `logits`. Weights are converted to float32 when first used and kept if `keep_weights`, else dropped after
    each use, so that a model larger than memory can still be executed.
    """

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
        self._keep = keep_weights
        self._nodes = list(graph)
        self._static = self._static_values()
        self._weights: dict[str, Tensor] = {}
        self._last_use = self._liveness()
        (logits,) = graph.outputs
        layers, per_token = kv_bytes_per_token(graph)
        self.facts = ModelFacts(_width(logits), max_model_len, layers, per_token, length_independent_up_to)
        self.num_blocks, self.block_size = options.blocks_for(self.facts), options.block_size
        self._state = AttentionState(self.num_blocks, self.block_size)
        self._logits = str(logits.name)

    def _static_values(self) -> dict[str, ir.Node | ir.Value]:
        """Find what does not depend on the step: initializers, and nodes on initializers alone."""
        static: dict[str, ir.Node | ir.Value] = {str(v.name): v for v in self._graph.initializers.values()}
        for node in self._nodes:
            inputs = [str(v.name) for v in node.inputs if v is not None]
            if all(name in static for name in inputs):
                static.update({str(v.name): node for v in node.outputs})
        return static

    def _liveness(self) -> list[list[str]]:
        """List, per node, the values that nobody reads after it."""
        last: dict[str, int] = {}
        for index, node in enumerate(self._nodes):
            for value in node.inputs:
                if value is not None:
                    last[str(value.name)] = index
        kept = {str(v.name) for v in self._graph.outputs}
        ends: list[list[str]] = [[] for _ in self._nodes]
        for name, index in last.items():
            if name not in kept and name not in self._static:
                ends[index].append(name)
        return ends

    def _static_value(self, name: str) -> Tensor:
        if name in self._weights:
            return self._weights[name]
        source = self._static[name]
        if isinstance(source, ir.Value):
            assert source.const_value is not None, f"initializer {name} has no value"
            result = interpreter.to_tensor(source.const_value)
            self_contained = not any(name in self._static_inputs(user) for user in self._static_users(source))
        else:
            inputs = [None if v is None else self._static_value(str(v.name)) for v in source.inputs]
            outputs = interpreter.run_node(source, inputs)
            result = dict(zip((str(v.name) for v in source.outputs), outputs, strict=True))[name]
            self_contained = True
        if self._keep and self_contained:
            self._weights[name] = result
        return result

    def _static_users(self, value: ir.Value) -> Sequence[ir.Node]:
        return [node for node in value.consumers() if str(node.outputs[0].name) in self._static]

    @staticmethod
    def _static_inputs(node: ir.Node) -> set[str]:
        return {str(v.name) for v in node.inputs if v is not None}

    def step(self, batch: StepBatch) -> Float32Array:
        """Run one step; see `Executable.step`."""
        with torch.inference_mode():
            environment: dict[str, Tensor] = {}
            for value in self._graph.inputs:
                name = str(value.name)
                if name not in _STEP_INPUTS:
                    raise BackendError(
                        f"the graph has an unknown input {name!r}; expected {', '.join(sorted(_STEP_INPUTS))}"
                    )
                environment[name] = torch.from_numpy(np.asarray(getattr(batch, name), dtype=np.int64))
            for node, ended in zip(self._nodes, self._last_use, strict=True):
                if str(node.outputs[0].name) in self._static:
                    continue
                self._run(node, batch, environment)
                for name in ended:
                    environment.pop(name, None)
            logits: Any = environment[self._logits].to(torch.float32).numpy()
            return np.ascontiguousarray(logits)

    def _run(self, node: ir.Node, batch: StepBatch, environment: dict[str, Tensor]) -> None:
        inputs: list[Tensor | None] = []
        for value in node.inputs:
            if value is None:
                inputs.append(None)
            else:
                name = str(value.name)
                inputs.append(environment[name] if name in environment else self._static_value(name))
        if node.domain == DOMAIN and node.op_type == "Attention":
            results: tuple[Tensor, ...] = (self._state.run(batch, inputs, interpreter.attributes_of(node)),)
        else:
            results = interpreter.run_node(node, inputs)
        for output, result in zip(node.outputs, results, strict=False):
            environment[str(output.name)] = result
