"""Checkpoint to bundle: resolve the source, capture, optimize, plan, pack, compare with the source, report."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from inferencex.convert.calibrate.data import CalibrationOptions
from inferencex.convert.calibrate.model_text import model_text
from inferencex.convert.calibrate.result import CalibratedWeights
from inferencex.convert.calibrate.self_text import Sampler
from inferencex.convert.calibration_stage import CalibrationStage
from inferencex.convert.capture import Captured, capture
from inferencex.convert.context import beyond_declared, context_length, length_independent_up_to
from inferencex.convert.held_out import held_out_fidelity, source_runner
from inferencex.convert.keep_packed import (
    Packing,
    check_request,
    dequantized,
    find_packed,
    refuse_requantized,
    say_dequantized,
)
from inferencex.convert.pack import WeightPacker, parameters_read
from inferencex.convert.passes import Optimized, optimize
from inferencex.convert.passes.editing import static_dims
from inferencex.convert.quantize import QuantizationScheme, TensorPlan, parse_scheme, plan_quantization
from inferencex.convert.quantize.effort import EFFORTS, hurried
from inferencex.convert.refinement_stage import RefinementStage
from inferencex.convert.report import Report
from inferencex.convert.roles import weight_roles
from inferencex.convert.side_files import check_side_files
from inferencex.convert.source.base import Checkpoint
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.parameter import ParameterSource
from inferencex.convert.source.read_ahead import read_ahead
from inferencex.convert.verification import verification
from inferencex.formats.bundle import BundleWriter, Manifest, check_destination
from inferencex.formats.errors import CaptureError, OptionError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAX_THREADS = 1024
_TOOLS = ("inferencex", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion is asked to do; see `inferencex-convert --help` for each."""

    model_id: str
    output: Path
    scheme: QuantizationScheme
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    overwrite: bool = False
    trust_remote_code: bool = False
    allow_pickle: bool = False
    random_weights: bool = False
    seed: int | None = None
    dequantize: bool = False
    verify: bool = True
    verify_limit: float | None = None
    verify_tokens: int = 64
    threads: int | None = None
    calibration: CalibrationOptions | None = None
    work_dir: Path | None = None
    effort: str = "normal"

    def __post_init__(self) -> None:
        """Refuse values that could only fail after much work; raises OptionError."""
        if not self.model_id.strip():
            raise OptionError("--model-id is empty; give a directory, a hub id, a .gguf file or an alias")
        if self.seed is not None and not self.random_weights:
            raise OptionError(f"--seed {self.seed} is for --random-weights; give both or neither")
        if self.threads is not None and not 1 <= self.threads <= _MAX_THREADS:
            raise OptionError(f"--threads {self.threads}: expected a number from 1 to {_MAX_THREADS}")
        if self.verify_limit is not None:
            if not (self.verify_limit > 0 and math.isfinite(self.verify_limit)):
                raise OptionError(f"--verify-limit {self.verify_limit}: expected a number above 0")
            if not self.verify:
                raise OptionError("--verify-limit means nothing with --no-verify; leave one of them out")
        if self.effort not in EFFORTS:
            raise OptionError(f"--effort {self.effort!r} is not one of {', '.join(EFFORTS)}")
        if self.effort != "normal" and self.calibration_options is None:
            raise OptionError(
                f"--effort {self.effort} is for methods that calibrate, and --quantization {self.scheme.name} does not"
            )
        if self.calibration is not None and self.scheme.linear is None:
            raise OptionError("--calibration means nothing with --quantization none; leave it out")
        if self.work_dir is not None and self.calibration_options is None:
            raise OptionError(
                f"--work-dir keeps what calibration finishes, and --quantization {self.scheme.name} does not calibrate"
            )

    @property
    def calibration_options(self) -> CalibrationOptions | None:
        """What to calibrate on; None for a conversion that does not calibrate."""
        if self.calibration is None and self.scheme.needs_calibration:
            return CalibrationOptions()
        return self.calibration


