// Activations of feed-forward layers, gated or not, with the quantization that follows them.
//
// The work is cut by rows and by chunks of columns, so that a single token's wide row is shared among threads and a
// chunk is quantized while it is in the first-level cache. Chunks end where blocks do; elements do not depend on them.
#include <algorithm>
#include <cmath>
#include <optional>

#include "../kernels.h"
#include "row_operands.h"

namespace inferencex::cpu {
namespace {

constexpr std::int64_t kChunkColumns = 512;

// Input x; outputs y?, values?, scales?, sums?. Gated x holds gates and ups, in halves or alternating.
class RowActivation : public Operation {
  public:
    RowActivation(const Blueprint &blueprint, bool gated) : kernels_(&blueprint.kernels->rows), gated_(gated) {
        expect_operands(blueprint, 1, 4);
        x_ = required_input(blueprint, 0, "x");
        columns_ = columns_of_rows(blueprint, "x", x_, DType::f32);
        rows_ = row_count(blueprint, "x", x_);
        const std::optional<Activation> activation = activation_named(blueprint.text("activation"));
        if (!activation || (!gated && *activation == Activation::swiglu_clamped))
            refuse(blueprint, "activation " + blueprint.text("activation") + " is not one of this operation");
        activation_ = *activation;
        if (gated) {
            if (columns_ % 2) refuse(blueprint, "x is " + describe(x_) + ", expected an even number of columns");
            columns_ /= 2;
            const std::string &layout = blueprint.text("layout");
            if (layout != "concat" && layout != "interleaved")
                refuse(blueprint, "layout is " + layout + ", expected concat or interleaved");
            interleaved_ = layout == "interleaved";
            alpha_ = finite_attribute(blueprint, "alpha");
            limit_ = finite_attribute(blueprint, "limit");
            if (limit_ < 0) refuse(blueprint, "attribute limit is negative; 0 is for none");
        }
        y_ = blueprint.outputs[0];
        if (y_.present) {
            Operand expected = x_;
            expected.dims[x_.rank - 1].coefficient = columns_;
            expect_rows_like(blueprint, "y", y_, expected);
        }
        quantized_ = QuantizedOutput(blueprint, 1, rows_, columns_);
        if (!y_.present && !quantized_.present()) refuse(blueprint, "neither y nor quantized rows are asked for");
        chunking_ = quantized_.present() ? quantized_.layout() : BlockLayout(columns_, BlockLayout::kLongestBlock);
        chunk_blocks_ = std::max<std::int64_t>(1, kChunkColumns / chunking_.block);
        chunks_ = (chunking_.blocks + chunk_blocks_ - 1) / chunk_blocks_;
    }

    std::size_t scratch_bytes(std::int64_t, int) const override {
        return y_.present ? 0 : static_cast<std::size_t>(chunk_blocks_ * chunking_.block) * sizeof(float);
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, rows * chunks_, rows * columns_);
        if (begin == end) return;
        const Rows<float> x(worker.resolve(x_)), y(worker.resolve(y_));
        const QuantizedOutput::Resolved quantized = quantized_.resolve(worker);
        auto *spare = reinterpret_cast<float *>(worker.scratch);
        std::int64_t row = begin / chunks_, chunk = begin % chunks_;
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const std::int64_t first = chunk * chunk_blocks_;
            const std::int64_t last = std::min(first + chunk_blocks_, chunking_.blocks) - 1;
            const std::int64_t column = chunking_.start(first);
            float *out = y_.present ? y[row] + column : spare;
            activate(x[row], column, chunking_.start(last) + chunking_.length(last) - column, out);
            if (quantized_.present()) quantized_.quantize(*kernels_, quantized, row, first, last + 1, out);
            if (++chunk == chunks_) {
                chunk = 0;
                ++row;
            }
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(rows_.at(batch.tokens, batch.rows));
        const auto columns = static_cast<double>(columns_);
        constexpr int kSteps = 16;  // of an exponential and what is around it
        return {rows * (columns * sizeof(float) * ((gated_ ? 2 : 1) + y_.present) + quantized_.bytes_per_row()),
                rows * columns * kSteps};
    }

  private:
    void activate(const float *x, std::int64_t column, std::int64_t n, float *out) const {
        if (!gated_) {
            kernels_->activate(x + column, activation_, n, out);
        } else if (interleaved_) {
            kernels_->gate_interleaved(x + 2 * column, activation_, alpha_, limit_, n, out);
        } else {
            kernels_->gate(x + column, x + columns_ + column, activation_, alpha_, limit_, n, out);
        }
    }

    const RowKernels *kernels_;
    bool gated_;
    bool interleaved_ = false;
    Activation activation_ = Activation::silu;
    float alpha_ = 1, limit_ = 0;
    Operand x_, y_;
    QuantizedOutput quantized_;
    std::int64_t columns_ = 0;  // of the result
    Extent rows_;
    BlockLayout chunking_;
    std::int64_t chunk_blocks_ = 0, chunks_ = 0;
};

template <bool gated>
std::unique_ptr<Operation> make_activation(const Blueprint &blueprint) {
    return std::make_unique<RowActivation>(blueprint, gated);
}

}  // namespace

void add_gating(Registry &registry) {
    registry.add("GatedActivation", make_activation<true>);
    registry.add("Activation", make_activation<false>);
}

}  // namespace inferencex::cpu
