// Linears with INT4 and INT8 weights on activations quantized to INT8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../quantized_rows.h"

namespace inferencex::cpu {

// A weight [N, K] as a bundle stores it (docs/bundle.md): `values` two to a byte when bits == 4.
struct IntegerWeight {
    std::int64_t channels = 0;  // N
    std::int64_t features = 0;  // K
    std::int64_t group = 0;     // features that share a scale; K for one scale a channel
    int bits = 4;
    bool is_signed = true;                 // of 4-bit integers; 8-bit ones always are
    const std::uint8_t *values = nullptr;  // flat, row-major
    const void *scales = nullptr;          // [N, groups], float16 or float32
    bool scales_are_f16 = true;
    const std::uint8_t *zero_points = nullptr;  // [N, groups] stored like values; null: symmetric
    // [channels] the row of `values` that each channel comes from; null: its own. For gates beside their ups.
    const std::int32_t *order = nullptr;
    bool whole = false;  // it meets activations with one scale a row, BlockLayout::whole; one scale a channel then
};

// A weight in the layout of the kernels: tiles of kTile channels, each one contiguous stream of cache lines.
//   scales       of a group: kTile float16 or float32
//   zero points  of a group: kTile of `bits` bits, where the weight has them; 4-bit ones as i | (i + 16) << 4
//   values       of a block: for every 8 (bits == 4) or 4 features, 64 bytes for channels 0-15 and 64 for 16-31: each
//                channel has 4 bytes, features 0-3 in the low and 4-7 in the high nibbles, or features 0-3.
// Integers are stored unsigned, 8 or 128 added to signed ones.
struct PackedIntegerWeight {
    static constexpr std::int64_t kTile = 32;

    std::int64_t channels = 0;
    std::int64_t features = 0;
    int bits = 4;
    int zero_point = 8;  // of stored integers, where they share one
    bool has_zero_points = false;
    std::int64_t group = 0;  // features that share a scale
    bool scales_are_f16 = false;
    BlockLayout layout;                   // of the activations it meets, and of its own blocks
    std::int64_t zero_points_offset = 0;  // bytes from the start of a tile
    std::int64_t values_offset = 0;
    std::int64_t tile_bytes = 0;
    const std::byte *data = nullptr;

    std::int64_t tiles() const { return (channels + kTile - 1) / kTile; }
    std::int64_t groups() const { return (features + group - 1) / group; }
};

struct IntegerLinearKernels {
    // Fill in everything but `data`; the weight then takes `tiles() * tile_bytes`, 64-byte aligned.
    PackedIntegerWeight (*plan)(const IntegerWeight &weight);
    // Pack tile `tile` into `out` [tile_bytes], which is zero.
    void (*pack)(const IntegerWeight &weight, const PackedIntegerWeight &plan, std::int64_t tile, std::byte *out);
    // y[m * y_stride + n] for rows `row_begin..row_end` of x and the channels of tiles `tile_begin..tile_end`: row
    // `row_begin` and the first channel of tile `tile_begin` lie at y. Past N zeros are written up to the end of the
    // last tile: y must hold (tile_end - tile_begin) * kTile columns a row. `scratch` has
    // `scratch_bytes(weight, rows)` bytes, 64-byte aligned; with `same_rows` it still holds what the call before has
    // worked out of these rows for this weight.
    void (*multiply)(const PackedIntegerWeight &weight, const QuantizedRows &x, std::int64_t row_begin,
                     std::int64_t row_end, std::int64_t tile_begin, std::int64_t tile_end, float *y,
                     std::int64_t y_stride, std::byte *scratch, bool same_rows);
    std::size_t (*scratch_bytes)(const PackedIntegerWeight &weight, std::int64_t rows);
    // How many of many rows are multiplied together. Calls with more of them work them out anew each time.
    std::int64_t (*rows_at_once)(const PackedIntegerWeight &weight);
};

}  // namespace inferencex::cpu
