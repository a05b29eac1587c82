"""What the formats of packed checkpoints share: which parameters are quantized linears, and which stay plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.errors import ExportError
from inferencex.formats.export.parameters import Parameter, grouped_scales, is_ragged
from inferencex.formats.packing import PER_CHANNEL, QuantizedTensor, pack_bits

_SHOWN = 3


@dataclass
class LinearPlan:
    """What becomes of a bundle's parameters.

    quantized:  weights that stay as integers
    plain:      everything else; those that the bundle has quantized are written as the float32 numbers they stand for
    excluded:   names of the linear modules that stay plain
    notes:      what a user should know
    """

    quantized: list[Parameter] = field(default_factory=list)
    plain: list[Parameter] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_linears(parameters: Sequence[Parameter], format_name: str, *, head: bool) -> LinearPlan:
    """Decide for every parameter, where `head` says whether the format can hold a quantized head.

    Raises ExportError for weights that the format has no form for.
    """
    plan = LinearPlan()
    widened: list[str] = []
    for parameter in parameters:
        if parameter.use == "linear" or (parameter.use == "head" and head):
            if parameter.is_quantized:
                _check_linear(parameter, format_name)
                plan.quantized.append(parameter)
                continue
            plan.excluded.append(parameter.module)
        elif parameter.use == "head":
            plan.excluded.append(parameter.module)
        elif parameter.use == "experts" and parameter.is_quantized:
            raise ExportError(
                f"{parameter.name}: {format_name} has no form for quantized weights of several experts in one tensor; "
                "convert with --exclude '*experts*', or export another format"
            )
        elif parameter.is_quantized and parameter.use == "other":
            raise ExportError(f"{parameter.name}: is quantized, but no linear; {format_name} has no form for it")
        if parameter.is_quantized:
            widened.append(parameter.name)
        plan.plain.append(parameter)
    if not any(parameter.use == "head" for parameter in parameters):
        # The head shares the embedding; its module is a linear all the same, and has no integers.
        plan.excluded.append("lm_head")
    if not plan.quantized:
        raise ExportError(
            f"the bundle has no quantized linear that {format_name} could hold; export of plain weights is the "
            "checkpoint it was converted from"
        )
    if widened:
        plan.notes.append(
            f"{format_name} holds linears only: {listed(widened)} written as float32, without loss and larger"
        )
    return plan


def _check_linear(parameter: Parameter, format_name: str) -> None:
    if parameter.transposed or len(parameter.shape) != 2:
        raise ExportError(
            f"{parameter.name}: the model keeps this weight as {list(parameter.shape)}, input features first, and "
            f"{format_name} is for linears with output features first"
        )


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def check_integers(name: str, tensor: QuantizedTensor, format_name: str) -> None:
    """Refuse weights that are floats; raises ExportError."""
    if tensor.number != "int":
        raise ExportError(
            f"{name}: its values are {tensor.number} floats, {format_name} holds integers; export compressed-tensors"
        )


def check_groups(name: str, tensor: QuantizedTensor, format_name: str) -> None:
    """Refuse groups that do not divide the input features; raises ExportError."""
    if is_ragged(tensor):
        raise ExportError(
            f"{name}: has {tensor.shape[-1]} input features in groups of {tensor.group_size}, so that the last group "
            f"is shorter, which {format_name} cannot say; convert with a --group-size that divides them"
        )


def float16_scales(name: str, tensor: QuantizedTensor, format_name: str) -> NDArray[np.float16]:
    """Return the scales `[N, groups]` as float16; raises ExportError where float16 cannot hold them."""
    scales = grouped_scales(tensor)
    narrow: NDArray[np.float16] = scales.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), scales.astype(np.float32)):
        raise ExportError(
            f"{name}: its scales are outside of what float16 holds without loss, and {format_name} keeps float16"
        )
    return narrow


def group_size_of(tensor: QuantizedTensor) -> int:
    """Return the group size as configurations say it: -1 for one scale to an output channel."""
    per_channel = tensor.group_size == PER_CHANNEL or tensor.group_size >= tensor.shape[-1]
    return PER_CHANNEL if per_channel else tensor.group_size


def pack_words(fields: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Pack unsigned integers `[M, C]` into words `[M, ceil(C * bits / 32)]`, the first in the lowest bits.

    An integer may lie across two words; missing integers of the last one are 0.
    """
    rows, columns = fields.shape
    words = -(-columns * bits // 32)
    padded = np.zeros((rows, -(-columns // 32) * 32), dtype=np.uint8)
    padded[:, :columns] = fields
    packed: NDArray[np.int32] = pack_bits(padded, bits).view("<i4").astype(np.int32, copy=False)
    return packed.reshape(rows, -1)[:, :words]
