"""Pages of keys and values on a device, and how their elements become bytes and numbers again.

Elements are kept as float32, float16 or bfloat16; as INT8 with a scale for each head that was calibrated, or for each
token and head that is found when the token is written; or as FP8 E4M3 (Micikevicius et al. 2022) with calibrated
scales. Chips before sm_89 and AMD's before gfx950 have no instructions for the E4M3 meant here, so bytes are made by
integer arithmetic everywhere, and read by it where there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from inferencex.formats.errors import BackendError
from inferencex.formats.kv_cache import KVFormat, KVScales

PageFormat = Literal["plain", "int8", "fp8", "fp8_bits"]
"""How a kernel reads an element: as its type says, as an integer, as E4M3 by instruction, as E4M3 by arithmetic."""

Scaling = Literal["none", "head", "token"]
"""What has a scale of its own: nothing, each head, or each head of each token."""

PLAIN_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
PAGE_TYPES: Final[dict[KVFormat, torch.dtype]] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The type of the elements in each format of calibrated scales."""


@dataclass(frozen=True)
class KVPages:
    """Keys and values of one layer.

    keys:   [blocks, block_size, G, Dk], contiguous: float32, float16, bfloat16, int8 or float8_e4m3fn
    values: [blocks, block_size, G, Dv], of the same type
    key_scales, value_scales: what elements are multiplied by, float32: `[G]`, or `[blocks, block_size, G]` that are
        written with the tokens (INT8 only), or None for float types

    Raises BackendError for tensors that contradict each other.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        """Check what kernels take for granted."""
        shapes = f"keys {list(self.keys.shape)} and values {list(self.values.shape)}"
        if self.keys.dim() != 4 or self.keys.shape[:3] != self.values.shape[:3]:
            raise BackendError(f"pages have {shapes}; expected [blocks, block_size, heads, width] of both")
        if not (self.keys.is_contiguous() and self.values.is_contiguous()):
            raise BackendError(f"pages with {shapes} are not contiguous")
        dtype = self.keys.dtype
        if self.values.dtype != dtype or dtype not in (*PLAIN_TYPES, *PAGE_TYPES.values()):
            raise BackendError(
                f"pages hold keys as {dtype} and values as {self.values.dtype}; expected one of float32, float16, "
                "bfloat16, int8 and float8_e4m3fn for both"
            )
        scales = (self.key_scales, self.value_scales)
        if dtype in PLAIN_TYPES:
            if any(scale is not None for scale in scales):
                raise BackendError(f"pages of {dtype} have no scales, and some were given")
            return
        by_head, by_token = self.keys.shape[2:3], self.keys.shape[:3]
        expected = (by_head,) if dtype == torch.float8_e4m3fn else (by_head, by_token)
        for scale in scales:
            if scale is None or scale.dtype != torch.float32 or not scale.is_contiguous():
                raise BackendError(f"pages of {dtype} need contiguous float32 scales for keys and values")
            if scale.shape not in expected or scale.shape != scales[0].shape:  # type: ignore[union-attr]
                found = [list(s.shape) for s in scales if s is not None]
                raise BackendError(f"pages of {dtype} have scales {found}, expected {' or '.join(map(str, expected))}")

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        heads: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype,
        device: str | torch.device,
        scales: KVScales | None = None,
    ) -> KVPages:
        """Reserve pages; what they hold is undefined until written.

        With `scales`, `dtype` is that of their format; int8 without gets a scale for each token and head. Raises
        BackendError for float8_e4m3fn without scales, and for scales of another type or number of heads.
        """
        size = (num_blocks, block_size, heads)
        keys = torch.empty(*size, key_width, dtype=dtype, device=device)
        values = torch.empty(*size, value_width, dtype=dtype, device=device)
        if scales is not None:
            if PAGE_TYPES[scales.format] != dtype or len(scales.keys) != heads or len(scales.values) != heads:
                raise BackendError(
                    f"pages of {dtype} for {heads} heads were given scales for {scales.format} and "
                    f"{len(scales.keys)} heads"
                )
            by_head = [torch.tensor(s, dtype=torch.float32, device=device) for s in (scales.keys, scales.values)]
            return cls(keys, values, *by_head)
        if dtype == torch.int8:
            # Zeros: a slot that was never written is read as part of a tile, and must not make NaN of what it meets.
            return cls(keys, values, *(torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2)))
        return cls(keys, values)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.keys.shape[2]

    @property
    def key_width(self) -> int:
        """Dk."""
        return self.keys.shape[3]

    @property
    def value_width(self) -> int:
        """Dv."""
        return self.values.shape[3]

    @property
    def scaling(self) -> Scaling:
        """What has a scale of its own."""
        if self.key_scales is None:
            return "none"
        return "head" if self.key_scales.dim() == 1 else "token"

    @property
    def format(self) -> PageFormat:
        """How kernels on this device read an element."""
        if self.keys.dtype == torch.int8:
            return "int8"
        if self.keys.dtype == torch.float8_e4m3fn:
            return "fp8" if converts_fp8(self.keys.device) else "fp8_bits"
        return "plain"

    def storage(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as kernels get them: E4M3 as bytes."""
        if self.keys.dtype == torch.float8_e4m3fn:
            return self.keys.view(torch.uint8), self.values.view(torch.uint8)
        return self.keys, self.values


def bytes_per_slot(heads: int, key_width: int, value_width: int, dtype: torch.dtype, scaling: Scaling) -> int:
    """Return the bytes that a token takes in the pages of a layer, its scales included."""
    return heads * ((key_width + value_width) * dtype.itemsize + (8 if scaling == "token" else 0))


def converts_fp8(device: torch.device) -> bool:
    """Whether kernels on a device turn E4M3 into numbers by an instruction: NVIDIA's from sm_89 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def int8_of(x):  # type: ignore[no-untyped-def]
    """Round float32 to INT8, ties to even, after clipping to -127..127; what is no number gives 0."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -127.0), 127.0), 0.0)
    # 1.5 * 2^23 leaves the integer in the last bits, rounded as every sum is.
    return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def e4m3_bits(x):  # type: ignore[no-untyped-def]
    """Round float32 to E4M3, ties to even, after clipping to -448..448, as uint8; what is no number stays none."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2^-6 are multiples of 2^-9; adding 2^14 leaves that multiple in the last bits.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0x3C800000, small, normal)
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (sign | byte).to(tl.uint8)


@triton.jit
def number_of_e4m3(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers that E4M3 bytes (uint8) stand for, exactly, as float32, float16 or bfloat16.

    The bits are moved to where the wider type has exponent and fraction; the power of two that the biases differ by
    is then multiplied with, which also makes numbers of subnormals.
    """
    if dtype == tl.float16:
        bits = x.to(tl.uint16)
        number = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number).to(tl.float16)
    else:
        wide = x.to(tl.uint32)
        number = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        number = tl.where((wide & 0x7F) == 0x7F, float("nan"), number)
        if dtype == tl.bfloat16:
            # Nothing is lost by cutting: a number of E4M3 has three bits of fraction.
            number = (number.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return number


@triton.jit
def number_of(x, FORMAT: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return elements of pages as `dtype`, not yet multiplied by their scales."""
    if FORMAT == "fp8":
        number = x.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif FORMAT == "fp8_bits":
        number = number_of_e4m3(x, dtype)
    else:
        number = x.to(dtype)
    return number
