"""Match a checkpoint's tensors with a model's parameters, so that none is left over on either side.

transformers 5 stores some parameters differently from how its models hold them (the experts of Mixtral are one
tensor per expert in the file and one tensor in the model). Its own conversion tables and operations are used here,
on lazily read tensors: names are matched, and shapes computed on the meta device, before any data is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from inferencex.convert.source.base import Checkpoint, TensorHandle
from inferencex.convert.source.gguf_mapping import gguf_parameters
from inferencex.convert.source.packed.base import PackedHandle
from inferencex.convert.source.packed.stacking import stacked
from inferencex.convert.source.parameter import ParameterSource, direct, has_values
from inferencex.convert.source.random_weights import random_parameters
from inferencex.formats.errors import SourceError

_SHOWN_NAMES = 20
_COMPARED_ROWS = 4096


def resolve_parameters(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, ParameterSource]:
    """Find, for every entry of `model.state_dict()`, its value in `checkpoint`; nothing is read yet.

    `model` may be on the meta device or hold fake tensors. Tied parameters share one recipe, under both names.
    Raises SourceError listing every parameter that nothing fills, every tensor that fills nothing (but for those
    that the model itself declares ignorable), and every mismatch of shapes.
    """
    if checkpoint.kind == "random":
        named = checkpoint.config.dtype
        dtype = named if isinstance(named, torch.dtype) else None
        made = random_parameters(model, seed=checkpoint.seed, dtype=dtype)
        targets = _tied_names(model)
        untied = {name: source for name, source in made.items() if name not in targets}
        return _with_ties(model, untied, checkpoint.name)
    if checkpoint.kind == "gguf":
        matched = gguf_parameters(model, checkpoint)
        if isinstance(matched, list):
            return _resolve(model, checkpoint, _match(model, checkpoint, matched))
        return _resolve(model, checkpoint, _Matches(dict(matched.sources), list(matched.unused)))
    return _resolve(model, checkpoint, _match(model, checkpoint, get_model_conversion_mapping(model)))


@dataclass(frozen=True)
class _Matches:
    """Recipes by parameter, and the checkpoint's tensors that belong to no parameter, as they would be named."""

    sources: dict[str, ParameterSource]
    unexpected: list[str]


def _match(model: PreTrainedModel, checkpoint: Checkpoint, transforms: Sequence[WeightTransform]) -> _Matches:
    """Apply transformers' renamings and conversions to every name, as its loader does."""
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    sources: dict[str, ParameterSource] = {}
    unexpected: list[str] = []
    conversions: dict[str, _Conversion] = {}
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, expected)
        handle = checkpoint.tensors[name]
        if target not in expected:
            if not _is_empty_bias(checkpoint, name):
                unexpected.append(target)
        elif pattern is not None:
            conversion = conversions.setdefault(target, _Conversion(model, by_pattern[pattern], target, {}))
            conversion.inputs.setdefault(pattern, []).append(handle)
        elif target in sources:
            raise SourceError(
                f"{checkpoint.name}: tensors {sources[target].sources[0]!r} and {name!r} both give parameter {target!r}"
            )
        else:
            sources[target] = direct(target, handle)
    for conversion in conversions.values():
        for source in conversion.outputs():
            if source.name in sources:
                raise SourceError(f"{checkpoint.name}: parameter {source.name!r} is stored both whole and in parts")
            if source.name in expected:
                sources[source.name] = source
            else:
                unexpected.append(source.name)
    return _Matches(sources, unexpected)


@dataclass(frozen=True)
class _Conversion:
    """A transformers converter with the stored tensors it takes, by source pattern."""

    model: PreTrainedModel
    converter: WeightConverter
    first_target: str
    inputs: dict[str, list[TensorHandle]]

    def outputs(self) -> list[ParameterSource]:
        """The parameters it makes, shapes and dtypes found by running it on the meta device."""
        handles = [handle for group in self.inputs.values() for handle in group]
        names = tuple(handle.name for handle in handles)
        dtypes = {handle.dtype for handle in handles}
        if len(dtypes) > 1:
            raise SourceError(f"parameter {self.first_target!r} joins tensors of different types {dtypes}: {names[:4]}")
        shapes = self._run({pattern: [_meta(handle) for handle in group] for pattern, group in self.inputs.items()})
        plain = [
            ParameterSource(
                target,
                tuple(value.shape),
                value.dtype,
                names,
                lambda target=target: self._load(target),  # type: ignore[misc]
                (lambda start, stop, target=target: self._load(target, slice(start, stop)))  # type: ignore[misc]
                if self._stacks_rows()
                else None,
            )
            for target, value in shapes.items()
        ]
        groups = [[handle for handle in group if isinstance(handle, PackedHandle)] for group in self.inputs.values()]
        if len(plain) == 1 and self._joins_matrices() and sum(map(len, groups)) == len(handles):
            return [stacked(plain[0], groups)]
        return plain

    def _joins_matrices(self) -> bool:
        """Whether matrix `i` of the outcome is the `i`-th tensors of the lists, one below the other."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and (not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1))
        )

    def _stacks_rows(self) -> bool:
        """Whether row `i` of the outcome is made of the `i`-th tensor of each list alone."""
        first, *rest = self.converter.operations
        return (
            isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(op, Concatenate) and op.dim > 0)
                or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0)
                for op in rest
            )
        )

    def _load(self, target: str, rows: slice = slice(None)) -> torch.Tensor:
        if rows != slice(None) and len(range(*rows.indices(len(next(iter(self.inputs.values())))))) == 0:
            return self._load(target, slice(0, 1))[:0]
        groups = {pattern: [handle.load() for handle in group[rows]] for pattern, group in self.inputs.items()}
        return self._run(groups)[target]

    def _run(self, groups: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        converter: Any = deepcopy(self.converter)
        converter.collected_tensors.update(groups)
        try:
            made = converter.convert(self.first_target, model=self.model, config=self.model.config)
        except (ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
            names = [handle.name for group in self.inputs.values() for handle in group]
            raise SourceError(
                f"parameter {self.first_target!r} cannot be made of {len(names)} tensor(s) "
                f"({', '.join(names[:4])}, ...): {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _is_empty_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor is the bias of zeros that some programs give to every layer that they quantize."""
    module, _, part = name.rpartition(".")
    is_packed = isinstance(checkpoint.tensors.get(f"{module}.weight"), PackedHandle)
    return part == "bias" and is_packed and not bool(checkpoint.tensors[name].load().any())


