"""The stage of a conversion that measures how much each weight minds each format."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx_ir as ir

from inferencex.convert.calibrate.data import CalibrationSet
from inferencex.convert.calibrate.run import CalibrationLimits
from inferencex.convert.calibrate.sensitivity import Candidate, Sensitivities, SensitivityMeasurement, looked_at
from inferencex.convert.calibrate.work_dir import FinishedBlock, WorkDir
from inferencex.convert.quantize import TensorScheme
from inferencex.convert.source.parameter import ParameterSource
from inferencex.formats.bundle.staging import scratch_folder

_MEASURED = "sensitivity"
_ACTIVATION_BYTES = 2 << 30  # more go to disk; no result depends on it


@dataclass(frozen=True)
class SensitivityStage:
    """Everything the stage reads.

    schemes: the schemes that each weight may have
    output:  the bundle to be; scratch files lie beside it
    work:    keeps the result for another run; None keeps nothing
    """

    model: ir.Model
    schemes: Mapping[str, Sequence[TensorScheme]]
    sources: Mapping[str, ParameterSource]
    data: CalibrationSet
    output: Path
    work: WorkDir | None
    threads: int | None

    def run(self, progress: Callable[[int, int, str], None]) -> Sensitivities:
        """Measure, or read what an earlier run has measured; `progress(done, total, what)` counts blocks.

        Raises QuantizationError.
        """
        if self.work is not None and self.work.finished(_MEASURED):
            return _restored(self.work.load(_MEASURED))
        with scratch_folder(self.output) as scratch:
            limits = CalibrationLimits(_ACTIVATION_BYTES, scratch, self.threads or len(os.sched_getaffinity(0)))
            measurement = SensitivityMeasurement(
                self.model,
                self.schemes,
                self.sources,
                looked_at(self.data.token_ids),
                limits,
                int(self.data.source["seed"]),
            )
            found = measurement.run(lambda done, total: progress(done, total, "blocks"))
        if self.work is not None:
            self.work.save(_MEASURED, _kept(found))
        return found


def _kept(found: Sensitivities) -> FinishedBlock:
    return FinishedBlock(
        report=[{"name": name, "candidates": [asdict(c) for c in candidates]} for name, candidates in found.items()]
    )


def _restored(kept: FinishedBlock) -> Sensitivities:
    return {
        entry["name"]: [
            Candidate(TensorScheme(**candidate["scheme"]), candidate["nbytes"], candidate["rise"])
            for candidate in entry["candidates"]
        ]
        for entry in kept.report
    }
