"""PTX that takes small numbers out of pairs of 16-bit words, for `tl.inline_asm_elementwise` with `pack=2`.

`$1` is a register with two words, `$0` one with two results of 16 bits; `$2`, where there is one, is added to the
results. What the formulas are is in kernels/dequantize.py. A shift of the register moves bits from one word into the
other; where it does, they are masked away. bfloat16 has no addition on sm_80: a fused multiply-add with 1 stands for
it.
"""

from __future__ import annotations

from triton.runtime.jit import constexpr_function

_ONE_BFLOAT16 = "0x3F803F80"
_SIXTEENTH_FLOAT16 = "0x2C002C00"


def int4_float16(place: int) -> str:
    """Nibbles 0 and 1 of words; those of the upper byte come after a shift of the words by 8."""
    if place % 2 == 0:
        return "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA; add.f16x2 $0, t, $2; }"
    return (
        "{ .reg .b32 t, m; lop3.b32 t, $1, 0x00F000F0, 0x64006400, 0xEA; "
        f"mov.b32 m, {_SIXTEENTH_FLOAT16}; fma.rn.f16x2 $0, t, m, $2; }}"
    )


def int8_float16(place: int) -> str:
    """Byte 0 or 1 of words, put under the upper byte of 1024."""
    selector = "0x4240" if place == 0 else "0x4341"
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0x64646464, {selector}; add.f16x2 $0, t, $2; }}"


def int4_bfloat16(place: int) -> str:
    """Nibble `place` of words."""
    return (
        f"{{ .reg .b32 t, m; shr.b32 t, $1, {4 * place}; lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA; "
        f"mov.b32 m, {_ONE_BFLOAT16}; fma.rn.bf16x2 $0, t, m, $2; }}"
    )


def int8_bfloat16(place: int) -> str:
    """Byte `place` of words, less 128: its lower seven bits less the 128 that the eighth stands for."""
    return (
        f"{{ .reg .b32 t, a, b, m; shr.b32 t, $1, {8 * place}; lop3.b32 a, t, 0x007F007F, 0x43004300, 0xEA; "
        f"lop3.b32 b, t, 0x00800080, 0xC380C380, 0x6A; mov.b32 m, {_ONE_BFLOAT16}; fma.rn.bf16x2 $0, a, m, b; }}"
    )


def add_bfloat16() -> str:
    """The sum of `$1` and `$2`."""
    return f"{{ .reg .b32 m; mov.b32 m, {_ONE_BFLOAT16}; fma.rn.bf16x2 $0, $1, m, $2; }}"


def shift_right(bits: int) -> str:
    """Shift the register."""
    return f"shr.b32 $0, $1, {bits};"


def small_float_bits(left: int, down: int, mask: int) -> str:
    """Floats of 4 bits: `left` brings the sign to the top, `down` the rest, under `mask`, to where it belongs."""
    shifted = f"shl.b32 l, $1, {left};" if left else "mov.b32 l, $1;"
    return (
        f"{{ .reg .b32 l, s, t; {shifted} and.b32 s, l, 0x80008000; shr.b32 t, l, {down}; "
        f"lop3.b32 $0, t, 0x{mask << 16 | mask:08X}, s, 0xEA; }}"
    )


def small_float(left: int, down: int, mask: int, is_bfloat16: bool, factor: int) -> str:
    """Floats of 4 or 8 bits: `left` brings the sign to the top, `down` the rest, under `mask`, to where it belongs."""
    both = f"0x{mask << 16 | mask:08X}"
    multiply = "fma.rn.bf16x2 $0, t, m, z;" if is_bfloat16 else "mul.f16x2 $0, t, m;"
    return (
        f"{{ .reg .b32 l, s, t, m, z; shl.b32 l, $1, {left}; and.b32 s, l, 0x80008000; shr.b32 t, l, {down}; "
        f"lop3.b32 t, t, {both}, s, 0xEA; mov.b32 z, 0x80008000; "
        f"mov.b32 m, 0x{factor << 16 | factor:08X}; {multiply} }}"
    )


INT4_FLOAT16 = constexpr_function(int4_float16)
INT8_FLOAT16 = constexpr_function(int8_float16)
INT4_BFLOAT16 = constexpr_function(int4_bfloat16)
INT8_BFLOAT16 = constexpr_function(int8_bfloat16)
ADD_BFLOAT16 = constexpr_function(add_bfloat16)
SHIFT_RIGHT = constexpr_function(shift_right)
SMALL_FLOAT = constexpr_function(small_float)
SMALL_FLOAT_BITS = constexpr_function(small_float_bits)
