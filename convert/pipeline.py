"""Checkpoint to bundle: resolve the source, capture, optimize, plan, pack, compare with the source, report."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch

from inferencex.convert.bundle_maker import DTYPES, BundleMaker
from inferencex.convert.calibrate.data import CalibrationOptions, fitting_length
from inferencex.convert.calibrate.model_text import model_text
from inferencex.convert.calibrate.self_text import Sampler
from inferencex.convert.calibrate.work_dir import check_work_dir
from inferencex.convert.capture import capture
from inferencex.convert.context import beyond_declared, context_length
from inferencex.convert.keep_packed import (
    Packing,
    check_request,
    dequantized,
    find_packed,
    refuse_requantized,
    say_dequantized,
)
from inferencex.convert.mixed_precision import MixedPrecision
from inferencex.convert.pack import parameters_read, plain_dtype
from inferencex.convert.passes import optimize
from inferencex.convert.passes.editing import is_weight, static_dims
from inferencex.convert.passes.weights import expression_of
from inferencex.convert.quantize import QuantizationScheme, TensorPlan, parse_scheme, plan_quantization
from inferencex.convert.quantize.budget import Budget
from inferencex.convert.quantize.effort import EFFORTS
from inferencex.convert.refinement_stage import check_memory
from inferencex.convert.report import Report
from inferencex.convert.roles import weight_roles
from inferencex.convert.side_files import check_side_files
from inferencex.convert.source.mapping import resolve_parameters
from inferencex.convert.source.open import open_checkpoint
from inferencex.convert.source.parameter import ParameterSource
from inferencex.convert.source.read_ahead import read_ahead
from inferencex.convert.stages import Observer, Silent, Stages
from inferencex.convert.verification import verification
from inferencex.formats.bundle import BundleWriter, check_destination
from inferencex.formats.errors import CaptureError, OptionError
from inferencex.formats.kv_cache import KV_FORMATS

_MAX_THREADS = 1024
_BYTES_OF_NODE = 200  # of model.onnx, about
_BYTES_OF_WEIGHT = 3600  # of model.onnx, bundle.json and the header of the weights, about


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
    budget: Budget | None = None
    kv_cache: str = "none"

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
        if self.kv_cache not in ("none", *KV_FORMATS):
            raise OptionError(f"--kv-cache {self.kv_cache!r} is not one of none, {', '.join(KV_FORMATS)}")
        if self.effort not in EFFORTS:
            raise OptionError(f"--effort {self.effort!r} is not one of {', '.join(EFFORTS)}")
        if self.effort != "normal" and not (self.scheme.linear is not None and self.calibration_options):
            raise OptionError(
                f"--effort {self.effort} is for methods that calibrate, and --quantization {self.scheme.name} does not"
            )
        if (self.budget is not None) != bool(self.scheme.candidates):
            raise OptionError(
                f"--quantization {self.scheme.name} leaves the types of weights to a budget; give --target-bits, "
                "--target-size or --max-kl"
                if self.budget is None
                else f"{self.budget} chooses the types of weights, which --quantization {self.scheme.name} states"
            )
        if self.budget is not None and self.budget.kind == "kl" and not self.verify:
            raise OptionError(f"{self.budget} takes a measurement; leave --no-verify out")
        if self.calibration is not None and self.scheme.linear is None and self.kv_cache == "none":
            raise OptionError("--calibration means nothing with --quantization none; leave it out, or give --kv-cache")
        if self.work_dir is not None and self.calibration_options is None:
            raise OptionError(
                f"--work-dir keeps what calibration finishes, and --quantization {self.scheme.name} does not calibrate"
            )

    @property
    def calibration_options(self) -> CalibrationOptions | None:
        """What to calibrate on; None for a conversion that does not calibrate."""
        if self.calibration is None and (self.scheme.needs_calibration or self.kv_cache != "none"):
            return CalibrationOptions()
        return self.calibration


def convert(options: ConvertOptions, observer: Observer) -> Report:
    """Make a bundle at `options.output`, or leave everything as it was.

    Raises InferenceXError of the kind that fits: OptionError, SourceError, CaptureError, QuantizationError,
    BundleError, FidelityError.
    """
    stages = Stages(observer)
    report = Report(options.model_id, options.scheme.name)
    report.seconds = stages.seconds
    named = Path(options.model_id).expanduser()
    check_destination(options.output, overwrite=options.overwrite, source=named if named.exists() else None)
    if options.work_dir is not None:
        check_work_dir(options.work_dir, output=options.output, source=named if named.exists() else None)
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
    calibration = fitting_length(options.calibration_options, max_model_len)
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
        _refuse_nothing_left(plans, options)
        if options.effort == "best":
            check_memory(plans)
        report.notes.extend(beyond_declared(checkpoint.config, max_model_len))
        report.notes.extend(_remarks(plans))
        report.warnings.extend(_unread(optimized.model, sources))
        report.warnings.extend(say_dequantized(packing.dequantized))
        expected = _expected_bytes(optimized.model, plans, packing, options)
        mixed = None
        if options.budget is not None:
            other = _bytes_beside(optimized.model, plans, sources, checkpoint.files, DTYPES.get(options.dtype))
            mixed = MixedPrecision(roles, options.scheme, options.budget, other)
            report.notes.extend([] if mixed.remark is None else [mixed.remark])
    for text in (*report.warnings, *report.notes):
        observer.note(text)
    maker = BundleMaker(
        options.output,
        options.scheme,
        options.dtype,
        options.effort,
        calibration,
        options.threads,
        options.verify_limit,
        options.model_id,
        checkpoint,
        captured,
        optimized,
        sources,
        packing,
        max_model_len,
        _model_text(options),
        stages,
        observer,
        next((kind for kind in KV_FORMATS if kind == options.kv_cache), None),
    )
    source_path = checkpoint.directory if checkpoint.kind == "local" else None

    def writer() -> BundleWriter:
        return BundleWriter(options.output, overwrite=options.overwrite, source=source_path, expected_bytes=expected)

    with ExitStack() as stack:
        staged = stack.enter_context(writer()) if mixed is None else None
        if options.verify:
            tokens = min(options.verify_tokens, max_model_len)
            maker.check = stack.enter_context(verification(checkpoint, captured, sources, tokens=tokens))
        if staged is not None:
            report = maker.make(staged, report, plans, options.work_dir)
        else:
            assert mixed is not None
            staged, report = maker.make_within_budget(
                mixed, lambda: stack.enter_context(writer()), report, options.work_dir
            )
        staged.add_report(report.to_json(), report.to_markdown(), report.to_plot())
        staged.commit()
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


def _refuse_nothing_left(plans: Sequence[TensorPlan], options: ConvertOptions) -> None:
    """Refuse to quantize a model of which every weight is excluded."""
    if options.scheme.linear is not None and options.scheme.exclude and not any(plan.scheme for plan in plans):
        raise OptionError(
            f"--exclude {' '.join(map(repr, options.scheme.exclude))} leaves nothing for --quantization "
            f"{options.scheme.name}; exclude less, or give --quantization none"
        )


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


def _bytes_beside(
    model: ir.Model,
    plans: Sequence[TensorPlan],
    sources: Mapping[str, ParameterSource],
    files: Mapping[str, Path],
    dtype: torch.dtype | None,
) -> int:
    """Return about what a bundle takes on disk beside its linears and experts."""
    planned = {plan.name: plan for plan in plans if plan.scheme is not None}
    total = sum(path.stat().st_size for path in files.values())
    total += _BYTES_OF_NODE * len(model.graph)
    for name, value in model.graph.initializers.items():
        shape, plan = static_dims(value) if value.shape is not None else (), planned.get(name)
        if value.const_value is not None:
            total += value.const_value.nbytes
        elif plan is None or plan.role not in ("linear", "experts"):
            source = sources[expression_of(value).parameters[0]].dtype
            plain = plain_dtype(source, len(shape), dtype).itemsize
            total += math.prod(shape) * plain if plan is None else plan.stored_bytes(plain, scale_bytes=2)
        total += _BYTES_OF_WEIGHT if is_weight(value) else 0
    return total


def _model_text(options: ConvertOptions) -> Sampler:
    """Return what lets the source model write text: a plain bundle of it, made when text is asked for."""

    def plain_bundle(path: Path) -> None:
        plain = parse_scheme("none")
        convert(
            replace(
                options,
                output=path,
                scheme=plain,
                verify=False,
                verify_limit=None,
                calibration=None,
                work_dir=None,
                effort="normal",
                budget=None,
                kv_cache="none",
            ),
            Silent(),
        )

    return model_text(plain_bundle, options.output, options.threads)
