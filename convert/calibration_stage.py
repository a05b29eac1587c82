"""The stage of a conversion that calibrates: its options, its text, its work directory, its progress."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from inferencex.convert.calibrate.arithmetic import product_dtype
from inferencex.convert.calibrate.data import CalibrationOptions, CalibrationSet, load_calibration
from inferencex.convert.calibrate.result import CalibratedWeights
from inferencex.convert.calibrate.run import BlockwiseCalibration, CalibrationLimits
from inferencex.convert.calibrate.self_text import Sampler
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.native import _gram
from inferencex.convert.quantize import TensorPlan
from inferencex.convert.quantize.composition import Composition
from inferencex.convert.quantize.refine.blockwise import BLOCK_SCHEDULE
from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.bundle.staging import scratch_folder
from inferencex.formats.kv_cache import KVFormat

BLOCK_REFINEMENT = BLOCK_SCHEDULE
"""What `--effort best` does with each block."""
_ACTIVATION_BYTES = 2 << 30  # more go to disk; no result depends on it


@dataclass(frozen=True)
class CalibratedModel:
    """What the calibration stage leaves: the weights, the text they were calibrated on, and where they are kept."""

    weights: CalibratedWeights
    data: CalibrationSet
    work: WorkDir


@dataclass(frozen=True)
class CalibrationStage:
    """Everything the stage reads.

    effort:    `fast`, `normal` or `best`, which `composition` is of
    output:    the bundle to be; scratch files lie beside it
    work_dir:  where finished blocks are kept for another run; None keeps them only while this one lasts
    kv_cache:  the format that keys and values get scales for; None for none
    """

    model: ir.Model
    plans: Sequence[TensorPlan]
    sources: Mapping[str, ParameterSource]
    checkpoint: Checkpoint
    composition: Composition
    effort: str
    options: CalibrationOptions
    vocab_size: int
    output: Path
    work_dir: Path | None
    threads: int | None
    kv_cache: KVFormat | None = None

    def load(self, sampler: Sampler | None) -> CalibrationSet:
        """Read the text, or let the source model write it. Raises OptionError, SourceError."""
        return load_calibration(self.options, self.checkpoint.files, vocab_size=self.vocab_size, sampler=sampler)

    @contextmanager
    def run(self, data: CalibrationSet, progress: Callable[[int, int, str], None]) -> Iterator[CalibratedModel]:
        """Calibrate, and yield the result, which lives as long as the context.

        `progress(done, total, what)` is called after each block. Raises OptionError, SourceError or
        QuantizationError; KeyboardInterrupt says how to go on.
        """
        with scratch_folder(self.output) as scratch:
            fingerprint = {
                **conversion_fingerprint(self.checkpoint, data, self.effort),
                "plans": [
                    [p.name, list(p.shape), p.method, None if p.scheme is None else asdict(p.scheme)]
                    for p in self.plans
                ],
                "kv_cache": self.kv_cache,
            }
            work = WorkDir(self.work_dir or scratch / "work", fingerprint)
            activations = scratch / "activations"
            activations.mkdir()
            threads = self.threads or len(os.sched_getaffinity(0))
            calibration = BlockwiseCalibration(
                self.model,
                self.plans,
                self.sources,
                self.composition,
                torch.from_numpy(data.token_ids),
                work,
                CalibrationLimits(_ACTIVATION_BYTES, activations, threads),
                BLOCK_REFINEMENT if self.effort == "best" else None,
                self.kv_cache,
            )
            try:
                calibration.run(lambda done, total, block: progress(done, total, _describe(block)))
                yield CalibratedModel(CalibratedWeights(work, calibration.finished_blocks), data, work)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(self._how_to_go_on()) from None
            finally:
                work.close()

    def _how_to_go_on(self) -> str:
        if self.work_dir is None:
            return "nothing was kept; with --work-dir DIR finished blocks survive, and the same command goes on"
        return f"finished blocks are in {self.work_dir}; the same command goes on from there"


def conversion_fingerprint(checkpoint: Checkpoint, data: CalibrationSet, effort: str) -> dict[str, Any]:
    """Say everything that the numbers of a conversion depend on, but for the formats of weights."""
    return {
        "source": dict(checkpoint.provenance()),
        "config": json.loads(json.dumps(checkpoint.config.to_dict(), default=str)),
        "files": [[file.path.name, file.size, file.path.stat().st_mtime_ns] for file in checkpoint.weight_files],
        "calibration": data.source,
        "effort": effort,
        "products": [str(product_dtype()), _gram.supported()],
        "held_out": hashlib.sha256(data.held_out.astype("<i8").tobytes()).hexdigest(),
        "tools": {name: version(name) for name in ("inferencex", "torch", "transformers")},
    }


def _describe(block: FinishedBlock) -> str:
    """Say what came of a block: its first layer's name, and the error of its outputs."""
    errors = [layer["output_error"] for layer in block.report if layer["output_error"] is not None]
    parts = [f"output error {100 * max(errors):.2f} %"] if errors else []
    parts += [f"keys {100 * kv['keys_error']:.2f} %, values {100 * kv['values_error']:.2f} %" for kv in block.kv_report]
    return ", ".join(parts)
