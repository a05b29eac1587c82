// Activations that a graph quantizes explicitly, as float32 of what they become: for linears without integer kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "row_operands.h"

namespace inferencex::cpu {
namespace {

constexpr float kVanishing = 0x1p-100F;  // rows below are zeros, as the dialect's QuantizeRows says

std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The nearest integer, ties to even, within `low`..127.
struct Int8 {
    static constexpr float kLargest = 127.0F;
    float low;

    float operator()(float x) const {
        constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: its neighbours are integers
        x = std::min(std::max(x, low), kLargest);
        return (x + kMagic) - kMagic;
    }
};

// The nearest number of FLOAT8E4M3FN, ties to even, within -448..448.
struct Float8 {
    static constexpr float kLargest = 448.0F;
    float low;

    float operator()(float x) const {
        x = std::min(std::max(x, low), kLargest);
        const std::uint32_t bits = bits_of(x);
        const float normal = float_of((bits + 0x7ffffU + (bits >> 20 & 1U)) & 0xfff00000U);
        constexpr float kMagic = 1.5F * 0x1p14F;  // its neighbours are 2^-9 apart, as the subnormal numbers are
        const float subnormal = (x + kMagic) - kMagic;
        return std::abs(x) < 0x1p-6F ? subnormal : normal;
    }
};

template <class Number>
void with_own_scale(const float *x, std::int64_t n, float *y) {
    std::uint32_t largest = 0;  // magnitudes compare as their bits do, NaN above all
    for (std::int64_t i = 0; i < n; ++i) largest = std::max(largest, bits_of(x[i]) & 0x7fffffffU);
    if (largest > 0x7f7fffffU) {
        std::fill_n(y, n, std::numeric_limits<float>::quiet_NaN());
        return;
    }
    const float magnitude = float_of(largest);
    if (magnitude < kVanishing) {
        std::fill_n(y, n, 0.0F);
        return;
    }
    const Number number{-Number::kLargest};
    const float scale = magnitude / Number::kLargest, inverse = Number::kLargest / magnitude;
    for (std::int64_t i = 0; i < n; ++i) y[i] = number(x[i] * inverse) * scale;
}

template <class Number>
void with_scale(const float *x, std::int64_t n, float scale, float low, float *y) {
    const Number number{low};
    // A NaN would come out of the limits as one of them.
    for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] == x[i] ? number(x[i] / scale) * scale : x[i];
}

// x [..., columns] -> y of the same shape: rows quantized to `to` ("i8" or "f8e4m3") by QuantizeRows, or with
// `static_scale` by QuantizeLinear, and dequantized.
class FakeQuantize final : public Operation {
  public:
    explicit FakeQuantize(const Blueprint &blueprint) {
        expect_operands(blueprint, 1, 1);
        x_ = required_input(blueprint, 0, "x");
        y_ = blueprint.outputs[0];
        columns_ = columns_of_rows(blueprint, "x", x_, DType::f32);
        expect_rows_like(blueprint, "y", y_, x_);
        rows_ = row_count(blueprint, "x", x_);
        const std::string &to = blueprint.text("to");
        if (to != "i8" && to != "f8e4m3") refuse(blueprint, "attribute to is " + to + ", expected i8 or f8e4m3");
        is_int8_ = to == "i8";
        if (blueprint.has("static_scale")) {
            scale_ = finite_attribute(blueprint, "static_scale");
            if (!(scale_ > 0))
                refuse(blueprint,
                       "attribute static_scale is " + std::to_string(scale_) + ", expected a positive number");
        }
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, rows, rows * columns_);
        if (begin == end) return;
        const Rows<float> x(worker.resolve(x_)), y(worker.resolve(y_));
        for (std::int64_t row = begin; row < end; ++row) {
            if (scale_ != 0) {
                if (is_int8_) with_scale<Int8>(x[row], columns_, scale_, -128.0F, y[row]);
                else with_scale<Float8>(x[row], columns_, scale_, -448.0F, y[row]);
            } else {
                if (is_int8_) with_own_scale<Int8>(x[row], columns_, y[row]);
                else with_own_scale<Float8>(x[row], columns_, y[row]);
            }
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto elements = static_cast<double>(rows_.at(batch.tokens, batch.rows) * columns_);
        return {elements * 2 * sizeof(float), elements * 6};
    }

  private:
    Operand x_, y_;
    std::int64_t columns_ = 0;
    Extent rows_;
    bool is_int8_ = false;
    float scale_ = 0;  // 0: each row's own
};

}  // namespace

void add_fake_quantize(Registry &registry) {
    registry.add("FakeQuantize", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<FakeQuantize>(blueprint);
    });
}

}  // namespace inferencex::cpu
