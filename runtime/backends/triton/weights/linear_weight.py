"""A weight of a linear layer, or a stack of them, in the layout of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.formats.packing import NUMBER_BITS, PER_CHANNEL, Number
from inferencex.runtime.backends.triton.weights.layout import (
    by_group,
    pack_words,
    panel_of,
    unpack_stream,
    with_offset,
)
from inferencex.runtime.backends.triton.weights.scale_formats import (
    SCALE_CODES,
    ScaleFormat,
    around_one,
    without_sign,
    zeros_of_zero_scales,
)

Format = Literal["plain", "int4", "int8", "e4m3", "e2m1"]
"""What a weight's numbers are: floats of the compute type, or numbers in words (layout.py)."""

FORMATS: tuple[Format, ...] = get_args(Format)

Layout = Literal["panels", "rows"]
"""Words in panels for kernels that multiply floats, or whole bytes row by row for those that multiply 8-bit numbers."""

_BITS: dict[Format, int] = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4}
_PLAIN_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_HALF = 2.0**-14  # below, float16 has fewer bits


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight `[N, K]`, or a stack `[E, N, K]`: `weight = (number - zero_point) * scale * tensor_scale`.

    format:       what the numbers are
    shape:        the logical shape
    layout:       "rows" for plain weights, and for 8-bit numbers that are multiplied as such
    values:       "panels": int16 words `[..., panels, N, slice]`; "rows": `[..., N, K]`, of the compute type, int8 or
                  float8_e4m3fn
    scales:       `[..., groups, N]`, float32, float16 or bfloat16, or uint8 codes of `scale_format`; groups are those
                  of K padded to panels; None for plain weights
    zero_points:  uint8 `[..., groups, N]`, with the offset of the integers; None when symmetric
    group_size:   features that share a scale; K where a row has one
    panel:        features of a panel; 0 in rows
    scale_format: "float", or what the codes are (scale_formats.py)
    tensor_scale: a factor of all scales
    bias:         `[N]` or `[E, N]`, or None
    """

    format: Format
    shape: tuple[int, ...]
    values: Tensor
    layout: Layout = "panels"
    scales: Tensor | None = None
    zero_points: Tensor | None = None
    group_size: int = 0
    panel: int = 0
    scale_format: ScaleFormat = "float"
    tensor_scale: float = 1.0
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:
        """N, the rows of the weight."""
        return self.shape[-2]

    @property
    def in_features(self) -> int:
        """K, the columns of the weight."""
        return self.shape[-1]

    @property
    def experts(self) -> int:
        """Matrices in the stack; 1 where there is none."""
        return math.prod(self.shape[:-2])

    @property
    def bits(self) -> int:
        """Bits that a number takes on the device."""
        return _BITS.get(self.format) or 8 * self.values.element_size()

    @property
    def slices(self) -> int:
        """Numbers in a word of a panel."""
        return 16 // self.bits

    @property
    def slice_features(self) -> int:
        """Features of a slice: words of a row in a panel."""
        return self.panel // self.slices

    @property
    def is_per_channel(self) -> bool:
        """Whether a row has one scale."""
        return self.group_size >= self.in_features

    @property
    def nbytes(self) -> int:
        """Bytes on the device, which a decode step reads all of."""
        parts = (self.values, self.scales, self.zero_points, self.bias)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


def plain(values: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> LinearWeight:
    """Return a weight of floats, `[N, K]` or `[E, N, K]`, in the compute type `dtype`.

    Raises BackendError for other shapes and types.
    """
    if values.dim() not in (2, 3) or dtype not in _PLAIN_TYPES or not values.is_floating_point():
        raise BackendError(f"a plain weight {list(values.shape)} of {values.dtype} cannot be made {dtype}")
    _check_bias(bias, tuple(values.shape))
    bias = None if bias is None else bias.to(dtype)
    return LinearWeight("plain", tuple(values.shape), values.to(dtype).contiguous(), layout="rows", bias=bias)


def from_canonical(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    shape: tuple[int, ...],
    bits: int,
    number: Number = "int",
    signed: bool = True,
    group_size: int = PER_CHANNEL,
    tensor_scale: float = 1.0,
    bias: Tensor | None = None,
    layout: Layout = "panels",
) -> LinearWeight:
    """Return a quantized weight, as a bundle stores it (formats/packing.py), in the layout of the kernels.

    All tensors lie on one device, where the work is done; nothing but the result stays.

    values:       uint8, the flat stream of packed numbers for less than 8 bits; for 8 bits int8, uint8 or
                  float8_e4m3fn of `shape`
    scales:       `[..., N, groups]`, or `[N]` per channel: float32, float16, bfloat16, float8_e4m3fn or float8_e8m0fnu
    zero_points:  stored like `values`, in the shape of `scales`; None when symmetric
    shape:        `[N, K]` or `[E, N, K]`
    signed:       whether integers are in two's complement; of 8 bits, `values` says so
    group_size:   features that share a scale, the last group may have fewer; `PER_CHANNEL` for one scale a row
    layout:       "rows" keeps symmetric 8-bit numbers with a scale a row as they are, for `scaled_linear`

    Raises BackendError when the parts do not belong together.
    """
    features = shape[-1]
    is_per_channel = group_size == PER_CHANNEL or group_size >= features
    groups = 1 if is_per_channel else -(-features // group_size)
    _check_parts(values, scales, zero_points, shape, bits, number, groups)
    _check_bias(bias, shape)
    if bits == 8:
        signed = values.dtype == torch.int8
    group_size = features if is_per_channel else group_size
    scale_format: ScaleFormat = SCALE_CODES.get(scales.dtype, "float")
    scales = scales.view(torch.uint8) if scale_format != "float" else _smallest_type(scales)
    if scale_format == "e8m0":
        scales, power = around_one(scales)
        tensor_scale *= power
    scales = scales.reshape(*shape[:-1], groups)
    has_whole_bytes = features % 2 == 0 and group_size % 2 == 0
    if number == "e2m1" and scale_format == "e4m3" and has_whole_bytes and not bool((scales & 0x80).any()):
        values = zeros_of_zero_scales(values.reshape(-1), scales, group_size)
        scales, scale_format = without_sign(scales), "e5m3"
    if layout == "rows":
        if bits != 8 or not is_per_channel or zero_points is not None or values.dtype == torch.uint8:
            raise BackendError(
                f"{bits}-bit {number} numbers {list(shape)} in groups of {group_size} cannot be multiplied as such; "
                "expected symmetric 8-bit numbers with one scale a row"
            )
        return LinearWeight(
            "int8" if number == "int" else "e4m3",
            shape,
            values.contiguous(),
            "rows",
            by_group(scales, 1),
            group_size=group_size,
            scale_format=scale_format,
            tensor_scale=tensor_scale,
            bias=bias,
        )
    width = 4 if bits <= 4 else 8
    panel = panel_of(width, group_size, features) if number != "e2m1" else 128
    padded = 1 if is_per_channel else -(-(-(-features // panel) * panel) // group_size)
    is_signed = signed if number == "int" else None
    if zero_points is None and is_signed is False:
        zeros: Tensor | None = torch.zeros((*shape[:-1], groups), dtype=torch.uint8, device=values.device)
    elif zero_points is None:
        zeros = None
    else:
        codes = unpack_stream(zero_points.view(torch.uint8), math.prod(shape[:-1]) * groups, bits)
        zeros = with_offset(codes, bits, is_signed).reshape(*shape[:-1], groups)
    return LinearWeight(
        _format(number, width),
        shape,
        pack_words(values.view(torch.uint8), shape, bits, is_signed, panel),
        "panels",
        by_group(scales, padded),
        None if zeros is None else by_group(zeros, padded),
        group_size,
        panel,
        scale_format,
        tensor_scale,
        bias,
    )


def _format(number: Number, width: int) -> Format:
    if number == "int":
        return "int4" if width == 4 else "int8"
    return number


def _smallest_type(scales: Tensor) -> Tensor:
    """Return float32 scales as float16 where that loses nothing: they are read with every weight."""
    if scales.dtype != torch.float32:
        return scales
    halves = scales.to(torch.float16)
    magnitudes = scales.abs()
    is_exact = (halves.to(torch.float32) == scales) & ((magnitudes >= _SMALLEST_HALF) | (magnitudes == 0))
    return halves if bool(is_exact.all()) else scales


def _check_parts(
    values: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    shape: tuple[int, ...],
    bits: int,
    number: Number,
    groups: int,
) -> None:
    if len(shape) not in (2, 3) or min(shape) < 1 or bits not in NUMBER_BITS[number]:
        raise BackendError(f"{bits}-bit {number} weights {list(shape)} are none that the GPU backend knows")
    types = (torch.uint8,) if bits < 8 else (torch.int8, torch.uint8) if number == "int" else (torch.float8_e4m3fn,)
    count = math.prod(shape)
    expected = (count * bits + 7) // 8
    if values.dtype not in types or values.numel() != expected:
        raise BackendError(
            f"the values of a {bits}-bit weight {list(shape)} are {values.numel()} of {values.dtype}, "
            f"expected {expected} of {' or '.join(map(str, types))}"
        )
    scale_count = math.prod(shape[:-1]) * groups
    if scales.numel() != scale_count or not (scales.dtype in _PLAIN_TYPES or scales.dtype in SCALE_CODES):
        raise BackendError(
            f"the scales of a weight {list(shape)} are {scales.numel()} of {scales.dtype}, "
            f"expected {scale_count} floats"
        )
    if zero_points is None:
        return
    expected = (scale_count * bits + 7) // 8
    if number != "int" or zero_points.dtype != values.dtype or zero_points.numel() != expected:
        raise BackendError(
            f"the zero points of a {bits}-bit {number} weight {list(shape)} are {zero_points.numel()} of "
            f"{zero_points.dtype}, expected {expected} of {values.dtype}"
        )


def _check_bias(bias: Tensor | None, shape: tuple[int, ...]) -> None:
    if bias is not None and tuple(bias.shape) != shape[:-1]:
        raise BackendError(f"the bias of a weight {list(shape)} is {list(bias.shape)}, expected {list(shape[:-1])}")
