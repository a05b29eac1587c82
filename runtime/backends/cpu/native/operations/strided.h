// Walking strided operands: dimensions that lie regularly in all operands are merged, so that what is left for the
// innermost loop is as long as it can be.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "../operation.h"

// The loop's iterations are independent though its output may be the very memory of an input.
#if defined(__clang__)
#define INFERENCEX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INFERENCEX_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace inferencex::cpu {

// Below so many elements the first thread works alone: waking up another one's cache costs more.
inline constexpr std::int64_t kElementGrain = 1024;

// This thread's part of `total` tasks, in multiples of `unit`; everything is the first thread's up to `grain`.
inline Worker::Range portion(const Worker &worker, std::int64_t total, std::int64_t grain, std::int64_t unit = 1) {
    if (total <= grain) return {0, worker.index == 0 ? total : 0};
    const Worker::Range units = worker.share((total + unit - 1) / unit);
    return {std::min(units.begin * unit, total), std::min(units.end * unit, total)};
}
// Elements in units of a cache line of floats, so that threads do not write to the same one.
inline Worker::Range element_portion(const Worker &worker, std::int64_t total) {
    return portion(worker, total, kElementGrain, 16);
}
// Lines (rows along an axis) of `length` elements.
inline Worker::Range line_portion(const Worker &worker, std::int64_t lines, std::int64_t length) {
    return portion(worker, lines, kElementGrain / std::max<std::int64_t>(length, 1));
}

// An index space, and where N operands have the element of each index.
template <std::size_t N>
class Walk {
  public:
    using Offsets = std::array<std::int64_t, N>;

    // Append a dimension inside of those there are.
    void extend(std::int64_t extent, const Offsets &strides) {
        size_ *= extent;
        if (extent == 1) return;
        bool merges = rank_ > 0;
        for (std::size_t k = 0; k < N; ++k) merges = merges && strides_[rank_ - 1][k] == strides[k] * extent;
        if (!merges) {
            strides_[rank_] = strides;
            dims_[rank_++] = extent;
            return;
        }
        dims_[rank_ - 1] *= extent;
        strides_[rank_ - 1] = strides;
    }

    std::int64_t size() const { return size_; }
    // Elements from one index of the innermost dimension to the next in operand k.
    std::int64_t step(std::size_t k) const { return rank_ ? strides_[rank_ - 1][k] : 1; }

    // Call visit(offsets, n) for runs of n indices of the innermost dimension that make up [begin, end).
    template <class Visit>
    void over(std::int64_t begin, std::int64_t end, Visit &&visit) const {
        if (begin >= end) return;
        Offsets at{};
        if (rank_ == 0) {
            visit(at, std::int64_t{1});
            return;
        }
        std::array<std::int64_t, kRanks> index{};
        std::int64_t rest = begin;
        for (int d = rank_ - 1; d >= 0; --d) {
            index[d] = rest % dims_[d];
            rest /= dims_[d];
            for (std::size_t k = 0; k < N; ++k) at[k] += index[d] * strides_[d][k];
        }
        const int last = rank_ - 1;
        while (true) {
            const std::int64_t n = std::min(dims_[last] - index[last], end - begin);
            visit(at, n);
            begin += n;
            if (begin >= end) return;
            for (std::size_t k = 0; k < N; ++k) at[k] -= index[last] * strides_[last][k];
            index[last] = 0;
            for (int d = last - 1; d >= 0; --d) {
                for (std::size_t k = 0; k < N; ++k) at[k] += strides_[d][k];
                if (++index[d] < dims_[d]) break;
                for (std::size_t k = 0; k < N; ++k) at[k] -= dims_[d] * strides_[d][k];
                index[d] = 0;
            }
        }
    }

  private:
    static constexpr int kRanks = 2 * kMaxRank;  // Tile walks every dimension twice

    int rank_ = 0;
    std::int64_t size_ = 1;
    std::array<std::int64_t, kRanks> dims_{};
    std::array<Offsets, kRanks> strides_{};
};

// The stride along dimension d of `shape` of a tensor that broadcasts to it.
inline std::int64_t broadcast_stride(const Tensor &tensor, const Tensor &shape, int d) {
    const int own = d - (shape.rank - tensor.rank);
    return own < 0 || tensor.dims[own] == 1 ? 0 : tensor.strides[own];
}

// A walk over the first tensor's shape, to which the others broadcast.
template <class... Tensors>
Walk<1 + sizeof...(Tensors)> broadcast(const Tensor &shape, const Tensors &...others) {
    Walk<1 + sizeof...(Tensors)> walk;
    for (int d = 0; d < shape.rank; ++d)
        walk.extend(shape.dims[d], {shape.strides[d], broadcast_stride(others, shape, d)...});
    return walk;
}

// A walk over the lines along `axis` of tensors of equal rank, whose other dimensions are the first one's.
template <class... Tensors>
Walk<1 + sizeof...(Tensors)> lines(int axis, const Tensor &shape, const Tensors &...others) {
    Walk<1 + sizeof...(Tensors)> walk;
    for (int d = 0; d < shape.rank; ++d)
        if (d != axis) walk.extend(shape.dims[d], {shape.strides[d], others.strides[d]...});
    return walk;
}

template <class T>
T *element(const Tensor &tensor, std::int64_t offset) {
    return tensor.as<T>() + offset;
}

// An operation on strided operands: keeps them, and costs one operation an element of the output.
class StridedOperation : public Operation {
  public:
    Cost cost(const Batch &batch) const override {
        Cost cost;
        for (const auto *operands : {&inputs_, &outputs_})
            for (const Operand &operand : *operands)
                cost.bytes +=
                    operand.present ? distinct(operand, batch) * static_cast<double>(size_of(operand.dtype)) : 0;
        for (const Operand &operand : outputs_) cost.operations = std::max(cost.operations, distinct(operand, batch));
        return cost;
    }

  protected:
    explicit StridedOperation(const Blueprint &blueprint) : inputs_(blueprint.inputs), outputs_(blueprint.outputs) {}

    static double distinct(const Operand &operand, const Batch &batch) {
        double n = 1;
        for (int d = 0; d < operand.rank; ++d)
            if (operand.strides[d].coefficient != 0)
                n *= static_cast<double>(operand.dims[d].at(batch.tokens, batch.rows));
        return n;
    }

    std::vector<Operand> inputs_;
    std::vector<Operand> outputs_;
};

}  // namespace inferencex::cpu
