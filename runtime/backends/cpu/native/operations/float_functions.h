// Functions of one float, written without branches so that compilers vectorize loops over them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace inferencex::cpu::functions {

// e^x within 2 ulp: range reduction by powers of two, then a polynomial (Cephes, expf).
inline float exp(float x) {
    float bounded = x > -104.0F ? x : -104.0F;  // e^-104 rounds to 0, e^89 to infinity
    bounded = bounded < 89.0F ? bounded : 89.0F;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const float shifted = bounded * 1.44269504F + 12582912.0F;
    const float k = shifted - 12582912.0F;
    const float r = (bounded - k * 0.693359375F) + k * 2.12194440e-4F;
    float p = 1.9875691500e-4F;
    p = p * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    p = (p * (r * r) + r) + 1.0F;
    // 2^n in two factors: one alone is not a normal number at either end.
    const std::int32_t n = std::bit_cast<std::int32_t>(shifted) - 0x4b400000;
    const std::int32_t half = n >> 1;
    const float low = std::bit_cast<float>((half + 127) << 23);
    const float high = std::bit_cast<float>((n - half + 127) << 23);
    return x != x ? x : p * low * high;
}

inline float sigmoid(float x) { return 1.0F / (1.0F + exp(-x)); }

inline float tanh(float x) {
    // 1 - 2 / (e^2|x| + 1) loses digits near 0, where an odd polynomial takes over (Cephes, tanhf).
    const float a = std::fabs(x);
    const float z = x * x;
    float p = -5.70498872745e-3F;
    p = p * z + 2.06390887954e-2F;
    p = p * z - 5.37397155531e-2F;
    p = p * z + 1.33314422036e-1F;
    p = p * z - 3.33332819422e-1F;
    const float small = p * z * x + x;
    const float large = std::copysign(1.0F - 2.0F / (exp(a + a) + 1.0F), x);
    return a < 0.625F ? small : large;
}

inline float gelu(float x) { return 0.5F * x * (1.0F + std::erf(x * 0.70710678F)); }
inline float gelu_tanh(float x) { return 0.5F * x * (1.0F + tanh(0.79788456F * (x + 0.044715F * x * x * x))); }
inline float softplus(float x) { return (x < 0.0F ? 0.0F : x) + std::log1p(std::exp(-std::fabs(x))); }

}  // namespace inferencex::cpu::functions
