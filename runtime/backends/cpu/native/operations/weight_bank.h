// Weights of linears and of experts in the layout of the kernels, and what follows a product: bias and gate.
#pragma once

#include <algorithm>
#include <vector>

#include "stored_weight.h"

namespace inferencex::cpu {

// How packed channels relate to stored ones. With a gate, tiles come in pairs: the gates of 32 features, then their
// ups, so that one thread has both at hand; past F the last feature is repeated, and ignored.
struct ChannelOrder {
    std::int64_t channels = 0;  // stored: N
    bool gated = false;
    bool interleaved = false;

    std::int64_t packed_channels() const {
        return gated ? (channels / 2 + kWeightTile - 1) / kWeightTile * 2 * kWeightTile : channels;
    }
    std::int64_t stored(std::int64_t packed) const {
        if (!gated) return packed;
        const std::int64_t half = channels / 2;
        const std::int64_t pair = packed / (2 * kWeightTile), within = packed % (2 * kWeightTile);
        const std::int64_t feature = std::min(pair * kWeightTile + within % kWeightTile, half - 1);
        const bool up = within >= kWeightTile;
        return interleaved ? 2 * feature + (up ? 1 : 0) : feature + (up ? half : 0);
    }
};

// Weights of a linear or of experts, packed, for float32 or for quantized activations.
class WeightBank {
  public:
    WeightBank() = default;
    WeightBank(const Blueprint &blueprint, const StoredWeight &stored, const ChannelOrder &order, bool integer)
        : kernels_(blueprint.kernels), stored_(stored), order_(order), is_integer_(integer) {
        if (integer) {
            stored_.for_integers(blueprint);
            IntegerWeight w = stored_.integer();
            w.channels = order.packed_channels();
            integer_ = kernels_->integer_linear.plan(w);
        } else {
            FloatWeight w = stored.source;
            w.channels = order.packed_channels();
            float_ = kernels_->float_linear.plan(w);
        }
        std::int64_t bytes;
        if (__builtin_mul_overflow(tiles() * tile_bytes(), stored.experts, &bytes))
            refuse(blueprint, "the weight has an absurd size");
        data_ = blueprint.memory->allocate(static_cast<std::size_t>(bytes));
    }

    std::int64_t tiles() const { return is_integer_ ? integer_.tiles() : float_.tiles(); }
    std::int64_t tile_bytes() const { return is_integer_ ? integer_.tile_bytes : float_.tile_bytes; }
    std::int64_t bytes_per_expert() const { return tiles() * tile_bytes(); }
    const BlockLayout &layout() const { return integer_.layout; }  // of the activations an integer weight meets

    std::int64_t prepare_tasks() const { return stored_.experts * tiles(); }
    void prepare(std::int64_t task) {
        const std::int64_t expert = task / tiles(), tile = task % tiles();
        std::byte *out = data_ + task * tile_bytes();
        // The tile as a weight of its own, whose channels are rows of all experts' weights.
        const std::int64_t packed = order_.packed_channels();
        const std::int64_t count = std::min(kWeightTile, packed - tile * kWeightTile);
        std::int32_t rows[kWeightTile];
        for (std::int64_t c = 0; c < count; ++c)
            rows[c] =
                static_cast<std::int32_t>(expert * stored_.source.channels + order_.stored(tile * kWeightTile + c));
        StoredWeight::Room room;
        StoredWeight::Expanded memory;
        const bool expands = stored_.expansion != Expansion::none;
        const StoredWeight stored = stored_.nearby(rows, count, room);
        FloatWeight w = expands ? stored.expand(kernels_->rows, rows, count, memory) : stored.source;
        w.channels = count;
        w.order = expands ? nullptr : rows;
        if (is_integer_) {
            IntegerWeight integers = StoredWeight::as_integer(w);
            integers.order = w.order;
            PackedIntegerWeight plan = integer_;
            plan.channels = count;
            kernels_->integer_linear.pack(integers, plan, 0, out);
        } else {
            PackedFloatWeight plan = float_;
            plan.channels = count;
            kernels_->float_linear.pack(w, plan, 0, out);
        }
    }

    // y[m * y_stride + n] for `rows` rows and the packed channels of some tiles of one expert's weight.
    void multiply(std::int64_t expert, const FloatRows &x, std::int64_t rows, std::int64_t tile_begin,
                  std::int64_t tile_end, float *y, std::int64_t y_stride, std::byte *scratch) const {
        PackedFloatWeight weight = float_;
        weight.data = data_ + expert * bytes_per_expert();
        kernels_->float_linear.multiply(weight, x, rows, tile_begin, tile_end, y, y_stride, scratch);
    }
    void multiply(std::int64_t expert, const QuantizedRows &x, std::int64_t rows, std::int64_t tile_begin,
                  std::int64_t tile_end, float *y, std::int64_t y_stride, std::byte *scratch) const {
        PackedIntegerWeight weight = integer_;
        weight.data = data_ + expert * bytes_per_expert();
        kernels_->integer_linear.multiply(weight, x, 0, rows, tile_begin, tile_end, y, y_stride, scratch, false);
    }
    std::size_t scratch_bytes(std::int64_t rows) const {
        return is_integer_ ? kernels_->integer_linear.scratch_bytes(integer_, rows)
                           : kernels_->float_linear.scratch_bytes;
    }

    // A bias [experts, N] in the order of packed channels, `tiles() * kWeightTile` numbers an expert; null where
    // absent.
    const float *pack_bias(const Blueprint &blueprint, std::size_t input, const char *what) const {
        const std::vector<float> bias = read_floats(blueprint, input, what, stored_.experts * stored_.source.channels);
        if (bias.empty()) return nullptr;
        const std::int64_t columns = tiles() * kWeightTile;
        auto *packed = reinterpret_cast<float *>(blueprint.memory->allocate(stored_.experts * columns * sizeof(float)));
        for (std::int64_t e = 0; e < stored_.experts; ++e)
            for (std::int64_t c = 0; c < order_.packed_channels(); ++c)
                packed[e * columns + c] = bias[e * stored_.source.channels + order_.stored(c)];
        return packed;
    }

  private:
    const Kernels *kernels_ = nullptr;
    StoredWeight stored_;
    ChannelOrder order_;
    bool is_integer_ = false;
    PackedFloatWeight float_;
    PackedIntegerWeight integer_;
    std::byte *data_ = nullptr;
};

inline void add_bias(const float *bias, std::int64_t rows, std::int64_t columns, float *y, std::int64_t y_stride) {
    if (bias == nullptr) return;
    for (std::int64_t m = 0; m < rows; ++m)
        for (std::int64_t c = 0; c < columns; ++c) y[m * y_stride + c] += bias[c];
}

// From pairs of tiles (gates, ups) in rows of `x` to `columns` gated features in rows of `y`.
inline void apply_gate(const Kernels &kernels, const Gate &gate, const float *x, std::int64_t x_stride,
                       std::int64_t rows, std::int64_t columns, float *y, std::int64_t y_stride) {
    for (std::int64_t m = 0; m < rows; ++m)
        for (std::int64_t c = 0; c < columns; c += kWeightTile) {
            const float *gates = x + m * x_stride + 2 * c;
            kernels.rows.gate(gates, gates + kWeightTile, gate.activation, gate.alpha, gate.limit,
                              std::min(kWeightTile, columns - c), y + m * y_stride + c);
        }
}

constexpr std::size_t align_bytes(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace inferencex::cpu
