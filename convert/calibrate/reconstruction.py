"""Refine a finished block so that it makes of the quantized model's values what the source's block makes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor

from inferencex.convert.calibrate.blocks import Block
from inferencex.convert.calibrate.executor import BlockExecutor, Values
from inferencex.convert.calibrate.factors import with_divided_rows
from inferencex.convert.calibrate.streams import Streams
from inferencex.convert.calibrate.whole_model import as_read
from inferencex.convert.calibrate.work_dir import FinishedBlock
from inferencex.convert.quantize.refine import Refinable, Schedule, refine_block
from inferencex.formats.dialect.schemas import DOMAIN
from inferencex.formats.packing import QuantizedTensor

_SUMS = {("", "Add"), (DOMAIN, "AddRMSNormalization"), (DOMAIN, "AddLayerNormalization")}


def final_weights(block: Block, originals: Mapping[str, Tensor], finished: FinishedBlock) -> dict[str, Tensor]:
    """Return the weights of a finished block as the bundle will have them, in the form its nodes read."""
    weights = dict(originals)
    weights.update((name, torch.from_numpy(array.copy())) for name, array in finished.plain.items())
    weights.update((name, torch.from_numpy(tensor.dequantize())) for name, tensor in final_tensors(finished).items())
    return as_read(block.nodes, weights)


def final_tensors(finished: FinishedBlock) -> dict[str, QuantizedTensor]:
    """Return the quantized tensors of a block as the bundle will have them."""
    divisors = finished.row_divisors
    return {
        name: with_divided_rows(tensor, divisors[name]) if name in divisors else tensor
        for name, tensor in finished.quantized.items()
    }


@dataclass(frozen=True)
class BlockReconstruction:
    """Refines blocks with what the streams hold; `schedule` says for how long."""

    graph: ir.Graph
    streams: Streams
    schedule: Schedule
    threads: int

    def refine(
        self, block: Block, inputs: list[Values], originals: Mapping[str, Tensor], finished: FinishedBlock
    ) -> None:
        """Replace the numbers of `finished` by better ones.

        `inputs` are the values of the quantized stream before the block, batch by batch; the source stream stands
        behind it.
        """
        runner = BlockRunner(self.graph, block)
        fixed = final_weights(block, originals, finished)
        weights = {name: tensor for name, tensor in final_tensors(finished).items() if tensor.number == "int"}
        if not weights:
            return
        vectors = {
            name: tensor
            for name, tensor in fixed.items()
            if tensor.dim() == 1 and tensor.is_floating_point() and name not in weights
        }
        refinable = Refinable(
            weights=weights,
            sources={name: _folded(name, block, originals, finished) for name in weights},
            plain=vectors,
        )
        samples = _Samples(inputs, [runner.joined(self.streams.values(b, "source")) for b in range(len(inputs))])

        def run(values: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Values:
            return runner.joined(runner.run(values, {**fixed, **given}, self.streams.sequences))

        refined = refine_block(run, refinable, samples, self.schedule, threads=self.threads)
        finished.quantized.update(refined.result.weights)
        finished.plain.update({name: tensor.to(torch.float32).numpy() for name, tensor in refined.result.plain.items()})
        for name in refined.result.weights:
            finished.row_divisors.pop(name, None)


class BlockRunner:
    """Runs the stages of a block one after the other."""

    def __init__(self, graph: ir.Graph, block: Block) -> None:
        self._executor, self._block = BlockExecutor(graph), block
        outputs = set(block.outputs)
        made = {str(output.name) for node in block.nodes for output in node.outputs}
        self._pairs: list[tuple[str, str]] = []
        for node in graph:
            if (node.domain, node.op_type) in _SUMS and node not in block.nodes:
                first, second = (str(v.name) if v is not None else "" for v in node.inputs[:2])
                if first in outputs and second in outputs and {first, second} & made:
                    self._pairs.append((first, second))

    def run(self, values: Mapping[str, Tensor], weights: Mapping[str, Tensor], sequences: int) -> Values:
        """Return what later blocks read, of `sequences` whole sequences."""
        environment = dict(values)
        for stage in self._block.stages:
            given = {name: weights[name] for name in stage.weights}
            environment = self._executor.run(stage, environment, given, sequences)
        return environment

    def joined(self, values: Mapping[str, Tensor]) -> Values:
        """Return the floating-point values that matter later: where two are only added, their sum."""
        found = {name: value for name, value in values.items() if value.is_floating_point()}
        for first, second in self._pairs:
            if first in found and second in found:
                found[f"{first}+{second}"] = found.pop(first) + found.pop(second)
        return found


@dataclass(frozen=True)
class _Samples:
    """Values before a block, and the source's behind it, batch by batch."""

    before: list[Values]
    behind: list[Values]

    @property
    def count(self) -> int:
        return len(self.before)

    def inputs(self, sample: int) -> Values:
        return self.before[sample]

    def targets(self, sample: int) -> Values:
        return self.behind[sample]


def _folded(name: str, block: Block, originals: Mapping[str, Tensor], finished: FinishedBlock) -> Tensor:
    """Return a weight of the source with all factors in it, float32: what its quantized form stands for."""
    weight = originals[name].to(torch.float32)
    for stage in block.stages:
        for shared in stage.shared:
            if name in shared.readers and shared.value in finished.factors:
                weight = weight * torch.from_numpy(finished.factors[shared.value].copy())
    divisors = finished.row_divisors.get(name)
    return weight if divisors is None else weight / torch.from_numpy(divisors.copy())[:, None]
