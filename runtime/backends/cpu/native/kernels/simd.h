// Sixteen floats at a time, on any instruction set. Only the translation units of kernels/ include this, each with its
// own flags and INFERENCEX_ISA: the same source becomes one namespace an instruction set.
//
// Contraction is off everywhere (`fma` is explicit), so that a value is computed by the same operations in every
// function that computes it, however many rows it works on.
#pragma once

#ifndef INFERENCEX_ISA
#error "define INFERENCEX_ISA to the namespace of this instruction set"
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../half.h"

#define INFERENCEX_INLINE inline __attribute__((always_inline))

namespace inferencex::cpu::INFERENCEX_ISA {

using f32x16 = float __attribute__((vector_size(64)));
using f32x8 = float __attribute__((vector_size(32)));
using i32x16 = std::int32_t __attribute__((vector_size(64)));
using u32x16 = std::uint32_t __attribute__((vector_size(64)));
using i8x16 = std::int8_t __attribute__((vector_size(16)));
using u8x16 = std::uint8_t __attribute__((vector_size(16)));
using u16x16 = std::uint16_t __attribute__((vector_size(32)));

inline constexpr int kLanes = 16;

template <class V, class T>
INFERENCEX_INLINE V load_as(const T *p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INFERENCEX_INLINE f32x16 load(const float *p) { return load_as<f32x16>(p); }
INFERENCEX_INLINE void store(float *p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
INFERENCEX_INLINE f32x16 set1(float x) { return f32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INFERENCEX_INLINE i32x16 set1(std::int32_t x) { return i32x16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INFERENCEX_INLINE f32x16 zero() { return f32x16{}; }

// The first `n` of 16; the rest is `fill`.
INFERENCEX_INLINE f32x16 load_partial(const float *p, int n, float fill = 0.0F) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_mask_loadu_ps((__m512)set1(fill), static_cast<__mmask16>((1U << n) - 1), p);
#else
    f32x16 v = set1(fill);
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
#endif
}
INFERENCEX_INLINE void store_partial(float *p, f32x16 v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1U << n) - 1), (__m512)v);
#else
    for (int i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// a * b + c, rounded once where the instruction set can.
INFERENCEX_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    f32x8 al, ah, bl, bh, cl, ch;
    std::memcpy(&al, &a, 32);
    std::memcpy(&ah, reinterpret_cast<const char *>(&a) + 32, 32);
    std::memcpy(&bl, &b, 32);
    std::memcpy(&bh, reinterpret_cast<const char *>(&b) + 32, 32);
    std::memcpy(&cl, &c, 32);
    std::memcpy(&ch, reinterpret_cast<const char *>(&c) + 32, 32);
    const __m256 lo = _mm256_fmadd_ps((__m256)al, (__m256)bl, (__m256)cl);
    const __m256 hi = _mm256_fmadd_ps((__m256)ah, (__m256)bh, (__m256)ch);
    f32x16 r;
    std::memcpy(&r, &lo, 32);
    std::memcpy(reinterpret_cast<char *>(&r) + 32, &hi, 32);
    return r;
#elif defined(__aarch64__)
    float32x4_t x[4], y[4], z[4];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    std::memcpy(z, &c, 64);
    for (int i = 0; i < 4; ++i) z[i] = vfmaq_f32(z[i], x[i], y[i]);
    f32x16 r;
    std::memcpy(&r, z, 64);
    return r;
#else
    return a * b + c;
#endif
}

INFERENCEX_INLINE f32x16 max(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
INFERENCEX_INLINE f32x16 min(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
INFERENCEX_INLINE f32x16 abs(f32x16 v) { return (f32x16)((i32x16)v & set1(std::int32_t{0x7fffffff})); }
INFERENCEX_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }

INFERENCEX_INLINE f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
// Nearest integer, ties to even; |v| < 2^31.
INFERENCEX_INLINE i32x16 to_int(f32x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
    __m256 x[2];
    std::memcpy(x, &v, sizeof x);
    const __m256i y[2] = {_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])};
    return load_as<i32x16>(y);
#elif defined(__SSE2__)
    __m128 x[4];
    std::memcpy(x, &v, sizeof x);
    const __m128i y[4] = {_mm_cvtps_epi32(x[0]), _mm_cvtps_epi32(x[1]), _mm_cvtps_epi32(x[2]), _mm_cvtps_epi32(x[3])};
    return load_as<i32x16>(y);
#elif defined(__aarch64__)
    float32x4_t x[4];
    std::memcpy(x, &v, sizeof x);
    const int32x4_t y[4] = {vcvtnq_s32_f32(x[0]), vcvtnq_s32_f32(x[1]), vcvtnq_s32_f32(x[2]), vcvtnq_s32_f32(x[3])};
    return load_as<i32x16>(y);
#else
    i32x16 r;
    for (int i = 0; i < 16; ++i) r[i] = static_cast<std::int32_t>(std::nearbyintf(v[i]));
    return r;
#endif
}

// Sum and maximum of the lanes; the sum always in the same order (halves onto halves).
INFERENCEX_INLINE float reduce_add(f32x16 v) {
    float x[16];
    std::memcpy(x, &v, sizeof x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}
INFERENCEX_INLINE float reduce_max(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[16];
    std::memcpy(x, &v, sizeof x);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
#endif
}

// Conversions of stored types. bfloat16 and float16 are 16 bits in memory; rounding is to nearest, ties to even.
using cpu::from_bf16;
using cpu::from_f16;
using cpu::to_f16;
INFERENCEX_INLINE f32x16 load_bf16(const std::uint16_t *p) {
    const auto bits = __builtin_convertvector(load_as<u16x16>(p), u32x16) << 16;
    return (f32x16)bits;
}
INFERENCEX_INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    const auto bits = (u32x16)v;
    const u32x16 rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const auto nan = (u32x16)((i32x16)(v != v));
    return __builtin_convertvector((rounded & ~nan) | (((bits >> 16) | 0x40U) & nan), u16x16);
#endif
}
INFERENCEX_INLINE void store_bf16(std::uint16_t *p, f32x16 v) {
    const u16x16 r = to_bf16(v);
    std::memcpy(p, &r, sizeof r);
}

INFERENCEX_INLINE f32x16 load_f16(const std::uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__F16C__)
    const __m256 lo = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    const __m256 hi = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 8)));
    f32x16 r;
    std::memcpy(&r, &lo, 32);
    std::memcpy(reinterpret_cast<char *>(&r) + 32, &hi, 32);
    return r;
