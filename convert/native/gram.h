// Second moments of rows of bfloat16 numbers, summed in float32.
//
// Products of pairs of rows are summed by one instruction (AVX512-BF16), which matrix libraries offer only with sums
// rounded to bfloat16; rounded sums are not positive definite, and Cholesky's factorization fails on them.
#pragma once

#include <cstdint>

namespace inferencex::quantize {

constexpr int64_t kPanelColumns = 48;
constexpr int64_t kPanelPairs = 256;  // pairs of rows that are summed before they are added to the matrix

// Pairs of rows [0, rows) of one panel of columns, `channels` apart, as [pairs][kPanelColumns] words: the first row's
// number in the low half. What lies outside of the rows or the channels becomes zero.
void pack_panel(const uint16_t *rows, int64_t count, int64_t channels, int64_t first_column, uint32_t *panel);

// Adds the products of two packed panels over `pairs` pairs to `tile`, float [kPanelColumns, kPanelColumns].
void multiply_panels(const uint32_t *left, const uint32_t *right, int64_t pairs, float *tile);

}  // namespace inferencex::quantize
