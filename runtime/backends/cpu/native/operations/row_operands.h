// Operands of operations that work row by row: their checks, their rows' addresses, and how threads share them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "../kernels/rows.h"
#include "../operation.h"
#include "../quantized_rows.h"

namespace inferencex::cpu {

// Throw BlueprintError with the operation's kind and name before `what`.
[[noreturn]] void refuse(const Blueprint &blueprint, const std::string &what);
// "f32 [T, 3, 64]", or "nothing".
std::string describe(const Operand &operand);

// Columns of an operand [..., columns] of `dtype`, at least one and of constant number, contiguous within a row.
// `role` names the operand in messages.
std::int64_t columns_of_rows(const Blueprint &blueprint, const std::string &role, const Operand &operand, DType dtype);
// The same, for an operand of the shape of `like`.
void expect_rows_like(const Blueprint &blueprint, const std::string &role, const Operand &operand, const Operand &like);
// A contiguous vector of `columns` float32.
void expect_vector(const Blueprint &blueprint, const std::string &role, const Operand &operand, std::int64_t columns);
// `count` inputs at most and exactly `outputs` outputs; absent ones count.
void expect_operands(const Blueprint &blueprint, std::size_t inputs, std::size_t outputs);
// Input `i`, which must be there.
const Operand &required_input(const Blueprint &blueprint, std::size_t i, const std::string &role);
// Input `i`, absent where the blueprint has fewer.
Operand optional_input(const Blueprint &blueprint, std::size_t i);
// A finite number.
float finite_attribute(const Blueprint &blueprint, const std::string &key);

// Rows of an operand: the product of all dimensions but the last.
Extent row_count(const Blueprint &blueprint, const std::string &role, const Operand &operand);
bool same(const Extent &a, const Extent &b);

// Where the rows of a resolved operand start, in any number of leading dimensions.
template <class T>
class Rows {
  public:
    explicit Rows(const Tensor &tensor) : data_(tensor.as<T>()) {
        for (int i = 0; i + 1 < tensor.rank; ++i) {
            if (tensor.dims[i] == 1) continue;
            // A dimension that continues the one before it is one with it.
            if (rank_ > 0 && strides_[rank_ - 1] == tensor.dims[i] * tensor.strides[i]) {
                dims_[rank_ - 1] *= tensor.dims[i];
                strides_[rank_ - 1] = tensor.strides[i];
            } else {
                dims_[rank_] = tensor.dims[i];
                strides_[rank_++] = tensor.strides[i];
            }
        }
    }

    T *operator[](std::int64_t row) const {
        if (rank_ == 0) return data_;
        std::int64_t offset = 0;
        for (int i = rank_ - 1; i > 0; --i) {
            offset += row % dims_[i] * strides_[i];
            row /= dims_[i];
        }
        return data_ + offset + row * strides_[0];
    }

  private:
    T *data_;
    int rank_ = 0;
    std::array<std::int64_t, kMaxRank> dims_{};
    std::array<std::int64_t, kMaxRank> strides_{};
};

// This thread's part of `units` units of work on `elements` numbers in all: with few of them the first thread does all,
// since sharing costs more than it saves.
inline Worker::Range shared_units(const Worker &worker, std::int64_t units, std::int64_t elements) {
    constexpr std::int64_t kFew = 2048;
    if (elements > kFew) return worker.share(units);
    return worker.index == 0 ? Worker::Range{0, units} : Worker::Range{0, 0};
}

// The three outputs in which an operation leaves its rows quantized: values, scales, sums; all or none of them.
class QuantizedOutput {
  public:
    QuantizedOutput() = default;
    // Outputs `first`, `first + 1`, `first + 2` for `rows` rows of `features`, in the layout of attribute `group`
    // (features that share a weight scale; -1: all) or, with `whole`, in one block a row.
    QuantizedOutput(const Blueprint &blueprint, std::size_t first, Extent rows, std::int64_t features,
                    bool whole = false);

    bool present() const { return values_.present; }
    const BlockLayout &layout() const { return layout_; }
    double bytes_per_row() const {
        return present() ? static_cast<double>(layout_.row_bytes() + 8 * layout_.blocks) : 0;
    }

    // The rows during a step.
    struct Resolved {
        std::int8_t *values;
        float *scales;
        std::int32_t *sums;
        std::int64_t row_bytes, blocks;

        std::int8_t *values_of(std::int64_t row) const { return values + row * row_bytes; }
        float *scales_of(std::int64_t row) const { return scales + row * blocks; }
        std::int32_t *sums_of(std::int64_t row) const { return sums + row * blocks; }
    };
    Resolved resolve(const Worker &worker) const;
    // Quantize blocks `first..last` of a row, whose features from the first block's on are at x.
    void quantize(const RowKernels &kernels, const Resolved &out, std::int64_t row, std::int64_t first,
                  std::int64_t last, const float *x) const;

  private:
    BlockLayout layout_;
    Operand values_, scales_, sums_;
};

}  // namespace inferencex::cpu
