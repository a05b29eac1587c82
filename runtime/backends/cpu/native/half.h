// bfloat16 and float16 as 16 bits, one at a time; rounding is to nearest, ties to even.
#pragma once

#include <cstdint>

namespace inferencex::cpu {

// Inlined always: the files that include this are compiled for different instruction sets, and a function that the
// linker shared among them could be the one that this machine does not run.
#define INFERENCEX_HALF [[gnu::always_inline]] inline

INFERENCEX_HALF float from_bf16(std::uint16_t h) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(h) << 16);
}

INFERENCEX_HALF std::uint16_t to_bf16(float v) {
    const auto bits = __builtin_bit_cast(std::uint32_t, v);
    if (v != v) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

INFERENCEX_HALF float from_f16(std::uint16_t h) {
    // The exponent is rebiased by a multiplication, which also handles subnormal numbers.
    const std::uint32_t sign = (h & 0x8000U) << 16;
    std::uint32_t bits = (h & 0x7fffU) << 13;
    if (bits >= 0x0f800000U)  // infinity or NaN
        bits |= 0x7f800000U;
    else bits = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, bits) * 0x1p112F);
    return __builtin_bit_cast(float, bits | sign);
}

INFERENCEX_HALF std::uint16_t to_f16(float v) {
    auto bits = __builtin_bit_cast(std::uint32_t, v);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    bits &= 0x7fffffffU;
    if (bits > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
    if (bits >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // rounds past the largest
    if (bits < 0x38800000U) {                                                    // subnormal: let the addition round
        const auto sum = __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, bits) + 0.5F);
        return static_cast<std::uint16_t>(sign | (sum - 0x3f000000U));
    }
    bits += 0xc8000fffU + ((bits >> 13) & 1U);  // rebias by -112 and round
    return static_cast<std::uint16_t>(sign | (bits >> 13));
}

#undef INFERENCEX_HALF

}  // namespace inferencex::cpu
