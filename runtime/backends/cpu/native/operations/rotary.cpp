// Rotary position embedding (Su et al. 2021) of heads, as ONNX RotaryEmbedding defines it.
#include <limits>

#include "../kernels.h"
#include "row_operands.h"

namespace inferencex::cpu {
namespace {

// Inputs x [T, H, D] (rows may lie apart), cos, sin, positions?; output y [T, H, D]. Without positions cos and sin are
// [T, half or more], a row a token; with positions int64 [T] they are tables [P, half or more]. A position outside the
// table gives NaN, which no later result can hide.
class RotaryEmbedding : public Operation {
  public:
    explicit RotaryEmbedding(const Blueprint &blueprint) : kernels_(&blueprint.kernels->rows) {
        expect_operands(blueprint, 4, 1);
        x_ = required_input(blueprint, 0, "x");
        width_ = columns_of_rows(blueprint, "x", x_, DType::f32);
        if (x_.rank != 3 || x_.dims[1].symbol != Symbol::none || x_.dims[1].coefficient < 1)
            refuse(blueprint, "x is " + describe(x_) + ", expected [tokens, heads, width]");
        heads_ = x_.dims[1].coefficient;
        rows_ = row_count(blueprint, "x", x_);
        y_ = blueprint.outputs[0];
        expect_rows_like(blueprint, "y", y_, x_);
        interleaved_ = blueprint.integer("interleaved") != 0;
        const std::int64_t dim = blueprint.integer("dim");
        dim_ = dim == 0 ? width_ : dim;
        if (dim_ < 2 || dim_ % 2 || dim_ > width_)
            refuse(blueprint, "attribute dim rotates " + std::to_string(dim_) + " of " + std::to_string(width_) +
                                  " columns, expected an even number of them");
        cos_ = required_input(blueprint, 1, "cos");
        sin_ = required_input(blueprint, 2, "sin");
        positions_ = optional_input(blueprint, 3);
        for (const auto &[role, operand] : {std::pair("cos", &cos_), std::pair("sin", &sin_)}) {
            if (columns_of_rows(blueprint, role, *operand, DType::f32) < dim_ / 2 || operand->rank != 2)
                refuse(blueprint, std::string(role) + " is " + describe(*operand) + ", expected rows of at least " +
                                      std::to_string(dim_ / 2) + " columns");
            if (!positions_.present && !same(operand->dims[0], x_.dims[0]))
                refuse(blueprint, std::string(role) + " is " + describe(*operand) +
                                      ", expected a row for each token of x, " + describe(x_));
        }
        if (!same(cos_.dims[0], sin_.dims[0]))
            refuse(blueprint, "cos is " + describe(cos_) + " but sin is " + describe(sin_));
        if (positions_.present &&
            (positions_.dtype != DType::i64 || positions_.rank != 1 || !same(positions_.dims[0], x_.dims[0])))
            refuse(blueprint,
                   "positions are " + describe(positions_) + ", expected one i64 for each token of x, " + describe(x_));
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, rows, rows * width_);
        if (begin == end) return;
        const Rows<float> x(worker.resolve(x_)), y(worker.resolve(y_));
        const Tensor cos_table = worker.resolve(cos_);
        const Rows<const float> cos(cos_table), sin(worker.resolve(sin_));
        const Tensor positions = worker.resolve(positions_);
        for (std::int64_t row = begin; row < end; ++row) {
            std::int64_t place = row / heads_;
            if (positions_.present) place = positions.as<std::int64_t>()[place * positions.strides[0]];
            if (place < 0 || place >= cos_table.dims[0]) {
                std::fill_n(y[row], width_, std::numeric_limits<float>::quiet_NaN());
                continue;
            }
            kernels_->rotate(x[row], cos[place], sin[place], width_, dim_, interleaved_, y[row]);
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(rows_.at(batch.tokens, batch.rows));
        const double angles = rows / static_cast<double>(heads_) * static_cast<double>(dim_);
        return {(rows * static_cast<double>(width_) * 2 + angles) * sizeof(float),
                rows * static_cast<double>(dim_) * 3};
    }

  private:
    const RowKernels *kernels_;
    Operand x_, cos_, sin_, positions_, y_;
    std::int64_t heads_ = 0, width_ = 0, dim_ = 0;
    bool interleaved_ = false;
    Extent rows_;
};

}  // namespace

void add_rotary(Registry &registry) {
    registry.add("RotaryEmbedding", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<RotaryEmbedding>(blueprint);
    });
}

}  // namespace inferencex::cpu
