"""AWQ as AutoAWQ stores it (`version: gemm`): 4-bit integers with zero points, eight output channels to a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inferencex.formats.bundle import Bundle
from inferencex.formats.errors import ExportError
from inferencex.formats.export.activations import quantizes_activations
from inferencex.formats.export.checkpoint import CheckpointWriter
from inferencex.formats.export.linears import (
    check_groups,
    check_integers,
    float16_scales,
    group_size_of,
    pack_words,
    plan_linears,
)
from inferencex.formats.export.parameters import Parameter, parameters_of, unsigned
from inferencex.formats.packing import QuantizedTensor

NAME = "awq"
_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight output channels goes into the n-th nibble of a word."""


def write(bundle: Bundle, folder: Path) -> list[str]:
    """Write the checkpoint into `folder` and return what a user should know of it.

    Every linear of N output and K input features becomes `qweight` int32 `[K, N / 8]`, `qzeros` int32
    `[K / group, N / 8]` and `scales` float16 `[K / group, N]`. Raises ExportError for what the format cannot say:
    other than 4 bits, group sizes that differ, ragged groups, N that is no multiple of 8.
    """
    writer = CheckpointWriter(bundle, folder)
    plan = plan_linears(parameters_of(bundle), NAME, head=False)
    group_size: int | None = None
    for parameter in plan.quantized:
        tensor = parameter.quantized()
        _check(parameter, tensor)
        if group_size is None:
            group_size = group_size_of(tensor)
        if group_size != group_size_of(tensor):
            raise ExportError(
                f"{parameter.name}: has groups of {group_size_of(tensor)}, other weights of {group_size}; {NAME} knows "
                "one group size for all; export compressed-tensors or gptq"
            )
        integers, zero_points = unsigned(tensor)
        writer.add(f"{parameter.module}.qweight", _packed(integers.T))
        writer.add(f"{parameter.module}.qzeros", _packed(zero_points.T))
        writer.add(f"{parameter.module}.scales", float16_scales(parameter.name, tensor, NAME).T)
    for parameter in plan.plain:
        writer.add_plain(parameter)
    writer.finish(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": plan.excluded or None,
        },
        {"dtype": "float16", "torch_dtype": "float16"},
    )
    notes = [*plan.notes, "config.json asks for float16, the only type that AWQ kernels compute in"]
    if quantizes_activations(bundle):
        notes.append("the bundle quantizes activations, which awq does not say: they stay float16")
    return notes


def _check(parameter: Parameter, tensor: QuantizedTensor) -> None:
    check_integers(parameter.name, tensor, NAME)
    if tensor.bits != 4:
        raise ExportError(
            f"{parameter.name}: has {tensor.bits} bits, {NAME} has 4; export gptq or compressed-tensors, or convert "
            "all linears to int4"
        )
    check_groups(parameter.name, tensor, NAME)
    if tensor.shape[0] % 8:
        raise ExportError(f"{parameter.name}: has {tensor.shape[0]} output features; {NAME} packs multiples of 8")


def _packed(columns: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Pack `[M, N]` into `[M, N / 8]`, the eight channels of a word in AWQ's order."""
    rows, channels = columns.shape
    ordered = columns.reshape(rows, channels // 8, 8)[:, :, _ORDER].reshape(rows, channels)
    return pack_words(np.ascontiguousarray(ordered), 4)
