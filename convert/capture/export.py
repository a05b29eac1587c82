"""Record a model as an ONNX graph: `torch.export` on fake tensors, tidied, translated by `torch.onnx`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inferencex.convert.capture import rotary, routes, tidy, translations
from inferencex.convert.capture.complex import make_real
from inferencex.convert.capture.model import empty_model, with_fake_parameters
from inferencex.convert.context import declared_context
from inferencex.formats.dialect.schemas import OPSET
from inferencex.formats.errors import CaptureError, InferenceXError

PARAMETER_PREFIX = "model."
_EXAMPLE_TOKENS, _EXAMPLE_ROWS = 13, 5


@dataclass(frozen=True)
class Captured:
    """A recorded model.

    model:   ONNX graph with inputs `token_ids [1, T]`, `positions [1, T]`, `logit_rows [R]` and, where RoPE depends on
             it, `prompt_lengths [1, T]`; output `logits [1, R, vocab]`. Initializers for parameters have no values.
    program: what it was translated from; executing it is executing the source model.
    module:  the source module on the meta device; its buffers are real.
    aliases: names of parameters that are tied, each to the name it is recorded under.
    """

    model: ir.Model
    program: torch.export.ExportedProgram
    module: transformers.PreTrainedModel
    aliases: dict[str, str]
    uses_prompt_lengths: bool


class _Step(torch.nn.Module):
    """The model as a function of one sequence's tokens; only the rows asked for reach the head, if it can."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.takes_rows = "logits_to_keep" in accepted
        self.options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        if "return_dict" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            self.options["return_dict"] = True

    def forward(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, prompt_lengths: Tensor) -> Tensor:
        options = dict(self.options)
        if self.takes_positions:
            options["position_ids"] = positions
        if self.takes_rows:
            options["logits_to_keep"] = logit_rows
        logits: Tensor = self.model(input_ids=token_ids, **options).logits
        if not self.takes_rows:
            logits = torch.index_select(logits, 1, logit_rows)
        return logits.to(torch.float32)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' remarks to themselves; failures still raise."""
    names = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _without_stack_traces() -> Iterator[None]:
    """Do not note the Python stack of every operator: it takes a fifth of the time, and nobody reads it."""
    before = torch.fx.config.do_not_emit_stack_traces
    torch.fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        torch.fx.config.do_not_emit_stack_traces = before


def _reason(error: BaseException) -> str:
    """Pick the line of a compiler error that says what is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith(("Constraints violated", "Specializations unexpectedly")):
        details = [line.removeprefix("- ").split(". If you're")[0] for line in lines if line.startswith("- ")]
        return f"the number of tokens must not matter to it, but: {details[0] if details else lines[0]}"
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def export_program(
    module: torch.nn.Module, *, max_tokens: int = 1 << 24, defer_guards: bool = False
) -> tuple[torch.export.ExportedProgram, bool]:
    """Record `module` (from `empty_model`) with a dynamic number of tokens, up to `max_tokens`, and of logit rows.

    With `defer_guards`, conditions on the number of tokens that cannot be proved become asserts of the program, for
    `check_asserts` to judge; without it they are an error.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with_fake_parameters(module, mode)
    with mode:
        ids = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64)
        positions = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64)
        rows = torch.zeros(_EXAMPLE_ROWS, dtype=torch.int64)
        lengths = torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.int64)
    tokens = torch.export.Dim("tokens", min=2, max=max_tokens)
    kept = torch.export.Dim("rows", min=1, max=1 << 24)
    shapes = ({1: tokens}, {1: tokens}, {0: kept}, {1: tokens})
    step = _Step(module)
    recorded = torch.export.export

    def forward(token_ids: Tensor, positions: Tensor, logit_rows: Tensor, prompt_lengths: Tensor) -> Tensor:
        with routes.routed(positions), rotary.length_aware(module, prompt_lengths) as lengths_matter:
            used.append(lengths_matter)
            return type(step).forward(step, token_ids, positions, logit_rows, prompt_lengths)

    used: list[bool] = []
    step.__dict__["forward"] = forward
    with torch.no_grad(), mode, _quiet(), _without_stack_traces():
        program = recorded(
            step,
            (ids, positions, rows, lengths),
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=defer_guards,
        )
    return program, used[-1]


def _export_within_context(
    module: torch.nn.Module, config: transformers.PreTrainedConfig
) -> tuple[torch.export.ExportedProgram, bool]:
    """Record for any number of tokens, or, where the model's code asks, for less than its context."""
    try:
        return export_program(module)
    except torch._dynamo.exc.UserError:
        limit = max(declared_context(config) or 0, 2 * _EXAMPLE_TOKENS)
        program, uses_lengths = export_program(module, max_tokens=limit, defer_guards=True)
        tidy.check_asserts(program, limit)
        return program, uses_lengths


def _translate(program: torch.export.ExportedProgram) -> ir.Model:
    """Translate an exported program; decomposing it first only when something in it asks for that.

    Decomposition re-traces the program, which takes longer than all the rest, and after `tidy` hardly any decoder
    holds an operator that has no direct translation.
    """
    if not any(tidy.is_mutation(node) for node in program.graph.nodes):
        try:
            with _as_it_is(promote=tidy.mixes_dtypes(program)):
                return _onnx(program)
        except torch.onnx.errors.OnnxExporterError:
            pass  # some operator has no direct translation
    return _onnx(program)


@contextlib.contextmanager
def _as_it_is(*, promote: bool) -> Iterator[None]:
    """Let the exporter translate a program without decomposing it and, unless `promote`, without inserting casts.

    Both steps evaluate every operator anew, for nothing when all have a translation and dtypes agree.
    """
    from torch.onnx._internal.exporter import _fx_passes

    decompose, insert = _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes
    _fx_passes.decompose_with_registry = lambda exported_program, registry: exported_program
    if not promote:
        _fx_passes.insert_type_promotion_nodes = lambda graph_module: None
    try:
        yield
    finally:
        _fx_passes.decompose_with_registry, _fx_passes.insert_type_promotion_nodes = decompose, insert


def _onnx(program: torch.export.ExportedProgram) -> ir.Model:
    with _quiet():
        exported = torch.onnx.export(
            program,
            (),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            custom_translation_table=translations.table(),
        )
    if exported is None:
        raise CaptureError("torch.onnx returned no model")
    return exported.model


def capture(config: transformers.PreTrainedConfig, *, trust_remote_code: bool = False) -> Captured:
    """Record the causal language model of `config`. Raises CaptureError with the exact reason when that fails."""
    module = empty_model(config, trust_remote_code=trust_remote_code)
    aliases = _tied_names(module)
    try:
        program, uses_lengths = _export_within_context(module, config)
        make_real(program)
        tidy.tidy(program, positions="positions")
        model = _translate(program)
    except InferenceXError:
        raise
    except Exception as error:  # the exporters raise every kind of error there is; each is a reason to report
        raise CaptureError(f"{config.model_type}: the model cannot be recorded: {_reason(error)}") from error
    for value in list(model.graph.initializers.values()):
        value.name = str(value.name).removeprefix(PARAMETER_PREFIX)
    return Captured(model, program, module, aliases, uses_lengths)


def _tied_names(module: torch.nn.Module) -> dict[str, str]:
    """Map every further name of a shared parameter to its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            aliases[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return aliases