class Observer(Protocol):
    """Is told how a conversion gets on."""

    def stage(self, name: str) -> None:
        """Begin a stage of the work."""
        ...

    def advance(self, done: int, total: int, what: str) -> None:
        """Within the stage, `done` of `total` units are finished, the last of them `what`."""
        ...

    def note(self, text: str) -> None:
        """Something a user should read."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str) -> None:
        """Begin a stage of the work."""

    def advance(self, done: int, total: int, what: str) -> None:
        """Units of it are finished."""

    def note(self, text: str) -> None:
        """A note that nobody reads."""


@dataclass
class _Stages:
    """Times the stages and announces them."""

    observer: Observer
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.observer.stage(name)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began


def convert(options: ConvertOptions, observer: Observer) -> Report:
    """Make a bundle at `options.output`, or leave everything as it was.

    Raises InferenceXError of the kind that fits: OptionError, SourceError, CaptureError, QuantizationError,
    BundleError, FidelityError.
    """
    stages = _Stages(observer)
    report = Report(options.model_id, options.scheme.name)
    report.seconds = stages.seconds
    named = Path(options.model_id).expanduser()
    check_destination(options.output, overwrite=options.overwrite, source=named if named.exists() else None)
    with stages("open"):
        checkpoint = open_checkpoint(
            options.model_id,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            allow_pickle=options.allow_pickle,
            random_weights=options.random_weights,
            seed=options.seed or 0,
        )
        check_request(checkpoint, options.scheme, dequantize=options.dequantize)
        checkpoint = read_ahead(checkpoint)
        report.warnings.extend(checkpoint.warnings)
        check_side_files(checkpoint.files)
    max_model_len = context_length(checkpoint.config, options.max_model_len)
    with stages("capture"), _without_garbage_collection(), _naming(options.model_id):
        captured = capture(checkpoint.config, trust_remote_code=checkpoint.trust_remote_code)
    with stages("passes"), _without_garbage_collection(), _naming(options.model_id):
        optimized = optimize(captured, max_positions=max_model_len)
        report.graph = optimized
    with stages("plan"):
        sources = resolve_parameters(captured.module, checkpoint)
        sources = dequantized(sources) if options.dequantize else sources
        report.source_bytes = checkpoint.nbytes
        roles = weight_roles(optimized.model)
        plans = plan_quantization(roles, options.scheme)
        packing = find_packed(optimized.model, roles, sources)
        refuse_requantized(plans, packing)
        report.notes.extend(beyond_declared(checkpoint.config, max_model_len))
        report.notes.extend(_remarks(plans))
        report.warnings.extend(_unread(optimized.model, sources))
        report.warnings.extend(say_dequantized(packing.dequantized))
        expected = _expected_bytes(optimized.model, plans, packing, options)
    for text in (*report.warnings, *report.notes):
        observer.note(text)
    source_path = checkpoint.directory if checkpoint.kind == "local" else None
    with (
        BundleWriter(
            options.output, overwrite=options.overwrite, source=source_path, expected_bytes=expected
        ) as writer,
        ExitStack() as stack,
    ):
        check = None
        if options.verify:
            tokens = min(options.verify_tokens, max_model_len)
            check = stack.enter_context(verification(checkpoint, captured, sources, tokens=tokens))
        calibrated = None
        if options.calibration_options is not None:
            with stages("calibrate"):
                stage = _calibration_stage(optimized, plans, sources, checkpoint, captured, options)
                calibrated = stack.enter_context(stage.run(_model_text(options), observer.advance))
                report.layers = calibrated.weights.layers
                report.calibration = calibrated.data.source
        if calibrated is not None and options.effort == "best":
            with stages("refine"):
                refinement = RefinementStage(optimized.model, sources, calibrated.work, options.threads)
                judged, _ = _halves(calibrated.data.held_out)
                report.refinement = refinement.run(
                    calibrated.weights, calibrated.data.token_ids, judged, observer.advance
                )
        with stages("quantize" if options.scheme.method != "none" else "pack"):
            weights = None if calibrated is None else calibrated.weights
            report.weights = _pack(writer, optimized.model, plans, sources, packing, weights, options, report, observer)
        with stages("write"):
            _strip_metadata(optimized.model)
            writer.write_graph(optimized.model)
            for name, path in checkpoint.files.items():
                writer.add_side_file(name, path)
            staged = writer.seal(_manifest(checkpoint, captured, optimized, options, report, max_model_len))
        if check is not None:
            with stages("verify"):
                report.fidelity = check.check(staged, options.model_id, report, options.verify_limit)
        if calibrated is not None and options.verify:
            with stages("evaluate"):
                report.held_out = held_out_fidelity(
                    source_runner(captured, sources),
                    staged,
                    calibrated.data.held_out if report.refinement is None else _halves(calibrated.data.held_out)[1],
                    progress=lambda done, total: observer.advance(done, total, "held-out windows"),
                )
        report.bundle_bytes = sum(file.stat().st_size for file in staged.rglob("*") if file.is_file())
        report.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        writer.add_report(report.to_json(), report.to_markdown(), report.to_plot())
        writer.commit()
    return report


@contextmanager
def _naming(model_id: str) -> Iterator[None]:
    """Say which model it is whose graph cannot be had; what looks at graphs knows only their parts."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"{model_id}: {error}") from error


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Collect nothing while graphs of millions of live objects are built; the collector finds no garbage in them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _remarks(plans: Sequence[TensorPlan]) -> list[str]:
    """Say what in the plan a user may not expect: ragged groups, excluded and tied weights, by kind."""
    ragged = [plan for plan in plans if plan.ragged]
    remarks = []
    by_shape: dict[tuple[int, int], int] = {}
    for plan in ragged:
        assert plan.scheme is not None
        key = (plan.shape[-1], plan.scheme.group_size)
        by_shape[key] = by_shape.get(key, 0) + 1
    for (width, group), count in by_shape.items():
        remarks.append(
            f"{count} weights have {width} input channels, not a multiple of the group size {group}: their last group "
            f"has {width % group}"
        )
    remarks += [f"{plan.name}: {plan.reason}" for plan in plans if plan.role in ("head", "embedding")]
    excluded = [plan.name for plan in plans if "--exclude" in plan.reason]
    if excluded:
        remarks.append(
            f"{len(excluded)} weights stay plain because they are excluded: {', '.join(excluded[:4])}"
            + (", ..." if len(excluded) > 4 else "")
        )
    return remarks


