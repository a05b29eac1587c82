"""Find the packed weights among a checkpoint's tensors, as config.json describes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from inferencex.convert.source.base import TensorHandle
from inferencex.convert.source.packed.awq import read_awq
from inferencex.convert.source.packed.base import PackedHandle, PackedStorage, Parts
from inferencex.convert.source.packed.compressed_tensors import read_compressed_tensors
from inferencex.convert.source.packed.float8 import read_float8
from inferencex.convert.source.packed.gptq import read_gptq
from inferencex.convert.source.packed.settings import quantization_settings
from inferencex.formats.errors import SourceError

_SHOWN = 4


class PackedFormat(Protocol):
    """How the packed weights of one checkpoint are stored.

    method:      as config.json calls it
    part_names:  last parts of the names of the tensors that a packed module may have
    defining:    those of which every packed module has one, and no other module has any
    dropped:     last parts of the names of tensors that say how activations are quantized
    quantizes_activations: whether the model is meant to be run with quantized activations
    """

    @property
    def method(self) -> str:
        """Name of the method."""
        ...

    @property
    def part_names(self) -> tuple[str, ...]:
        """Last parts of names, of packed modules."""
        ...

    @property
    def defining(self) -> tuple[str, ...]:
        """Last parts of names that say a module is packed."""
        ...

    @property
    def dropped(self) -> tuple[str, ...]:
        """Last parts of names, of what is left out."""
        ...

    @property
    def quantizes_activations(self) -> bool:
        """Whether activations are quantized too."""
        ...

    def open(self, module: str, parts: Parts) -> PackedStorage:
        """Check the tensors of one module against each other. Raises SourceError."""
        ...


_READERS: dict[str, Callable[[Mapping[str, Any], str], PackedFormat | None]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_float8,
}

# Tensors that no plain checkpoint has.
_SIGNS = re.compile(r"\.(qweight|qzeros|weight_packed|weight_scale_inv|weight_scale|weight_global_scale|absmax|SCB)$")


@dataclass(frozen=True)
class Collected:
    """The tensors of a checkpoint, each packed weight one `PackedHandle` under the name MODULE.weight.

    method: None for a plain checkpoint
    """

    tensors: Mapping[str, TensorHandle]
    method: str | None = None
    warnings: tuple[str, ...] = ()


def packed_format(config_dict: Mapping[str, Any], where: str) -> PackedFormat | None:
    """Return how the checkpoint of this config.json is quantized, or None when its weights are plain.

    Raises SourceError naming a method, a layout or a number of bits that is not read.
    """
    found = quantization_settings(config_dict, where)
    if found is None:
        return None
    settings, place = found
    method = settings.get("quant_method")
    if method is None and "config_groups" in settings:
        method = "compressed-tensors"  # what it was before it wrote its name
    reader = _READERS.get(str(method).lower())
    if reader is None:
        raise SourceError(
            f"{place}: the weights are quantized by the method {method!r}, which is not read "
            f"(those that are: {', '.join(_READERS)}); start from the original float checkpoint"
        )
    return reader(settings, place)


def collect_packed(tensors: Mapping[str, TensorHandle], format: PackedFormat | None, where: str) -> Collected:
    """Put the tensors of every packed weight together; `where` names config.json. Nothing large is read.

    Raises SourceError when tensors and config.json contradict each other, tensors of a module are missing, or their
    shapes and types do not fit.
    """
    if format is None:
        signs = [name for name in tensors if _SIGNS.search(name)]
        if signs:
            raise SourceError(
                f"{where}: says nothing of quantized weights (no quantization_config), but the checkpoint has "
                f"{len(signs)} tensors of quantized ones: {_listed(signs)}; fetch config.json again"
            )
        return Collected(tensors)
    packed = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in format.defining}
    defining = " or ".join(f"*.{part}" for part in format.defining)
    if not packed:
        raise SourceError(
            f"{where}: says that the weights are quantized (method {format.method!r}), but the checkpoint has no "
            f"tensor named {defining} (it has {_listed(list(tensors))}); they do not belong together"
        )
    modules: dict[str, dict[str, TensorHandle]] = {}
    kept: dict[str, TensorHandle] = {}
    dropped: list[str] = []
    for name, handle in tensors.items():
        module, _, part = name.rpartition(".")
        if module in packed and part in format.part_names:
            modules.setdefault(module, {})[part] = handle
        elif part in format.dropped:
            dropped.append(name)
        else:
            kept[name] = handle
    orphans = [name for name in kept if name.rpartition(".")[2] in format.part_names and _is_packed(name, kept[name])]
    if orphans:
        raise SourceError(
            f"{where}: {len(orphans)} tensors are parts of quantized weights that lack their {defining}: "
            f"{_listed(orphans)}; the download is incomplete"
        )
    for module, parts in modules.items():
        name = f"{module}.weight"
        if name in kept:
            raise SourceError(f"{name}: is stored both plain and quantized ({', '.join(sorted(parts))})")
        storage = format.open(module, parts)
        unused = [part for part in parts.values() if part not in storage.parts and not _is_absent_zero_point(part)]
        if unused:
            raise SourceError(
                f"{module}: is {storage.format}, which has no use for {_listed([part.name for part in unused])}; "
                "config.json and the tensors do not belong together"
            )
        kept[name] = PackedHandle(name, storage)
    warnings = []
    if dropped or format.quantizes_activations:
        named = f" ({len(dropped)} tensors are left out: {_listed(dropped)})" if dropped else ""
        warnings.append(
            f"the checkpoint is meant to be run with quantized activations{named}; its bundle computes with them as "
            "they are, which is closer to the original model"
        )
    return Collected(kept, format.method, tuple(warnings))


def _is_packed(name: str, handle: TensorHandle) -> bool:
    """Whether a tensor on its own is part of a packed weight, rather than a plain weight or the scales of a norm."""
    return not name.endswith((".weight", ".scales")) or not handle.dtype.is_floating_point or handle.dtype.itemsize == 1


def _is_absent_zero_point(part: TensorHandle) -> bool:
    """Whether these are the zero points of symmetric weights, which some versions store."""
    return part.name.endswith(".weight_zero_point") and not bool(part.load().to(torch.float32).any())


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
