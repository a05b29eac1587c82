// Products of matrices that both vary, float32.
//
//   MatMul (a [..., M, K], b [..., K, N]) -> y [..., M, N]      batch dimensions broadcast; vectors as ONNX has them
//   Gemm (a, b, c?; transA?, transB?, alpha?, beta?) -> y [M, N]   c broadcasts
//
// Every element is the sum of its K products one after the other, however the work is cut.
#include <algorithm>
#include <cstring>
#include <string>

#include "../operation.h"
#include "blueprint_checks.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

constexpr std::int64_t kRows = 64;     // of y in one task
constexpr std::int64_t kColumns = 32;  // of y in one task
constexpr std::int64_t kDepth = 64;    // of a and b at a time
constexpr std::int64_t kSmall = 1 << 14;

using Four = float __attribute__((vector_size(16)));

inline Four load(const float *p) {
    Four v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// totals[r][0:8] += a[r] b for a few rows, in registers.
template <int Rows>
void multiply(const float *a, std::int64_t a_row, std::int64_t a_step, const float *b, std::int64_t b_row,
              std::int64_t depth, float *totals) {
    Four left[Rows];
    Four right[Rows];
    for (int r = 0; r < Rows; ++r) {
        left[r] = load(totals + r * kColumns);
        right[r] = load(totals + r * kColumns + 4);
    }
    for (std::int64_t k = 0; k < depth; ++k) {
        const Four b_left = load(b + k * b_row);
        const Four b_right = load(b + k * b_row + 4);
        for (int r = 0; r < Rows; ++r) {
            const float factor = a[r * a_row + k * a_step];
            const Four factors = {factor, factor, factor, factor};
            left[r] += factors * b_left;
            right[r] += factors * b_right;
        }
    }
    for (int r = 0; r < Rows; ++r) {
        std::memcpy(totals + r * kColumns, &left[r], sizeof left[r]);
        std::memcpy(totals + r * kColumns + 4, &right[r], sizeof right[r]);
    }
}

class MatrixProduct final : public StridedOperation {
  public:
    explicit MatrixProduct(const Blueprint &blueprint) : StridedOperation(blueprint) {
        const bool gemm = blueprint.kind == "Gemm";
        require_operands(blueprint, 2, gemm ? 3 : 2);
        for (const Operand &input : inputs_)
            if (input.present) require_dtype(blueprint, "an input", input, {DType::f32});
        require_dtype(blueprint, "the output", outputs_[0], {DType::f32});
        Operand &a = inputs_[0];
        Operand &b = inputs_[1];
        Operand &y = outputs_[0];
        const std::string found = describe(a) + " and " + describe(b) + " to " + describe(y);
        if (a.rank == 0 || b.rank == 0 || (gemm && (a.rank != 2 || b.rank != 2)))
            refuse(blueprint, "the operands are " + found + ", expected matrices");
        if (gemm) {
            if (integer_or(blueprint, "transA", 0) != 0) transpose(a);
            if (integer_or(blueprint, "transB", 0) != 0) transpose(b);
            alpha_ = static_cast<float>(real_or(blueprint, "alpha", 1.0));
            beta_ = static_cast<float>(real_or(blueprint, "beta", 1.0));
            if (blueprint.has_input(2)) require_broadcast(blueprint, "input 2", inputs_[2], y);
        }
        const int expected_rank = std::max({a.rank, b.rank, 2}) - (a.rank == 1) - (b.rank == 1);
        if (y.rank != expected_rank) refuse(blueprint, "the operands are " + found + ", of ranks that do not fit");
        if (a.rank == 1) {
            insert(a, 0);
            insert(y, b.rank == 1 ? 0 : y.rank - 1);
        }
        if (b.rank == 1) {
            insert(b, 1);
            insert(y, y.rank);
        }
        const auto last = [](const Operand &operand, int back) { return operand.dims[operand.rank - back]; };
        bool fits = same(last(a, 1), last(b, 2)) && same(last(a, 2), last(y, 2)) && same(last(b, 1), last(y, 1));
        for (const Operand *operand : {&a, &b})
            for (int back = 3; fits && back <= operand->rank; ++back)
                fits = is_one(last(*operand, back)) || same(last(*operand, back), last(y, back));
        if (!fits) refuse(blueprint, "the shapes of the operands do not fit: " + found);
        inputs_.resize(3);
    }

    Cost cost(const Batch &batch) const override {
        Cost cost = StridedOperation::cost(batch);
        const Operand &a = inputs_[0];
        cost.operations *= 2.0 * static_cast<double>(a.dims[a.rank - 1].at(batch.tokens, batch.rows));
        return cost;
    }

    void run(const Worker &worker) const override {
        const Tensor a = worker.resolve(inputs_[0]);
        const Tensor b = worker.resolve(inputs_[1]);
        const Tensor y = worker.resolve(outputs_[0]);
        const std::int64_t rows = y.dims[y.rank - 2];
        const std::int64_t columns = y.dims[y.rank - 1];
        const std::int64_t row_blocks = (rows + kRows - 1) / kRows;
        const std::int64_t column_blocks = (columns + kColumns - 1) / kColumns;
        const std::int64_t batches = rows && columns ? y.size() / (rows * columns) : 0;
        const std::int64_t tasks = batches * row_blocks * column_blocks;
        const bool small = y.size() * a.dims[a.rank - 1] <= kSmall;
        const auto part = portion(worker, tasks, small ? tasks : 0);
        for (std::int64_t task = part.begin; task < part.end; ++task) {
            std::int64_t rest = task / (row_blocks * column_blocks);
            Tensor a_part = a;
            Tensor b_part = b;
            Tensor y_part = y;
            for (int d = y.rank - 3; d >= 0; --d) {
                const std::int64_t index = rest % y.dims[d];
                rest /= y.dims[d];
                a_part.data += index * broadcast_stride(a, y, d) * static_cast<std::int64_t>(sizeof(float));
                b_part.data += index * broadcast_stride(b, y, d) * static_cast<std::int64_t>(sizeof(float));
                y_part.data += index * y.strides[d] * static_cast<std::int64_t>(sizeof(float));
            }
            const std::int64_t within = task % (row_blocks * column_blocks);
            block(worker, a_part, b_part, y_part, within / column_blocks * kRows, within % column_blocks * kColumns);
        }
    }

  private:
    static void transpose(Operand &operand) {
        std::swap(operand.dims[0], operand.dims[1]);
        std::swap(operand.strides[0], operand.strides[1]);
    }
    // A dimension of 1; the rank stays within kMaxRank since a vector's operand has another one less.
    static void insert(Operand &operand, int place) {
        for (int d = operand.rank; d > place; --d) {
            operand.dims[d] = operand.dims[d - 1];
            operand.strides[d] = operand.strides[d - 1];
        }
        operand.dims[place] = Extent{};
        operand.strides[place] = Extent{0, Symbol::none};
        ++operand.rank;
    }

    // Rows and columns of y from (row, column).
    void block(const Worker &worker, const Tensor &a, const Tensor &b, const Tensor &y, std::int64_t row,
               std::int64_t column) const {
        const std::int64_t rows = std::min(kRows, y.dims[y.rank - 2] - row);
        const std::int64_t columns = std::min(kColumns, y.dims[y.rank - 1] - column);
        const std::int64_t depth = a.dims[a.rank - 1];
        const std::int64_t a_row = a.strides[a.rank - 2];
        const std::int64_t a_step = a.strides[a.rank - 1];
        const std::int64_t b_row = b.strides[b.rank - 2];
        const std::int64_t b_step = b.strides[b.rank - 1];
        alignas(64) float totals[kRows * kColumns] = {};
        alignas(64) float packed[kDepth * kColumns] = {};
        for (std::int64_t start = 0; start < depth; start += kDepth) {
            const std::int64_t count = std::min(kDepth, depth - start);
            const float *source = b.as<float>() + start * b_row + column * b_step;
            const float *panel = source;
            std::int64_t panel_row = b_row;
            if (b_step != 1 || columns < kColumns) {  // columns past the last are 0
                for (std::int64_t k = 0; k < count; ++k)
                    for (std::int64_t c = 0; c < columns; ++c)
                        packed[k * kColumns + c] = source[k * b_row + c * b_step];
                panel = packed;
                panel_row = kColumns;
            }
            for (std::int64_t c = 0; c < columns; c += 8) {
                std::int64_t r = 0;
                const float *a_start = a.as<float>() + row * a_row + start * a_step;
                for (; r + 4 <= rows; r += 4)
                    multiply<4>(a_start + r * a_row, a_row, a_step, panel + c, panel_row, count,
                                totals + r * kColumns + c);
                for (; r < rows; ++r)
                    multiply<1>(a_start + r * a_row, a_row, a_step, panel + c, panel_row, count,
                                totals + r * kColumns + c);
            }
        }
        finish(worker, y, row, column, rows, columns, totals);
    }

    void finish(const Worker &worker, const Tensor &y, std::int64_t row, std::int64_t column, std::int64_t rows,
                std::int64_t columns, const float *totals) const {
        const std::int64_t y_row = y.strides[y.rank - 2];
        const std::int64_t y_step = y.strides[y.rank - 1];
        Tensor c;
        std::int64_t c_row = 0;
        std::int64_t c_step = 0;
        if (inputs_[2].present) {
            c = worker.resolve(inputs_[2]);
            c_row = broadcast_stride(c, y, y.rank - 2);
            c_step = broadcast_stride(c, y, y.rank - 1);
        }
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t j = 0; j < columns; ++j) {
                float value = alpha_ * totals[r * kColumns + j];
                if (c.data) value += beta_ * *element<float>(c, (row + r) * c_row + (column + j) * c_step);
                *element<float>(y, (row + r) * y_row + (column + j) * y_step) = value;
            }
    }

    float alpha_ = 1.0F;
    float beta_ = 1.0F;
};

std::unique_ptr<Operation> make_product(const Blueprint &blueprint) {
    return std::make_unique<MatrixProduct>(blueprint);
}

}  // namespace

void add_matmul(Registry &registry) {
    registry.add("MatMul", make_product);
    registry.add("Gemm", make_product);
}

}  // namespace inferencex::cpu
