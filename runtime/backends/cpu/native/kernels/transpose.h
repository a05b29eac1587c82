// Sixteen rows of sixteen words, read as columns.
#pragma once

#include "simd.h"

namespace inferencex::cpu::INFERENCEX_ISA {

#if defined(__AVX512F__)
// Word j of vector i becomes word i of vector j: words, then pairs of words are taken from two vectors, within
// quarters, and then whole quarters.
INFERENCEX_INLINE void transpose(u32x16 (&v)[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // a[4 i + j] holds, in quarter q, word 4 q + j of vectors 4 i to 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i low01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44),
                      high01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
        const __m512i low23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44),
                      high23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
        v[j] = (u32x16)_mm512_shuffle_i32x4(low01, low23, 0x88);
        v[4 + j] = (u32x16)_mm512_shuffle_i32x4(low01, low23, 0xdd);
        v[8 + j] = (u32x16)_mm512_shuffle_i32x4(high01, high23, 0x88);
        v[12 + j] = (u32x16)_mm512_shuffle_i32x4(high01, high23, 0xdd);
    }
}
#endif

// v[j] has word j of each of the rows, which lie anywhere.
INFERENCEX_INLINE void load_columns(const std::uint8_t *const (&rows)[16], u32x16 (&v)[16]) {
#if defined(__AVX512F__)
    for (int i = 0; i < 16; ++i) v[i] = load_as<u32x16>(rows[i]);
    transpose(v);
#else
    using u32x4 = std::uint32_t __attribute__((vector_size(16)));
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 16; j += 4) {
            u32x4 a[4];
            for (int k = 0; k < 4; ++k) a[k] = load_as<u32x4>(rows[i + k] + 4 * j);
            const u32x4 low01 = __builtin_shufflevector(a[0], a[1], 0, 4, 1, 5);
            const u32x4 high01 = __builtin_shufflevector(a[0], a[1], 2, 6, 3, 7);
            const u32x4 low23 = __builtin_shufflevector(a[2], a[3], 0, 4, 1, 5);
            const u32x4 high23 = __builtin_shufflevector(a[2], a[3], 2, 6, 3, 7);
            const u32x4 columns[4] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
                                      __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
                                      __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
                                      __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
            for (int k = 0; k < 4; ++k)
                std::memcpy(reinterpret_cast<std::uint32_t *>(&v[j + k]) + i, &columns[k], sizeof(u32x4));
        }
#endif
}

}  // namespace inferencex::cpu::INFERENCEX_ISA