def _unread(model: ir.Model, sources: dict[str, ParameterSource]) -> list[str]:
    """Name parameters of the checkpoint that the recorded computation does not use."""
    read = parameters_read(model)
    names = [name for name, source in sources.items() if name not in read and source.tied_to not in read]
    names = [name for name in names if not any(s.tied_to == name and n in read for n, s in sources.items())]
    if not names:
        return []
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return [f"{len(names)} parameters take no part in computing logits and are not stored: {shown}"]


def _expected_bytes(model: ir.Model, plans: Sequence[TensorPlan], packing: Packing, options: ConvertOptions) -> int:
    itemsize = 4 if options.dtype in ("auto", "float32") else 2
    planned = {plan.name: plan.stored_bytes(itemsize) for plan in plans}
    planned |= {name: candidate.nbytes for name, candidate in packing.candidates.items()}
    total = 0
    for name, value in model.graph.initializers.items():
        count = 1 if value.shape is None else math.prod(static_dims(value))
        total += planned.get(name, count * itemsize)
    return total


def _halves(held_out: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide held-out windows: steps of refinement are judged by some, and their result by the others."""
    return (held_out[::2], held_out[1::2]) if len(held_out) > 1 else (held_out, held_out)


def _calibration_stage(
    optimized: Optimized,
    plans: Sequence[TensorPlan],
    sources: dict[str, ParameterSource],
    checkpoint: Checkpoint,
    captured: Captured,
    options: ConvertOptions,
) -> CalibrationStage:
    calibration = options.calibration_options
    table = captured.module.get_input_embeddings().weight
    assert calibration is not None and isinstance(table, torch.Tensor)
    return CalibrationStage(
        optimized.model,
        plans,
        sources,
        checkpoint,
        hurried(options.scheme.composition) if options.effort == "fast" else options.scheme.composition,
        options.effort,
        calibration,
        table.shape[0],
        options.output,
        options.work_dir,
        options.threads,
    )


def _model_text(options: ConvertOptions) -> Sampler:
    """Return what lets the source model write text: a plain bundle of it, made when text is asked for."""

    def plain_bundle(path: Path) -> None:
        plain = parse_scheme("none")
        convert(replace(options, output=path, scheme=plain, verify=False, calibration=None, work_dir=None), Silent())

    return model_text(plain_bundle)


def _pack(
    writer: BundleWriter,
    model: ir.Model,
    plans: Sequence[TensorPlan],
    sources: dict[str, ParameterSource],
    packing: Packing,
    calibrated: CalibratedWeights | None,
    options: ConvertOptions,
    report: Report,
    observer: Observer,
) -> list[Any]:
    packer = WeightPacker(model, plans, sources, DTYPES.get(options.dtype), packing, calibrated)
    total = sum(1 for name in model.graph.initializers)
    done = 0

    def progress(name: str, elements: int) -> None:
        nonlocal done
        done += 1
        observer.advance(done, total, name)

    packed = packer.run(writer, progress, options.threads)
    for text in say_dequantized(packer.dequantized):
        report.warnings.append(text)
        observer.note(text)
    return packed


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


def _manifest(
    checkpoint: Checkpoint,
    captured: Captured,
    optimized: Optimized,
    options: ConvertOptions,
    report: Report,
    max_model_len: int,
) -> Manifest:
    config = checkpoint.config
    architecture: dict[str, Any] = {
        "model_type": config.model_type,
        "class": type(captured.module).__name__,
        "max_model_len": max_model_len,
        "parameters": sum(p.numel() for p in captured.module.parameters()),
        "operators": {"before": optimized.ops_before, "after": optimized.ops_after},
        "folded": optimized.rewrites,
    }
    if captured.uses_prompt_lengths:
        architecture["length_independent_up_to"] = length_independent_up_to(config)
    tools = {name: importlib.metadata.version(name) for name in _TOOLS}
    return Manifest(
        source=dict(checkpoint.provenance(hash_files=True)),
        architecture=architecture,
        scheme={
            **options.scheme.to_json(),
            "dtype": options.dtype,
            **({} if report.calibration is None else {"calibration": report.calibration}),
        },
        tools=tools,
    )