#else
    f32x16 r;
    for (int i = 0; i < 16; ++i) r[i] = from_f16(p[i]);
    return r;
#endif
}
INFERENCEX_INLINE void store_f16(std::uint16_t *p, f32x16 v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; ++i) p[i] = to_f16(v[i]);
#endif
}

INFERENCEX_INLINE f32x16 load_i8(const std::int8_t *p) {
    return to_float(__builtin_convertvector(load_as<i8x16>(p), i32x16));
}
INFERENCEX_INLINE f32x16 load_u8(const std::uint8_t *p) {
    return to_float(__builtin_convertvector(load_as<u8x16>(p), i32x16));
}
// Round to the nearest integer and store as int8; |v| <= 127.
INFERENCEX_INLINE void store_i8(std::int8_t *p, f32x16 v) {
    const i8x16 r = __builtin_convertvector(to_int(v), i8x16);
    std::memcpy(p, &r, sizeof r);
}

// e^x within 2 ulp: range reduction by powers of two, then a polynomial (Cephes, expf). Below -87.3 it is 0. NaN stays
// NaN: `max` and `min` return their second operand when one is NaN.
INFERENCEX_INLINE f32x16 exp(f32x16 x) {
    const i32x16 vanishes = x < set1(-87.33654F);
    x = min(set1(88.37626F), max(set1(-87.33654F), x));
    const i32x16 n = to_int(x * set1(1.44269504F));
    const f32x16 k = to_float(n);
    f32x16 r = fma(k, set1(-0.693359375F), x);
    r = fma(k, set1(2.12194440e-4F), r);
    f32x16 p = set1(1.9875691500e-4F);
    p = fma(p, r, set1(1.3981999507e-3F));
    p = fma(p, r, set1(8.3334519073e-3F));
    p = fma(p, r, set1(4.1665795894e-2F));
    p = fma(p, r, set1(1.6666665459e-1F));
    p = fma(p, r, set1(5.0000001201e-1F));
    p = fma(p, r * r, r) + set1(1.0F);
    const f32x16 power = (f32x16)((n + 127) << 23);
    return select(vanishes, zero(), p * power);
}
INFERENCEX_INLINE f32x16 sigmoid(f32x16 x) { return set1(1.0F) / (set1(1.0F) + exp(-x)); }
INFERENCEX_INLINE f32x16 tanh(f32x16 x) {
    // 1 - 2 / (e^2|x| + 1) loses digits near 0, where an odd polynomial takes over (Cephes, tanhf).
    const f32x16 a = abs(x);
    const f32x16 z = x * x;
    f32x16 p = set1(-5.70498872745e-3F);
    p = fma(p, z, set1(2.06390887954e-2F));
    p = fma(p, z, set1(-5.37397155531e-2F));
    p = fma(p, z, set1(1.33314422036e-1F));
    p = fma(p, z, set1(-3.33332819422e-1F));
    const f32x16 small = fma(p * z, x, x);
    const f32x16 large = set1(1.0F) - set1(2.0F) / (exp(a + a) + set1(1.0F));
    const f32x16 signed_large = (f32x16)((i32x16)large | ((i32x16)x & set1(INT32_MIN)));
    return select(a < set1(0.625F), small, signed_large);
}

}  // namespace inferencex::cpu::INFERENCEX_ISA
