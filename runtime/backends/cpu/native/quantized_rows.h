// Activations quantized to INT8 in blocks along their features: what integer linears read.
#pragma once

#include <algorithm>
#include <cstdint>

namespace inferencex::cpu {

// How K features are cut into blocks that share a scale. A block never crosses a group of the weight it meets, so that
// integers can be summed within it. Groups are `group` features long, the last one perhaps shorter; a group longer than
// kLongestBlock is cut into blocks that are as even as possible. In memory every block takes `stride` bytes, zeros
// after its features.
//
// Short blocks are more exact, as few activations are much larger than their neighbours: on SmolLM2 blocks of 64 cost
// twice the divergence that blocks of 32 do, and a scale for the whole row six times as much.
struct BlockLayout {
    static constexpr std::int64_t kLongestBlock = 32;
    static constexpr std::int64_t kStep = 8;  // block strides are multiples of it

    std::int64_t features = 0;          // K
    std::int64_t group = 0;             // features of a weight group; K for one scale a channel
    std::int64_t block = 0;             // features of a full block
    std::int64_t stride = 0;            // bytes of a block in memory
    std::int64_t blocks_per_group = 0;  // of a full group
    std::int64_t blocks = 0;            // of a row

    BlockLayout() = default;
    BlockLayout(std::int64_t features_, std::int64_t group_) : features(features_), group(std::min(group_, features_)) {
        const std::int64_t pieces = (group + kLongestBlock - 1) / kLongestBlock;
        block = (group + pieces - 1) / pieces;
        set_blocks();
    }
    // One block for the whole row: static scales.
    static BlockLayout whole(std::int64_t features) {
        BlockLayout layout;
        layout.features = layout.group = layout.block = features;
        layout.set_blocks();
        return layout;
    }

    std::int64_t start(std::int64_t b) const { return b / blocks_per_group * group + b % blocks_per_group * block; }
    std::int64_t length(std::int64_t b) const {
        const std::int64_t group_end = std::min((b / blocks_per_group + 1) * group, features);
        return std::min(start(b) + block, group_end) - start(b);
    }
    std::int64_t row_bytes() const { return blocks * stride; }
    // Whether blocks follow each other at multiples of `block` features, across groups.
    bool even() const { return group % block == 0 || group == features; }

  private:
    void set_blocks() {
        stride = (block + kStep - 1) / kStep * kStep;
        blocks_per_group = (group + block - 1) / block;
        const std::int64_t rest = features % group;
        blocks = features / group * blocks_per_group + (rest + block - 1) / block;
    }
};

// Rows of quantized activations: feature k of block b of row m is `values[m * layout.row_bytes() + b * layout.stride +
// k]
// * scales[m * blocks + b]`; `sums` are the sums of a block's integers, for weights with zero points. Integers are in
// -127..127; those of a given scale may be -128. A program keeps the three parts as three values: int8 [M, row_bytes],
// float32 [M, blocks], int32 [M, blocks].
struct QuantizedRows {
    BlockLayout layout;
    std::int8_t *values = nullptr;
    float *scales = nullptr;
    std::int32_t *sums = nullptr;
};

}  // namespace inferencex::cpu
