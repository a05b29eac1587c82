// Root mean square and layer normalization over the last axis, with the residual addition before and the quantization
// after them; and quantization alone. Rows are finished one by one, while they are in the first-level cache.
#include <cmath>

#include "../kernels.h"
#include "row_operands.h"

namespace inferencex::cpu {
namespace {

enum class Norm { rms, layer };

// Inputs x, (residual,) scale?, (bias?); outputs y?, sum?, values?, scales?, sums?. With T rows [T, S] or any number of
// leading dimensions.
class Normalization : public Operation {
  public:
    Normalization(const Blueprint &blueprint, Norm norm, bool adds)
        : kernels_(&blueprint.kernels->rows), norm_(norm), epsilon_(finite_attribute(blueprint, "epsilon")) {
        expect_operands(blueprint, 2 + (adds ? 1 : 0) + (norm == Norm::layer ? 1 : 0), 5);
        if (epsilon_ < 0) refuse(blueprint, "attribute epsilon is negative");
        x_ = required_input(blueprint, 0, "x");
        columns_ = columns_of_rows(blueprint, "x", x_, DType::f32);
        rows_ = row_count(blueprint, "x", x_);
        std::size_t next = 1;
        if (adds) {
            residual_ = required_input(blueprint, next++, "residual");
            expect_rows_like(blueprint, "residual", residual_, x_);
        }
        scale_ = optional_input(blueprint, next++);
        if (scale_.present) expect_vector(blueprint, "scale", scale_, columns_);
        if (norm == Norm::layer) bias_ = optional_input(blueprint, next);
        if (bias_.present) expect_vector(blueprint, "bias", bias_, columns_);

        y_ = blueprint.outputs[0];
        sum_ = blueprint.outputs[1];
        if (y_.present) expect_rows_like(blueprint, "y", y_, x_);
        if (sum_.present && !adds) refuse(blueprint, "a sum is asked for, but there is no residual to add");
        if (sum_.present) expect_rows_like(blueprint, "sum", sum_, x_);
        quantized_ = QuantizedOutput(blueprint, 2, rows_, columns_);
        if (!y_.present && !quantized_.present()) refuse(blueprint, "neither y nor quantized rows are asked for");
    }

    std::size_t scratch_bytes(std::int64_t, int) const override {
        return y_.present ? 0 : static_cast<std::size_t>(columns_) * sizeof(float);
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, rows, rows * columns_);
        if (begin == end) return;
        const Rows<float> x(worker.resolve(x_)), residual(worker.resolve(residual_)), y(worker.resolve(y_)),
            sum(worker.resolve(sum_));
        const float *scale = scale_.present ? worker.resolve(scale_).as<float>() : nullptr;
        const float *bias = bias_.present ? worker.resolve(bias_).as<float>() : nullptr;
        const QuantizedOutput::Resolved quantized = quantized_.resolve(worker);
        auto *spare = reinterpret_cast<float *>(worker.scratch);
        for (std::int64_t row = begin; row < end; ++row) {
            float *out = y_.present ? y[row] : spare;
            float *total = sum_.present ? sum[row] : out;
            const float *added = residual_.present ? residual[row] : nullptr;
            if (norm_ == Norm::rms) {
                kernels_->rms_norm(x[row], added, scale, epsilon_, columns_, total, out);
            } else {
                kernels_->layer_norm(x[row], added, scale, bias, epsilon_, columns_, total, out);
            }
            if (quantized_.present())
                kernels_->quantize(out, quantized_.layout(), quantized.values_of(row), quantized.scales_of(row),
                                   quantized.sums_of(row));
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(rows_.at(batch.tokens, batch.rows));
        const auto columns = static_cast<double>(columns_);
        const int read = 1 + residual_.present, written = y_.present + sum_.present;
        const int steps = 4 + residual_.present + (norm_ == Norm::layer ? 3 : 0) + (quantized_.present() ? 2 : 0);
        return {rows * (columns * sizeof(float) * (read + written) + quantized_.bytes_per_row()),
                rows * columns * steps};
    }

  private:
    const RowKernels *kernels_;
    Norm norm_;
    float epsilon_;
    Operand x_, residual_, scale_, bias_, y_, sum_;
    QuantizedOutput quantized_;
    std::int64_t columns_ = 0;
    Extent rows_;
};

// Input x; outputs values, scales, sums. With attribute `static_scale` every block has that scale, and a row is one
// block unless `group` is given too.
class Quantize : public Operation {
  public:
    explicit Quantize(const Blueprint &blueprint) : kernels_(&blueprint.kernels->rows) {
        expect_operands(blueprint, 1, 3);
        x_ = required_input(blueprint, 0, "x");
        columns_ = columns_of_rows(blueprint, "x", x_, DType::f32);
        rows_ = row_count(blueprint, "x", x_);
        if (blueprint.has("static_scale")) {
            scale_ = finite_attribute(blueprint, "static_scale");
            if (!std::isfinite(1.0F / scale_) || scale_ < 0)
                refuse(blueprint,
                       "attribute static_scale is " + std::to_string(scale_) + ", expected a positive number");
        }
        const bool whole = blueprint.has("whole") ? blueprint.integer("whole") != 0 : scale_ != 0;
        quantized_ = QuantizedOutput(blueprint, 0, rows_, columns_, whole && !blueprint.has("group"));
        if (!quantized_.present()) refuse(blueprint, "no output is asked for");
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, rows, rows * columns_);
        if (begin == end) return;
        const Rows<float> x(worker.resolve(x_));
        const QuantizedOutput::Resolved out = quantized_.resolve(worker);
        for (std::int64_t row = begin; row < end; ++row) {
            if (scale_ != 0) {
                kernels_->quantize_static(x[row], quantized_.layout(), scale_, out.values_of(row), out.scales_of(row),
                                          out.sums_of(row));
            } else {
                kernels_->quantize(x[row], quantized_.layout(), out.values_of(row), out.scales_of(row),
                                   out.sums_of(row));
            }
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(rows_.at(batch.tokens, batch.rows));
        const auto columns = static_cast<double>(columns_);
        return {rows * (columns * sizeof(float) + quantized_.bytes_per_row()), rows * columns * 2};
    }

  private:
    const RowKernels *kernels_;
    float scale_ = 0;  // 0: each block's own
    Operand x_;
    QuantizedOutput quantized_;
    std::int64_t columns_ = 0;
    Extent rows_;
};

template <Norm norm, bool adds>
std::unique_ptr<Operation> make_norm(const Blueprint &blueprint) {
    return std::make_unique<Normalization>(blueprint, norm, adds);
}

}  // namespace

void add_norms(Registry &registry) {
    registry.add("RMSNormalization", make_norm<Norm::rms, false>);
    registry.add("AddRMSNormalization", make_norm<Norm::rms, true>);
    registry.add("LayerNormalization", make_norm<Norm::layer, false>);
    registry.add("AddLayerNormalization", make_norm<Norm::layer, true>);
    registry.add("Quantize", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<Quantize>(blueprint);
    });
}

}  // namespace inferencex::cpu