def _meta(handle: TensorHandle) -> torch.Tensor:
    return torch.empty(handle.shape, dtype=handle.dtype, device="meta")


def _resolve(model: PreTrainedModel, checkpoint: Checkpoint, matches: _Matches) -> dict[str, ParameterSource]:
    """Tie, then check that nothing is missing, left over, of another shape, or of integers in place of numbers."""
    expected = model.state_dict()
    sources = _with_ties(model, matches.sources, checkpoint.name)
    account = LoadStateDictInfo(
        missing_keys=set(expected) - set(sources),
        unexpected_keys=set(matches.unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    # transformers' own rules about what a checkpoint of this model may lack or hold in excess.
    model._adjust_missing_and_unexpected_keys(account)
    buffers = dict(model.named_buffers())
    for name in set(expected) - set(sources) - account.missing_keys:
        value = buffers.get(name)
        if value is None or not has_values(value):
            account.missing_keys.add(name)
        else:
            sources[name] = _constant(name, value)
    problems = []
    if account.missing_keys:
        problems.append(f"nothing fills {_listed(account.missing_keys)}")
    if account.unexpected_keys:
        problems.append(f"the model has no place for {_listed(account.unexpected_keys)}")
    mismatched = [
        f"{name} ({source.shape}, expected {tuple(expected[name].shape)})"
        for name, source in sources.items()
        if source.shape != tuple(expected[name].shape)
    ]
    if mismatched:
        problems.append(f"shapes differ for {_listed(mismatched)}")
    mistyped = [
        f"{name} ({source.dtype}, expected a floating point type)"
        for name, source in sources.items()
        if name in expected and expected[name].is_floating_point() and not source.dtype.is_floating_point
    ]
    if mistyped:
        problems.append(f"types differ for {_listed(mistyped)}")
    if problems:
        raise SourceError(
            f"{checkpoint.name}: the tensors do not fit {type(model).__name__}: {'; '.join(problems)}. "
            "The files and config.json belong to different models, or the download is incomplete"
        )
    return {name: sources[name] for name in expected}


def _constant(name: str, value: torch.Tensor) -> ParameterSource:
    return ParameterSource(name, tuple(value.shape), value.dtype, (), value.clone)


def _listed(names: Sequence[str] | set[str]) -> str:
    ordered = sorted(names)
    more = f", and {len(ordered) - _SHOWN_NAMES} more" if len(ordered) > _SHOWN_NAMES else ""
    return f"{len(ordered)} tensor(s): {', '.join(ordered[:_SHOWN_NAMES])}{more}"


def _with_ties(
    model: PreTrainedModel, sources: Mapping[str, ParameterSource], checkpoint_name: str
) -> dict[str, ParameterSource]:
    """Give tied parameters one recipe, whichever of their names the checkpoint stores it under."""
    tied = dict(sources)
    for target, owner in _tied_names(model).items():
        stored = [name for name in (owner, target) if name in sources]
        if len(stored) == 2 and not _equal(sources[owner], sources[target]):
            raise SourceError(
                f"{checkpoint_name}: {owner!r} and {target!r} are tied in this model, but the checkpoint stores two "
                "different tensors; set tie_word_embeddings to false in its config.json if they are meant to differ"
            )
        if stored:
            shared = sources[stored[0]]
            tied[owner] = replace(shared, name=owner)
            tied[target] = replace(shared, name=target, tied_to=owner)
    return tied


def _tied_names(model: PreTrainedModel) -> dict[str, str]:
    """`{parameter: the one it is the same as}`, from transformers' declaration and from object identity."""
    tied: dict[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first_name.setdefault(id(parameter), name)
        if owner != name and name not in tied and owner not in tied:
            tied[name] = owner
    return tied


def _equal(left: ParameterSource, right: ParameterSource) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    step = _COMPARED_ROWS
    return all(
        torch.equal(left.rows(start, start + step), right.rows(start, start + step))
        for start in range(0, left.shape[0], step)
    )
