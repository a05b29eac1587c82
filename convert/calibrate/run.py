"""Calibrate a model block by block: gather what its linears read, quantize them, go on with what the quantized model
computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.arithmetic import one_thread_each, product_dtype
from inferencex.convert.calibrate.blocks import Block, cut_blocks
from inferencex.convert.calibrate.factors import absorb, effective_weights
from inferencex.convert.calibrate.layers import LayerQuantizer
from inferencex.convert.calibrate.routing import Routing
from inferencex.convert.calibrate.sharing import shared_inputs
from inferencex.convert.calibrate.streams import Streams
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize import TensorPlan
from inferencex.convert.quantize.composition import Composition
from inferencex.convert.source.parameter import ParameterSource


@dataclass(frozen=True)
class CalibrationLimits:
    """What calibration may use.

    activation_bytes:  memory for activations; more goes to `scratch`
    scratch:           a directory for them, empty, which the caller removes
    threads:           threads that work
    """

    activation_bytes: int
    scratch: Path
    threads: int


class BlockwiseCalibration:
    """The calibrated quantization of one model.

    `token_ids` is int64 `[samples, length]`. `work` keeps finished blocks; those that it has already are executed and
    not computed again. `finished_blocks` are the blocks that there will be.
    """

    def __init__(
        self,
        model: ir.Model,
        plans: Sequence[TensorPlan],
        sources: Mapping[str, ParameterSource],
        composition: Composition,
        token_ids: Tensor,
        work: WorkDir,
        limits: CalibrationLimits,
    ) -> None:
        self._graph = model.graph
        self._plans = {p.name: p for p in plans if p.scheme is not None and p.is_stored and p.role in _CALIBRATED}
        self._sources, self._composition = sources, composition
        self._token_ids, self._work, self._limits = token_ids, work, limits
        self.blocks = cut_blocks(model.graph, shared_inputs(model, self._plans))
        last = max((block.index for block in self.blocks if any(stage.shared for stage in block.stages)), default=-1)
        self.finished_blocks = range(last + 1)

    def run(self, progress: Callable[[int, int, FinishedBlock], None]) -> None:
        """Finish every block; `progress(done, total, block)` is called after each.

        Raises QuantizationError when activations are not finite or a weight cannot be quantized.
        """
        limits = self._limits
        store = ActivationStore(limits.scratch, limits.activation_bytes)
        with one_thread_each(), ThreadPoolExecutor(limits.threads) as pool:
            streams = Streams(
                self._graph, self._token_ids, store, pool, with_source=False
            )
            quantizer = LayerQuantizer(
                self._plans, self._composition, Routing(self._graph), streams, pool, limits.threads
            )
            for index in self.finished_blocks:
                finished = self._finish(self.blocks[index], streams, quantizer)
                progress(index + 1, len(self.finished_blocks), finished)

    def _finish(self, block: Block, streams: Streams, quantizer: LayerQuantizer) -> FinishedBlock:
        looked_up = {str(node.inputs[0].name) for node in block.nodes if node.op_type == "Gather" and node.inputs[0]}
        originals = {name: self._evaluate(name) for name in block.weights}
        source = {name: w if name in looked_up else _for_products(w) for name, w in originals.items()}
        known = self._work.load(block.index) if self._work.finished(block.index) else None
        finished = known or FinishedBlock()
        quantized = dict(source)
        for stage in block.stages:
            streams.advance(stage, {"source": source, "quantized": quantized})
            for shared in stage.shared:
                inner = known is None and streams.compute_inner(shared.value, quantized)
                if known is None:
                    quantizer.quantize(shared, originals, finished)
                if inner:
                    streams.drop(shared.value)
                quantized.update((n, _for_products(w)) for n, w in effective_weights(shared, finished).items())
        if known is None:
            absorb(block, originals, finished)
            self._work.save(block.index, finished)
        return finished

    def _evaluate(self, name: str) -> Tensor:
        value = self._graph.initializers[name]
        return expression_of(value).evaluate(lambda parameter: self._sources[parameter].load())


_CALIBRATED = ("linear", "experts", "head")


def _for_products(weight: Tensor) -> Tensor:
    """Return a weight as it is multiplied: matrices in the dtype of products, vectors in float32."""
    if not weight.is_floating_point():
        return weight
    return weight.to(product_dtype() if weight.dim() >= 2 else torch.float32)
