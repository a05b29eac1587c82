"""Captured graphs of tiny models with their weights in memory, for tests of calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from inferencex.convert.calibrate.blocks import Block, cut_blocks
from inferencex.convert.calibrate.executor import BlockExecutor, step_inputs
from inferencex.convert.calibrate.sharing import SharedInput, shared_inputs
from inferencex.convert.capture import capture
from inferencex.convert.passes import optimize
from inferencex.convert.passes.editing import is_weight
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.roles import weight_roles
from tests.architectures.shrink import tiny_config
from tests.architectures.zoo import tiny_model

MAX_POSITIONS = 64


@dataclass
class TinyGraph:
    """A model as `transformers` runs it, its optimized graph, and every weight of that graph in float32."""

    module: nn.Module
    model: ir.Model
    weights: dict[str, Tensor]
    shared: list[SharedInput]
    blocks: list[Block]

    def logits(self, token_ids: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Run the blocks one after the other on int64 `[S, L]`; float32 `[S, L, vocab]`."""
        executor = BlockExecutor(self.model.graph, torch.float32)
        values = step_inputs(self.model.graph, token_ids)
        for block in self.blocks:
            for stage in block.stages:
                given = {name: weights[name] for name in stage.weights}
                values = executor.run(stage, values, given, len(token_ids))
        (name,) = values
        return values[name].reshape(*token_ids.shape, -1)


def tiny_graph(name: str, **overrides: object) -> TinyGraph:
    """Capture a tiny model of an architecture with random weights."""
    module = tiny_model(name, **overrides)
    captured = capture(tiny_config(name, **overrides))
    model = optimize(captured, max_positions=MAX_POSITIONS).model
    state = module.state_dict()
    weights = {
        name: expression_of(value).evaluate(lambda key: state[key])
        for name, value in model.graph.initializers.items()
        if is_weight(value)
    }
    quantized = {info.name for info in weight_roles(model) if info.role in ("linear", "experts")}
    shared = shared_inputs(model, quantized)
    return TinyGraph(module, model, weights, shared, cut_blocks(model.graph, shared))


def random_tokens(sequences: int, length: int, seed: int = 0) -> Tensor:
    """Make token ids that every tiny vocabulary has."""
    return torch.randint(0, 250, (sequences, length), generator=torch.Generator().manual_seed(seed))
