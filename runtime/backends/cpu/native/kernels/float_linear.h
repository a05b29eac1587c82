// Linears on float32 activations, with weights of any stored type.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferencex::cpu {

enum class WeightFormat : std::uint8_t { f32, bf16, f16, f8e4m3, int8, int4, f4e2m1 };

// A weight [N, K] as a bundle stores it (docs/bundle.md). With scales it means `(value - zero_point) * scale`, computed
// in float32 as ONNX's DequantizeLinear does.
struct FloatWeight {
    std::int64_t channels = 0;  // N
    std::int64_t features = 0;  // K
    std::int64_t group = 0;     // features that share a scale; K for one scale a channel
    WeightFormat format = WeightFormat::f32;
    bool is_signed = true;                      // of int4; int8 always is
    const std::uint8_t *values = nullptr;       // flat, row-major; of 4 bits: two to a byte, the first in the low half
    const void *scales = nullptr;               // [N, groups]: int8, int4, f4e2m1; of f8e4m3 if not null
    bool scales_are_f16 = true;                 // else float32
    const std::uint8_t *zero_points = nullptr;  // [N, groups] stored like values: int8, int4; null: symmetric
    // Row of the stored weight that channel n comes from; null: n itself. It may point far behind N: the rows of one
    // expert among all experts' rows, whose nibbles need not start at a byte.
    const std::int32_t *order = nullptr;
};

// A weight in the layout of the kernels: tiles of kTile channels, each one contiguous stream of groups. A group is its
// zero points and scales, if it has them, and then kTile values of every feature. Channels past N are zero.
struct PackedFloatWeight {
    static constexpr std::int64_t kTile = 32;

    std::int64_t channels = 0;
    std::int64_t features = 0;
    std::int64_t group = 0;  // K where there are no scales
    WeightFormat format = WeightFormat::f32;
    bool has_scales = false;
    bool scales_are_f16 = false;
    bool has_zero_points = false;
    std::int32_t offset = 0;         // what a symmetric int4's value counts from, as packed: 8 for signed ones
    std::int64_t header_bytes = 0;   // of a group
    std::int64_t feature_bytes = 0;  // kTile values
    std::int64_t group_bytes = 0;    // of a full group
    std::int64_t tile_bytes = 0;
    const std::byte *data = nullptr;

    std::int64_t tiles() const { return (channels + kTile - 1) / kTile; }
};

// Rows of float32 activations: row m is `data[(index ? index[m] : m) * stride]`, contiguous.
struct FloatRows {
    const float *data = nullptr;
    std::int64_t stride = 0;
    const std::int32_t *index = nullptr;
};

struct FloatLinearKernels {
    // Fill in everything but `data`; the weight then takes `tiles() * tile_bytes`, a multiple of 64 bytes a tile.
    PackedFloatWeight (*plan)(const FloatWeight &weight);
    // Pack tile `tile` into `out` [tile_bytes].
    void (*pack)(const FloatWeight &weight, const PackedFloatWeight &plan, std::int64_t tile, std::byte *out);
    // y[m * y_stride + n] for the first `rows` rows of x and the channels of tiles `tile_begin..tile_end`, which lie in
    // columns from 0 on; y has (tile_end - tile_begin) * kTile columns in every row. `scratch` has `scratch_bytes`,
    // aligned to 64.
    void (*multiply)(const PackedFloatWeight &weight, const FloatRows &x, std::int64_t rows, std::int64_t tile_begin,
                     std::int64_t tile_end, float *y, std::int64_t y_stride, std::byte *scratch);
    std::size_t scratch_bytes;
};

}  // namespace inferencex::cpu
