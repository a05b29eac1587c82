"""The assembly for pairs of words, computed instruction by instruction on every word there is."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from inferencex.runtime.backends.triton.kernels import pair_assembly

Registers = NDArray[np.uint32]

_WORDS = np.arange(1 << 16, dtype=np.uint16)
_PAIRS: Registers = np.stack((_WORDS, np.roll(_WORDS, 12345)), axis=-1).view(np.uint32).reshape(-1)


def _lop3(a: Registers, b: Registers, c: Registers, table: int) -> Registers:
    result = np.zeros_like(a)
    for case in range(8):
        if table >> case & 1:
            result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return result


def _prmt(a: Registers, b: Registers, selector: int) -> Registers:
    both = np.stack((a, b), axis=-1).view(np.uint8)
    return np.stack([both[:, selector >> 4 * place & 7] for place in range(4)], axis=-1).copy().view(np.uint32)[:, 0]


def _halves(register: Registers, name: str) -> NDArray[np.float64]:
    number = np.float16 if "f16x2" in name.replace("bf16x2", "") else ml_dtypes.bfloat16
    return register.view(number).astype(np.float64)


def _register(values: NDArray[np.float64], name: str) -> Registers:
    number = np.float16 if "f16x2" in name.replace("bf16x2", "") else ml_dtypes.bfloat16
    return values.astype(number).view(np.uint32)


def run(assembly: str, words: Registers, added: Registers | None = None) -> Registers:
    """Return `$0` of PTX that uses the instructions below."""
    registers: dict[str, Registers] = {"$1": words}
    if added is not None:
        registers["$2"] = added
    for line in assembly.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.split(maxsplit=1)
        to, *sources = re.split(r",\s*", rest.strip())
        read = [registers[s] if s in registers else np.full_like(words, np.uint32(int(s, 0))) for s in sources]
        if name == "lop3.b32":
            value = _lop3(*read[:3], int(sources[3], 0))
        elif name == "prmt.b32":
            value = _prmt(*read[:2], int(sources[2], 0))
        elif name == "shr.b32":
            value = read[0] >> read[1]
        elif name == "shl.b32":
            value = read[0] << read[1]
        elif name == "and.b32":
            value = read[0] & read[1]
        elif name == "mov.b32":
            value = read[0]
        elif name == "add.f16x2":
            value = _register(_halves(read[0], name) + _halves(read[1], name), name)
        elif name == "mul.f16x2":
            value = _register(_halves(read[0], name) * _halves(read[1], name), name)
        elif name in ("fma.rn.f16x2", "fma.rn.bf16x2"):
            value = _register(_halves(read[0], name) * _halves(read[1], name) + _halves(read[2], name), name)
        else:
            raise AssertionError(f"no rule for {name}")
        registers[to] = value
    return registers["$0"]


def _codes(place: int, bits: int) -> NDArray[np.float64]:
    return (_PAIRS.view(np.uint16) >> (bits * place) & ((1 << bits) - 1)).astype(np.float64)


def _constant(value: float, number: type[np.generic]) -> Registers:
    return np.full(_PAIRS.size * 2, value, number).view(np.uint32)


@pytest.mark.parametrize("place", range(4))
def test_four_bits(place: int) -> None:
    shifted = run(pair_assembly.shift_right(8), _PAIRS) if place >= 2 else _PAIRS
    less = -(64 + 8) if place % 2 else -(1024 + 8)
    half = run(pair_assembly.int4_float16(place), shifted, _constant(less, np.float16))
    np.testing.assert_array_equal(half.view(np.float16).astype(np.float64), _codes(place, 4) - 8)
    brain = run(pair_assembly.int4_bfloat16(place), _PAIRS, _constant(-(128 + 3), ml_dtypes.bfloat16))
    np.testing.assert_array_equal(brain.view(ml_dtypes.bfloat16).astype(np.float64), _codes(place, 4) - 3)


@pytest.mark.parametrize("place", range(2))
def test_eight_bits(place: int) -> None:
    half = run(pair_assembly.int8_float16(place), _PAIRS, _constant(-(1024 + 77), np.float16))
    np.testing.assert_array_equal(half.view(np.float16).astype(np.float64), _codes(place, 8) - 77)
    brain = run(pair_assembly.int8_bfloat16(place), _PAIRS)
    np.testing.assert_array_equal(brain.view(ml_dtypes.bfloat16).astype(np.float64), _codes(place, 8) - 128)
    for zero in (0, 77, 255):
        less = run(pair_assembly.add_bfloat16(), brain, _constant(128 - zero, ml_dtypes.bfloat16))
        np.testing.assert_array_equal(less.view(ml_dtypes.bfloat16).astype(np.float64), _codes(place, 8) - zero)


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_small_floats(bits: int, is_bfloat16: bool) -> None:
    number = ml_dtypes.float4_e2m1fn if bits == 4 else ml_dtypes.float8_e4m3fn
    down = {(4, False): 3, (4, True): 6, (8, False): 1, (8, True): 4}[bits, is_bfloat16]
    power = {(4, False): 14, (4, True): 126, (8, False): 8, (8, True): 120}[bits, is_bfloat16]
    result = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else np.float16)
    factor = int(np.array(2.0**power).astype(result).view(np.uint16))
    for place in range(16 // bits):
        mask = (0x7000 if bits == 4 else 0x7F00) >> down
        text = pair_assembly.small_float(16 - bits - bits * place, down, mask, is_bfloat16, factor)
        found = run(text, _PAIRS).view(result).astype(np.float64)
        expected = _codes(place, bits).astype(np.uint8).view(number).astype(np.float64)
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(found[is_number], expected[is_number])
