#include <immintrin.h>

#include "gram.h"

namespace inferencex::quantize {
namespace {

constexpr int kRows = 8;     // of the left panel at a time
constexpr int kVectors = 3;  // of the right panel

inline __m512bh as_pairs(__m512i words) { return reinterpret_cast<__m512bh>(words); }

}  // namespace

void multiply_panels(const uint32_t *left, const uint32_t *right, int64_t pairs, float *tile) {
    for (int64_t row = 0; row < kPanelColumns; row += kRows) {
        for (int64_t begin = 0; begin < pairs; begin += kPanelPairs) {
            const int64_t end = begin + kPanelPairs < pairs ? begin + kPanelPairs : pairs;
            __m512 sums[kRows][kVectors];
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
            for (int64_t p = begin; p < end; ++p) {
                const uint32_t *from = right + p * kPanelColumns;
                const uint32_t *numbers = left + p * kPanelColumns + row;
                __m512bh columns[kVectors];
                for (int v = 0; v < kVectors; ++v) columns[v] = as_pairs(_mm512_loadu_si512(from + v * 16));
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const __m512bh number = as_pairs(_mm512_set1_epi32(static_cast<int>(numbers[r])));
                    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], number);
                }
            }
            for (int r = 0; r < kRows; ++r)
                for (int v = 0; v < kVectors; ++v) {
                    float *to = tile + (row + r) * kPanelColumns + v * 16;
                    _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), sums[r][v]));
                }
        }
    }
}

}  // namespace inferencex::quantize
