"""Checkpoints of compressed-tensors: packed and plain integers, FP8 and NVFP4 numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferencex.convert.source.packed.base import PackedStorage, Parts, require
from inferencex.convert.source.packed.compressed_integers import (
    IntegerScheme,
    open_packed_integers,
    open_plain_integers,
)
from inferencex.convert.source.packed.float4 import open_nvfp4
from inferencex.convert.source.packed.float8 import block_of, open_float8
from inferencex.convert.source.packed.settings import integer_setting
from inferencex.formats.errors import SourceError

METHOD = "compressed-tensors"
LABEL = "compressed-tensors"
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
# What the format says of the numbers; `naive-quantized` says nothing.
_NUMBERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "pack-quantized": ("int", (2, 3, 4, 8)),
    "int-quantized": ("int", (4, 8)),
    "float-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)),
}
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True)
class Scheme:
    """The weights of one config group.

    targets:   names of modules, `re:` expressions, or names of classes
    format:    of the stored tensors
    number:    `int` or `float`
    """

    group: str
    targets: tuple[str, ...]
    format: str
    number: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class CompressedTensorsFormat:
    """What config.json says about a compressed-tensors checkpoint."""

    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]
    quantizes_activations: bool
    method: str = METHOD
    part_names: tuple[str, ...] = (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
        "weight_global_scale",
    )  # fmt: skip
    defining: tuple[str, ...] = ("weight_scale",)
    dropped: tuple[str, ...] = (
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
        "k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point",
    )  # fmt: skip

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of a module that is packed. Raises SourceError when config.json says it is not."""
        if any(_matches(pattern, module) for pattern in self.ignore):
            raise SourceError(f"{module}: is packed, but config.json's quantization_config ignores it")
        for scheme in self.schemes:
            if any(_matches(target, module) for target in scheme.targets):
                return scheme
        # Names of classes are left, and a checkpoint does not say which class a module is of.
        by_class = [scheme for scheme in self.schemes if any(_names_class(target) for target in scheme.targets)]
        if len(by_class) != 1:
            raise SourceError(
                f"{module}: is packed, but no target of config.json's config_groups names it "
                f"({', '.join(target for scheme in self.schemes for target in scheme.targets)})"
            )
        return by_class[0]

    def open(self, module: str, parts: Parts) -> PackedStorage:
        """Check the tensors of one module against each other. Raises SourceError."""
        scheme = self.scheme_of(module)
        label = f"{LABEL} {scheme.format}"
        if scheme.format == "nvfp4-pack-quantized":
            return open_nvfp4(module, label, METHOD, parts)
        if scheme.number == "float":
            weight, scales = require(module, parts, ("weight", "weight_scale"), label)
            if scheme.strategy == "group" and scheme.group_size:
                return open_float8(module, label, METHOD, weight, scales, (1, scheme.group_size))
            return open_float8(module, label, METHOD, weight, scales, scheme.block)
        group_size = scheme.group_size if scheme.strategy == "group" else None
        integers = IntegerScheme(label, METHOD, scheme.bits, scheme.symmetric, group_size)
        if scheme.format == "pack-quantized":
            return open_packed_integers(module, integers, parts)
        return open_plain_integers(module, integers, parts)


def read_compressed_tensors(settings: Mapping[str, Any], where: str) -> CompressedTensorsFormat | None:
    """Read `quantization_config` of method `compressed-tensors`; None when it says that weights are stored plain.

    Raises SourceError for formats and strategies that are not read.
    """
    overall = str(settings.get("format", "")).lower()
    if overall == "dense":
        return None
    sparsity = settings.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and str(sparsity.get("format", "dense")).lower() != "dense":
        raise SourceError(f"{where}: sparse weights ({sparsity.get('format')!r}) are not read")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise SourceError(f"{where}: config_groups is {groups!r}, expected an object of schemes")
    schemes = [_scheme(name, group, overall, where) for name, group in groups.items()]
    ignore = settings.get("ignore") or []
    return CompressedTensorsFormat(
        tuple(scheme for scheme in schemes if scheme is not None),
        tuple(str(name) for name in ignore),
        any(group.get("input_activations") for group in groups.values()),
    )


def _scheme(name: str, group: Any, overall: str, where: str) -> Scheme | None:
    where = f"{where}: config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise SourceError(f"{where}: is {group!r}, expected an object with targets and weights")
    weights = group.get("weights")
    if weights is None:
        return None  # activations alone
    if not isinstance(weights, dict):
        raise SourceError(f"{where}.weights: is {weights!r}, expected an object")
    layout = str(group.get("format") or overall).lower()
    if layout not in _FORMATS:
        raise SourceError(f"{where}: the format {layout!r} is not read, only {', '.join(_FORMATS)}")
    bits = integer_setting(weights, "num_bits", f"{where}.weights")
    number = str(weights.get("type", "int")).lower()
    strategy, group_size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = str(strategy).lower()
    if strategy not in _STRATEGIES:
        raise SourceError(f"{where}: the strategy {strategy!r} is not known, expected {', '.join(_STRATEGIES)}")
    if strategy == "group" and not (isinstance(group_size, int) and group_size > 0):
        raise SourceError(f"{where}: group_size is {group_size!r}, expected a positive number for the strategy 'group'")
    kind, widths = _NUMBERS.get(layout, (number, (4, 8) if number == "int" else (8,)))
    if number != kind or bits not in widths:
        raise SourceError(
            f"{where}: {number} numbers of {bits} bits do not go with the format {layout!r}, "
            f"expected {kind} of {' or '.join(map(str, widths))} bits"
        )
    block = None
    if strategy == "block":
        if number != "float":
            raise SourceError(f"{where}: integers in blocks are not read, only floats are")
        structure = weights.get("block_structure")
        sizes = [int(s) for s in structure.split("x") if s.isdigit()] if isinstance(structure, str) else structure
        block = block_of(sizes, f"{where}: block_structure")
    return Scheme(
        name,
        tuple(str(target) for target in group["targets"]),
        layout,
        number,
        bits,
        bool(weights.get("symmetric", True)),
        strategy,
        group_size,
        block,
    )


def _matches(target: str, module: str) -> bool:
    """Whether a target or an ignored name is this module by name."""
    if target.startswith("re:"):
        try:
            return re.match(target[3:], module) is not None
        except re.error as error:
            raise SourceError(f"config.json: {target!r} is not a regular expression ({error})") from error
    return target == module


def _names_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target
