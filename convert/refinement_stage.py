"""The stage of a conversion that refines: the whole quantized model against the predictions of its source."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferencex.convert.calibrate.arithmetic import freed_memory_kept, one_thread_each, product_dtype
from inferencex.convert.calibrate.result import CalibratedWeights
from inferencex.convert.calibrate.whole_model import WholeModel, as_read
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.passes.editing import is_weight
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize import TensorPlan
from inferencex.convert.quantize.refine import Progress, Refinable, Windows, refine_end_to_end
from inferencex.convert.quantize.refine.end_to_end import MODEL_SCHEDULE
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.errors import OptionError

_REFINED = "refined"

REFINEMENT = MODEL_SCHEDULE
"""What `--effort best` does with the whole model."""


_BYTES_PER_WEIGHT = 20  # positions, moments, the weights as multiplied, and a gradient for each sample of a step


def check_memory(plans: Sequence[TensorPlan], available: int | None = None) -> None:
    """Refuse to refine a model that does not fit the memory there is; raises OptionError before any work.

    `available` is in bytes; by default what the machine has.
    """
    weights = sum(math.prod(plan.shape) for plan in plans if plan.scheme is not None and plan.is_stored)
    needed = weights * _BYTES_PER_WEIGHT
    present = available if available is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise OptionError(
            f"--effort best learns the whole model at once, which takes about {needed / 2**30:.1f} GiB for its "
            f"{weights:,} quantized weights, and this machine has {present / 2**30:.1f} GiB; use --effort normal"
        )


@dataclass(frozen=True)
class RefinementStage:
    """Everything the stage reads.

    work:  keeps the state of an interrupted refinement, and its result
    """

    model: ir.Model
    sources: Mapping[str, ParameterSource]
    work: WorkDir
    threads: int | None

    def run(
        self,
        calibrated: CalibratedWeights,
        token_ids: NDArray[np.int64],
        held_out: NDArray[np.int64],
        progress: Callable[[int, int, str], None],
    ) -> dict[str, Any]:
        """Refine, and let `calibrated` have the result; returns what the report says of it.

        `token_ids [samples, length]` are learned from, `held_out [windows, length]` judged by.
        """
        if not self.work.finished(_REFINED):
            with freed_memory_kept():
                refined = self._refine(calibrated, token_ids, held_out, progress)
            self.work.save(_REFINED, refined)
            self._state_file.unlink(missing_ok=True)
        finished = self.work.load(_REFINED)
        calibrated.refine(finished)
        return finished.report[0]

    @property
    def _state_file(self) -> Any:
        return self.work.path / "refinement.partial"

    def _refine(
        self,
        calibrated: CalibratedWeights,
        token_ids: NDArray[np.int64],
        held_out: NDArray[np.int64],
        progress: Callable[[int, int, str], None],
    ) -> FinishedBlock:
        originals = {
            name: self._evaluate(value) for name, value in self.model.graph.initializers.items() if is_weight(value)
        }
        read = as_read(self.model.graph, originals)
        model = WholeModel(self.model.graph, read)
        learning = _windows(model, token_ids, self.threads)
        judging = _windows(model, held_out, self.threads)
        refinable = _refinable(calibrated, originals, model.head_weights)
        learned = {*refinable.weights, *refinable.plain}
        stored = {name: _stored(calibrated, name, value) for name, value in originals.items() if name not in learned}
        fixed = as_read(self.model.graph, stored)
        del originals, read, stored

        def observe(seen: Progress) -> None:
            progress(seen.step, seen.steps, f"held-out KL {seen.held_out:.4f}, best {seen.best:.4f}")

        refined = refine_end_to_end(
            WholeModel(self.model.graph, fixed),
            refinable,
            learning,
            judging,
            REFINEMENT,
            threads=self.threads,
            observe=observe,
            state_file=self._state_file,
        )
        facts = {
            "steps": refined.steps,
            "best_step": refined.best_step,
            "before": refined.before,
            "after": refined.after,
            "schedule": asdict(REFINEMENT),
            "history": [asdict(seen) for seen in refined.history],
        }
        plain = {name: tensor.to(torch.float32).numpy() for name, tensor in refined.result.plain.items()}
        return FinishedBlock(quantized=refined.result.weights, plain=plain, report=[facts])

    def _evaluate(self, value: ir.Value) -> Tensor:
        return expression_of(value).evaluate(lambda parameter: self.sources[parameter].load())


def _stored(calibrated: CalibratedWeights, name: str, original: Tensor) -> Tensor:
    """Return a weight as calibration left it."""
    plain = calibrated.plain(name)
    if plain is not None:
        return plain
    found = calibrated.quantized(name)
    return original if found is None else torch.from_numpy(found.tensor.dequantize())


def _refinable(calibrated: CalibratedWeights, originals: Mapping[str, Tensor], head: frozenset[str]) -> Refinable:
    """Collect what may change before the head: integers with their scales, every vector (scales of norms, biases)."""
    weights = {}
    for name in calibrated.names:
        if name in head:
            continue
        found = calibrated.quantized(name)
        assert found is not None
        if found.tensor.number == "int":
            weights[name] = found.tensor
    plain = {}
    for name, original in originals.items():
        if original.dim() == 1 and original.is_floating_point() and name not in head:
            changed = calibrated.plain(name)
            plain[name] = (original if changed is None else changed).to(torch.float32)
    return Refinable(weights=weights, plain=plain)


def _windows(model: WholeModel, token_ids: NDArray[np.int64], threads: int | None) -> Windows:
    """Let the source run over windows, each by one thread; what its head reads is kept in the dtype of products."""
    ids = torch.from_numpy(token_ids)

    def target(index: int) -> Tensor:
        with torch.no_grad():
            return model.hidden({}, ids[index : index + 1]).to(product_dtype())

    with one_thread_each(), ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        return Windows(ids, torch.stack(list(pool.map(target, range(len(ids))))))
