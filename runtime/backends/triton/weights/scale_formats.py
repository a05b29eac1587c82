"""Codes of 8 bits that scales are kept in on a device.

e4m3  as bundles store it: a sign, exponents biased by 7, subnormal numbers
e5m3  no sign, exponents biased by 21, three bits of mantissa, no subnormal numbers: `(1 + m / 8) * 2^(e - 21)`,
which has every positive number of e4m3. A shift and an addition make a float of it. There is no zero:
groups that have it as their scale have zeros as numbers
e8m0  powers of two, `2^(code - 127)`, as bundles store them but for a factor, by which the largest is 1: float16
has no room for what lies far from 1
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScaleFormat = Literal["float", "e4m3", "e5m3", "e8m0"]
"""Numbers, or codes in uint8."""

SCALE_CODES: dict[torch.dtype, ScaleFormat] = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
"""The formats that bundles store."""

_BIAS_E4M3, _BIAS_E5M3 = 7, 21


def without_sign(codes: Tensor) -> Tensor:
    """Return codes of e4m3, uint8 and none negative, as e5m3; zero becomes the least number."""
    raised = (_BIAS_E5M3 - _BIAS_E4M3) << 3
    table = [0]
    for mantissa in range(1, 8):  # subnormal numbers: mantissa * 2^-9
        exponent = mantissa.bit_length() - 1
        table.append((exponent - 9 + _BIAS_E5M3) << 3 | (mantissa << (3 - exponent)) & 7)
    table += [code + raised for code in range(8, 128)]
    return torch.tensor(table, dtype=torch.uint8, device=codes.device)[codes.to(torch.int64)]


def around_one(codes: Tensor) -> tuple[Tensor, float]:
    """Return codes of powers of two of which the largest is 1, and what they are to be multiplied by."""
    shift = min(max(int(codes.max()) - 127, -120), 120)  # whose power of two float32 has
    return (codes.to(torch.int16) - shift).clamp(0, 255).to(torch.uint8), 2.0**shift


def zeros_of_zero_scales(values: Tensor, codes: Tensor, group_size: int) -> Tensor:
    """Return 4-bit numbers, two to a byte, with zeros wherever the scale of their group is zero.

    values: uint8, flat, of rows of whole bytes; codes: uint8 `[..., groups]`; groups are whole bytes
    """
    if bool((codes != 0).all()):
        return values
    rows = values.view(-1, values.numel() // (codes.numel() // codes.shape[-1]))
    kept = (codes != 0).view(rows.shape[0], -1).repeat_interleave(group_size // 2, dim=1)[:, : rows.shape[1]]
    return torch.where(kept, rows, torch.zeros_like(rows)).view(-1)
