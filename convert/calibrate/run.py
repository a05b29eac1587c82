"""Calibrate a model block by block: gather what its linears read, quantize them, go on with what the quantized model
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from torch import Tensor

from inferencex.convert.calibrate.activations import ActivationStore
from inferencex.convert.calibrate.arithmetic import freed_memory_kept, one_thread_each, product_dtype
from inferencex.convert.calibrate.blocks import Block, cut_blocks
from inferencex.convert.calibrate.factors import absorb, effective_weights
from inferencex.convert.calibrate.key_values import KeyValueCalibration, attention_layers
from inferencex.convert.calibrate.layers import LayerQuantizer
from inferencex.convert.calibrate.reconstruction import BlockReconstruction, BlockRunner, final_weights
from inferencex.convert.calibrate.routing import Routing
from inferencex.convert.calibrate.sharing import shared_inputs
from inferencex.convert.calibrate.streams import Streams
from inferencex.convert.calibrate.whole_model import as_read
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize import TensorPlan
from inferencex.convert.quantize.composition import Composition
from inferencex.convert.quantize.refine import Schedule
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.kv_cache import KVFormat


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
    not computed again. With `refinement` every block is refined for so long; with `kv_cache` scales are chosen for keys
    and values in this format, after the RoPE that stands before Attention. `finished_blocks` are the blocks that there
    will be.
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
        refinement: Schedule | None = None,
        kv_cache: KVFormat | None = None,
    ) -> None:
        self._graph = model.graph
        self._plans = {p.name: p for p in plans if p.scheme is not None and p.is_stored and p.role in _CALIBRATED}
        self._sources, self._composition = sources, composition
        self._token_ids, self._work, self._limits = token_ids, work, limits
        self._refinement, self._kv_cache = refinement, kv_cache
        self.blocks = cut_blocks(model.graph, shared_inputs(model, self._plans))
        last = max((block.index for block in self.blocks if self._decides(block)), default=-1)
        self.finished_blocks = range(last + 1)

    def _decides(self, block: Block) -> bool:
        """Tell whether there is anything to choose in a block."""
        keeps_state = self._kv_cache is not None and bool(attention_layers(block.nodes))
        return keeps_state or any(stage.shared for stage in block.stages)

    def run(self, progress: Callable[[int, int, FinishedBlock], None]) -> None:
        """Finish every block; `progress(done, total, block)` is called after each.

        Raises QuantizationError when activations are not finite or a weight cannot be quantized.
        """
        limits = self._limits
        store = ActivationStore(limits.scratch, limits.activation_bytes)
        with one_thread_each(), self._memory(), ThreadPoolExecutor(limits.threads) as pool:
            refined = self._refinement is not None
            streams = Streams(
                self._graph, self._token_ids, store, pool, with_source=refined, sequences=1 if refined else None
            )
            quantizer = LayerQuantizer(
                self._plans, self._composition, Routing(self._graph), streams, pool, limits.threads
            )
            key_values = None if self._kv_cache is None else KeyValueCalibration(self._kv_cache, store, pool)
            for index in self.finished_blocks:
                finished = self._finish(self.blocks[index], streams, quantizer, key_values)
                progress(index + 1, len(self.finished_blocks), finished)

    def _memory(self) -> AbstractContextManager[None]:
        return nullcontext() if self._refinement is None else freed_memory_kept()

    def _finish(
        self,
        block: Block,
        streams: Streams,
        quantizer: LayerQuantizer,
        key_values: KeyValueCalibration | None,
    ) -> FinishedBlock:
        originals = {name: self._evaluate(name) for name in block.weights}
        source = as_read(block.nodes, originals)
        known = self._work.load(block.index) if self._work.finished(block.index) else None
        finished = known or FinishedBlock()
        quantized = dict(source)
        before = [streams.values(batch) for batch in range(streams.batches)] if self._refinement is not None else []
        for stage in block.stages:
            attended = key_values.observe if key_values is not None and known is None else None
            streams.advance(stage, {"source": source, "quantized": quantized}, attended)
            for shared in stage.shared:
                inner = known is None and streams.compute_inner(shared.value, quantized)
                if known is None:
                    quantizer.quantize(shared, originals, finished)
                if inner:
                    streams.drop(shared.value)
                quantized.update((n, w.to(product_dtype())) for n, w in effective_weights(shared, finished).items())
        if known is None:
            absorb(block, originals, finished)
            if key_values is not None:
                key_values.finish(block, streams.batches, originals, finished)
            if self._refinement is not None:
                reconstruction = BlockReconstruction(self._graph, streams, self._refinement, self._limits.threads)
                reconstruction.refine(block, before, originals, finished)
            self._work.save(block.index, finished)
        if self._refinement is not None:
            runner, weights = BlockRunner(self._graph, block), final_weights(block, originals, finished)
            streams.replace(lambda batch: runner.run(before[batch], weights, streams.sequences))
        return finished

    def _evaluate(self, name: str) -> Tensor:
        value = self._graph.initializers[name]
        return expression_of(value).evaluate(lambda parameter: self._sources[parameter].load())


_CALIBRATED = ("linear", "experts", "head")
