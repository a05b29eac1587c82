"""From a plan to a sealed bundle: calibrate, pack, write, compare with the source; again where a budget asks for it."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from inferencex.convert.calibrate.data import CalibrationOptions, CalibrationSet
from inferencex.convert.calibrate.result import CalibratedWeights
from inferencex.convert.calibrate.self_text import Sampler
from inferencex.convert.calibrate.work_dir import WorkDir
from inferencex.convert.calibration_stage import CalibrationStage, conversion_fingerprint
from inferencex.convert.capture import Captured
from inferencex.convert.compact_tokenizer import compact_tokenizer
from inferencex.convert.context import length_independent_up_to
from inferencex.convert.held_out import held_out_fidelity, source_runner
from inferencex.convert.keep_packed import Packing, say_dequantized
from inferencex.convert.kv_cache import store_scales
from inferencex.convert.mixed_precision import MixedPrecision
from inferencex.convert.pack import PackedWeight, WeightPacker
from inferencex.convert.passes import Optimized
from inferencex.convert.quantize import QuantizationScheme, TensorPlan
from inferencex.convert.quantize.effort import hurried
from inferencex.convert.refinement_stage import RefinementStage
from inferencex.convert.report import Report
from inferencex.convert.sensitivity_stage import SensitivityStage
from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.parameter import ParameterSource
from inferencex.convert.stages import Observer, Stages
from inferencex.convert.verification import Verification
from inferencex.formats.bundle import BundleWriter, Manifest
from inferencex.formats.kv_cache import KVFormat
from inferencex.runtime.text.tokenizer import TOKENIZER_FILE

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOOLS = ("inferencex", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")


@dataclass
class BundleMaker:
    """All that bundles of one model with one set of options have in common.

    calibration:  what to calibrate on; None for a conversion that does not calibrate
    kv_cache:     the format that keys and values get scales for; None for none
    sampler:      lets the source model write text
    check:        compares a bundle with its source; None where nobody asked for it
    """

    output: Path
    scheme: QuantizationScheme
    dtype: str
    effort: str
    calibration: CalibrationOptions | None
    threads: int | None
    verify_limit: float | None
    model_id: str
    checkpoint: Checkpoint
    captured: Captured
    optimized: Optimized
    sources: Mapping[str, ParameterSource]
    packing: Packing
    max_model_len: int
    sampler: Sampler
    stages: Stages
    observer: Observer
    kv_cache: KVFormat | None = None
    check: Verification | None = None
    _data: CalibrationSet | None = None

    def make(self, writer: BundleWriter, report: Report, plans: Sequence[TensorPlan], work_dir: Path | None) -> Report:
        """Write a bundle as planned up to its report, and return `report` with what became of it.

        The graph is changed. Raises InferenceXError of the kind that fits.
        """
        stages, model, advance = self.stages, self.optimized.model, self.observer.advance
        report = replace(report, notes=list(report.notes), warnings=list(report.warnings))
        with ExitStack() as stack:
            calibrated = None
            if self.calibration is not None:
                with stages("calibrate"):
                    stage = self._calibration(plans, work_dir)
                    calibrated = stack.enter_context(stage.run(self._calibration_data(stage), advance))
                    report.layers, report.kv_cache = calibrated.weights.layers, calibrated.weights.kv_layers
                    report.calibration = calibrated.data.source
            if calibrated is not None and self.effort == "best":
                with stages("refine"):
                    refinement = RefinementStage(model, self.sources, calibrated.work, self.threads)
                    judged, _ = _halves(calibrated.data.held_out)
                    report.refinement = refinement.run(calibrated.weights, calibrated.data.token_ids, judged, advance)
            with stages("quantize" if self.scheme.method != "none" else "pack"):
                weights = None if calibrated is None else calibrated.weights
                report.weights = self._pack(writer, plans, weights, report)
            with stages("write"):
                _strip_metadata(model)
                if self.kv_cache is not None and calibrated is not None:
                    store_scales(model.graph, self.kv_cache, calibrated.weights.kv_scales)
                writer.write_graph(model)
                for name, path in self.checkpoint.files.items():
                    writer.add_side_file(name, compact_tokenizer(path) if name == TOKENIZER_FILE else path)
                staged = writer.seal(self._manifest(report))
            if self.check is not None:
                with stages("verify"):
                    report.fidelity = self.check.check(staged, self.model_id, report, self.verify_limit)
            if calibrated is not None and self.check is not None:
                with stages("evaluate"):
                    held_out = calibrated.data.held_out
                    report.held_out = held_out_fidelity(
                        source_runner(self.captured, self.sources),
                        staged,
                        held_out if report.refinement is None else _halves(held_out)[1],
                        kv_cache_dtype=self.kv_cache or "float32",
                        progress=lambda done, total: advance(done, total, "held-out windows"),
                    )
        report.bundle_bytes = sum(file.stat().st_size for file in staged.rglob("*") if file.is_file())
        report.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        return report

    def make_within_budget(
        self,
        mixed: MixedPrecision,
        new_writer: Callable[[], BundleWriter],
        report: Report,
        work_dir: Path | None,
    ) -> tuple[BundleWriter, Report]:
        """Measure how sensitive the weights are, and make bundles until one keeps to the budget; return that one.

        `new_writer` opens a writer; those of other attempts are abandoned. Raises InferenceXError of the kind that
        fits, OptionError or QuantizationError where the budget cannot be kept to.
        """
        original = self.optimized
        with self.stages("sensitivity"):
            data = self._calibration_data(self._calibration([], work_dir))
            work = None if work_dir is None else WorkDir(work_dir, self._fingerprint(mixed, data))
            stage = SensitivityStage(original.model, mixed.schemes, self.sources, data, self.output, work, self.threads)
            try:
                mixed.choose(stage.run(self.observer.advance))
            finally:
                if work is not None:
                    work.close()
        kept: tuple[int, BundleWriter, Report] | None = None
        attempt, is_last = 0, False
        while not is_last:
            writer = new_writer()
            self.optimized = replace(original, model=original.model.clone())
            folder = None if work_dir is None else work_dir / f"attempt-{attempt + 1}"
            made = self.make(writer, report, mixed.plans, folder)
            made.bundle_bytes += _report_bytes(made) + _MIXED_BYTES * len(mixed.schemes)
            measured = None if made.held_out is None else made.held_out.mean_kl
            verdict = mixed.judge(made.layers, made.bundle_bytes, measured)
            is_last = verdict.is_last
            if verdict.fits and (kept is None or made.bundle_bytes < kept[2].bundle_bytes):
                if kept is not None:
                    kept[1].abandon()
                kept = attempt, writer, made
            else:
                writer.abandon()
            attempt += 1
        assert kept is not None, "the last attempt keeps to the budget, or judging it raised an error"
        index, writer, made = kept
        made.mixed = mixed.summary(index, made.layers)
        return writer, made

    def _calibration_data(self, stage: CalibrationStage) -> CalibrationSet:
        if self._data is None:
            self._data = stage.load(self.sampler)
        return self._data

    def _fingerprint(self, mixed: MixedPrecision, data: CalibrationSet) -> dict[str, Any]:
        return {
            **conversion_fingerprint(self.checkpoint, data, self.effort),
            "scheme": self.scheme.to_json(),
            "budget": str(mixed.budget),
        }

    def _calibration(self, plans: Sequence[TensorPlan], work_dir: Path | None) -> CalibrationStage:
        table = self.captured.module.get_input_embeddings().weight
        assert self.calibration is not None and isinstance(table, torch.Tensor)
        composition = self.scheme.composition
        return CalibrationStage(
            self.optimized.model,
            plans,
            self.sources,
            self.checkpoint,
            hurried(composition) if self.effort == "fast" else composition,
            self.effort,
            self.calibration,
            table.shape[0],
            self.output,
            work_dir,
            self.threads,
            self.kv_cache,
        )

    def _pack(
        self, writer: BundleWriter, plans: Sequence[TensorPlan], calibrated: CalibratedWeights | None, report: Report
    ) -> list[PackedWeight]:
        model = self.optimized.model
        packer = WeightPacker(model, plans, self.sources, DTYPES.get(self.dtype), self.packing, calibrated)
        total = len(model.graph.initializers)
        done = 0

        def progress(name: str, elements: int) -> None:
            nonlocal done
            done += 1
            self.observer.advance(done, total, name)

        packed = packer.run(writer, progress, self.threads)
        for text in say_dequantized(packer.dequantized):
            report.warnings.append(text)
            self.observer.note(text)
        return packed

    def _manifest(self, report: Report) -> Manifest:
        config, captured = self.checkpoint.config, self.captured
        architecture: dict[str, Any] = {
            "model_type": config.model_type,
            "class": type(captured.module).__name__,
            "max_model_len": self.max_model_len,
            "parameters": sum(p.numel() for p in captured.module.parameters()),
            "operators": {"before": self.optimized.ops_before, "after": self.optimized.ops_after},
            "folded": self.optimized.rewrites,
        }
        if captured.uses_prompt_lengths:
            architecture["length_independent_up_to"] = length_independent_up_to(config)
        tools = {name: importlib.metadata.version(name) for name in _TOOLS}
        return Manifest(
            source=dict(self.checkpoint.provenance(hash_files=True)),
            architecture=architecture,
            scheme={
                **self.scheme.to_json(),
                "dtype": self.dtype,
                **({} if report.calibration is None else {"calibration": report.calibration}),
                **({} if self.kv_cache is None else {"kv_cache": self.kv_cache}),
            },
            tools=tools,
        )


def _halves(held_out: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide held-out windows: steps of refinement are judged by some, and their result by the others."""
    return (held_out[::2], held_out[1::2]) if len(held_out) > 1 else (held_out, held_out)


def _strip_metadata(model: ir.Model) -> None:
    """Remove what the exporter noted for its own debugging: source lines and paths of the machine it ran on."""
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = "step"
    model.functions.clear()
    model.producer_name, model.producer_version = "inferencex", importlib.metadata.version("inferencex")


def _report_bytes(report: Report) -> int:
    """Return the size of a report, in all its forms."""
    data = json.dumps(report.to_json(), indent=1, sort_keys=True, ensure_ascii=False)
    texts = (data, report.to_markdown(), report.to_plot() or "")
    return sum(len(text.encode()) for text in texts)


_MIXED_BYTES = 600  # that a report gains by the sensitivity of a weight
