// ONNX operators that pick elements of a tensor by indices, or make some. Indices are i64 or i32, negative ones count
// from the end; elements are of any type unless noted. Nothing is read for an index out of range: what it would have
// picked is 0.
//
//   Gather (x, indices; axis) -> y
//   GatherElements (x, indices; axis) -> y
//   GatherND (x, indices; batch_dims?) -> y
//   OneHot (indices, depth?, values [2]; axis) -> y       depth is the output's size along the axis
//   Range (start, limit?, delta) -> y                     f32, i64, i32; as many as y has
#include <algorithm>
#include <cstring>
#include <string>

#include "../operation.h"
#include "arrangement.h"
#include "blueprint_checks.h"
#include "indices.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

alignas(8) constexpr std::byte kZero[8] = {};

class Gather final : public StridedOperation {
  public:
    explicit Gather(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 2, 2);
        const Operand &x = inputs_[0];
        const Operand &indices = inputs_[1];
        require_indices(blueprint, indices);
        require_same_dtype(blueprint, "the output", outputs_[0], x);
        axis_ = axis_of(blueprint, "axis", x.rank);
        if (x.rank - 1 + indices.rank > kMaxRank)
            refuse(blueprint, "the indices " + describe(indices) + " into " + describe(x) + " give more than " +
                                  std::to_string(kMaxRank) + " dimensions");
        Operand expected = x;
        expected.rank = x.rank - 1 + indices.rank;
        std::copy_n(indices.dims.begin(), indices.rank, expected.dims.begin() + axis_);
        std::copy_n(x.dims.begin() + axis_ + 1, x.rank - axis_ - 1, expected.dims.begin() + axis_ + indices.rank);
        require_same_shape(blueprint, "the output", outputs_[0], expected);
        loop_ = copy_loop(size_of(x.dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor indices = worker.resolve(inputs_[1]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto size = static_cast<std::int64_t>(size_of(x.dtype));
        Walk<3> rows;  // y, x, indices
        for (int d = 0; d < axis_; ++d) rows.extend(x.dims[d], {y.strides[d], x.strides[d], 0});
        for (int d = 0; d < indices.rank; ++d)
            rows.extend(indices.dims[d], {y.strides[axis_ + d], 0, indices.strides[d]});
        Walk<2> inner;
        for (int d = axis_ + 1; d < x.rank; ++d)
            inner.extend(x.dims[d], {y.strides[d - 1 + indices.rank], x.strides[d]});
        const auto part = line_portion(worker, rows.size(), inner.size());
        rows.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
                const std::int64_t index = index_at(indices, at[2] + i * rows.step(2), x.dims[axis_]);
                const std::int64_t from = at[1] + i * rows.step(1) + index * x.strides[axis_];
                const std::int64_t to = at[0] + i * rows.step(0);
                inner.over(0, inner.size(), [&](const auto &place, std::int64_t m) {
                    std::byte *target = y.data + (to + place[0]) * size;
                    if (index < 0) loop_(kZero, 0, target, inner.step(0), m);
                    else loop_(x.data + (from + place[1]) * size, inner.step(1), target, inner.step(0), m);
                });
            }
        });
    }

  private:
    int axis_ = 0;
    CopyLoop loop_;
};

class GatherElements final : public StridedOperation {
  public:
    explicit GatherElements(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 2, 2);
        const Operand &x = inputs_[0];
        const Operand &indices = inputs_[1];
        require_indices(blueprint, indices);
        require_same_dtype(blueprint, "the output", outputs_[0], x);
        require_same_shape(blueprint, "the output", outputs_[0], indices);
        axis_ = axis_of(blueprint, "axis", x.rank);
        bool fits = x.rank == indices.rank;
        for (int d = 0; fits && d < x.rank; ++d) fits = d == axis_ || within(indices.dims[d], x.dims[d]);
        if (!fits) refuse(blueprint, "the indices " + describe(indices) + " exceed the input " + describe(x));
    }

    void run(const Worker &worker) const override {
        switch (size_of(inputs_[0].dtype)) {
            case 8:
                return gather<std::uint64_t>(worker);
            case 4:
                return gather<std::uint32_t>(worker);
            case 2:
                return gather<std::uint16_t>(worker);
            default:
                return gather<std::uint8_t>(worker);
        }
    }

  private:
    template <class Bits>
    void gather(const Worker &worker) const {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor indices = worker.resolve(inputs_[1]);
        const Tensor y = worker.resolve(outputs_[0]);
        Walk<3> walk;
        for (int d = 0; d < y.rank; ++d)
            walk.extend(y.dims[d], {y.strides[d], indices.strides[d], d == axis_ ? 0 : x.strides[d]});
        const auto part = element_portion(worker, walk.size());
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
                const std::int64_t index = index_at(indices, at[1] + i * walk.step(1), x.dims[axis_]);
                Bits *target = element<Bits>(y, at[0] + i * walk.step(0));
                *target = index < 0 ? Bits{0} : *element<Bits>(x, at[2] + i * walk.step(2) + index * x.strides[axis_]);
            }
        });
    }

    int axis_ = 0;
};

class GatherND final : public StridedOperation {
  public:
    explicit GatherND(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 2, 2);
        const Operand &x = inputs_[0];
        const Operand &indices = inputs_[1];
        require_indices(blueprint, indices);
        require_same_dtype(blueprint, "the output", outputs_[0], x);
        const std::int64_t batch = integer_or(blueprint, "batch_dims", 0);
        if (indices.rank < 1 || indices.dims[indices.rank - 1].symbol != Symbol::none)
            refuse(blueprint, "the indices are " + describe(indices) + ", expected tuples of a fixed size");
        const std::int64_t depth = indices.dims[indices.rank - 1].coefficient;
        if (batch < 0 || batch >= indices.rank || depth < 1 || depth > x.rank || batch + depth > x.rank)
            refuse(blueprint, "the indices " + describe(indices) + " do not fit the input " + describe(x) +
                                  " with batch_dims " + std::to_string(batch));
        batch_ = static_cast<int>(batch);
        depth_ = static_cast<int>(depth);
        for (int d = 0; d < batch_; ++d)
            if (!same(x.dims[d], indices.dims[d]))
                refuse(blueprint, "the indices " + describe(indices) + " and the input " + describe(x) +
                                      " differ in the batch dimension " + std::to_string(d));
        const int inner = x.rank - batch_ - depth_;
        if (indices.rank - 1 + inner > kMaxRank)
            refuse(blueprint, "the output has more than " + std::to_string(kMaxRank) + " dimensions");
        Operand expected = indices;
        expected.rank = indices.rank - 1 + inner;
        std::copy_n(x.dims.begin() + batch_ + depth_, inner, expected.dims.begin() + indices.rank - 1);
        require_same_shape(blueprint, "the output", outputs_[0], expected);
        loop_ = copy_loop(size_of(x.dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor indices = worker.resolve(inputs_[1]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto size = static_cast<std::int64_t>(size_of(x.dtype));
        const int tuple = indices.rank - 1;
        Walk<3> rows;  // y, x, indices
        for (int d = 0; d < tuple; ++d)
            rows.extend(indices.dims[d], {y.strides[d], d < batch_ ? x.strides[d] : 0, indices.strides[d]});
        Walk<2> inner;
        for (int d = batch_ + depth_; d < x.rank; ++d)
            inner.extend(x.dims[d], {y.strides[tuple + d - batch_ - depth_], x.strides[d]});
        const auto part = line_portion(worker, rows.size(), inner.size());
        rows.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
                std::int64_t from = at[1] + i * rows.step(1);
                bool inside = true;
                for (int k = 0; k < depth_; ++k) {
                    const std::int64_t place = at[2] + i * rows.step(2) + k * indices.strides[tuple];
                    const std::int64_t index = index_at(indices, place, x.dims[batch_ + k]);
                    inside = inside && index >= 0;
                    from += index * x.strides[batch_ + k];
                }
                const std::int64_t to = at[0] + i * rows.step(0);
                inner.over(0, inner.size(), [&](const auto &place, std::int64_t m) {
                    std::byte *target = y.data + (to + place[0]) * size;
                    if (inside) loop_(x.data + (from + place[1]) * size, inner.step(1), target, inner.step(0), m);
                    else loop_(kZero, 0, target, inner.step(0), m);
                });
            }
        });
    }

  private:
    int batch_ = 0;
    int depth_ = 0;
    CopyLoop loop_;
};

class OneHot final : public StridedOperation {
  public:
    explicit OneHot(const Blueprint &blueprint) : StridedOperation(blueprint) {
        if (blueprint.inputs.size() != 3 || !blueprint.has_input(0) || !blueprint.has_input(2))
            refuse(blueprint, "expected the inputs indices, depth (may be absent) and values");
        require_operands(blueprint, 1, 3);
        const Operand &indices = inputs_[0];
        const Operand &values = inputs_[2];
        const Operand &y = outputs_[0];
        require_indices(blueprint, indices);
        require_same_dtype(blueprint, "the output", y, values);
        if (values.rank != 1 || values.dims[0].symbol != Symbol::none || values.dims[0].coefficient != 2)
            refuse(blueprint, "the values are " + describe(values) + ", expected two of them");
        axis_ = axis_of(blueprint, "axis", y.rank);
        bool fits = y.rank == indices.rank + 1;
        for (int d = 0; fits && d < indices.rank; ++d) fits = same(indices.dims[d], y.dims[d < axis_ ? d : d + 1]);
        if (!fits) refuse(blueprint, "the output is " + describe(y) + " for the indices " + describe(indices));
        loop_ = copy_loop(size_of(y.dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor indices = worker.resolve(inputs_[0]);
        const Tensor values = worker.resolve(inputs_[2]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto size = static_cast<std::int64_t>(size_of(y.dtype));
        const std::byte *on = values.data + values.strides[0] * size;
        Walk<2> rows;
        for (int d = 0; d < indices.rank; ++d)
            rows.extend(indices.dims[d], {y.strides[d < axis_ ? d : d + 1], indices.strides[d]});
        const auto part = line_portion(worker, rows.size(), y.dims[axis_]);
        rows.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t i = 0; i < n; ++i) {
                const std::int64_t hot = index_at(indices, at[1] + i * rows.step(1), y.dims[axis_]);
                std::byte *line = y.data + (at[0] + i * rows.step(0)) * size;
                loop_(values.data, 0, line, y.strides[axis_], y.dims[axis_]);
                if (hot >= 0) loop_(on, 0, line + hot * y.strides[axis_] * size, y.strides[axis_], 1);
            }
        });
    }

  private:
    int axis_ = 0;
    CopyLoop loop_;
};

class Range final : public StridedOperation {
  public:
    explicit Range(const Blueprint &blueprint) : StridedOperation(blueprint) {
        if (blueprint.inputs.size() != 3 || !blueprint.has_input(0) || !blueprint.has_input(2))
            refuse(blueprint, "expected the inputs start, limit (may be absent) and delta");
        require_operands(blueprint, 1, 3);
        require_dtype(blueprint, "the output", outputs_[0], {DType::f32, DType::i64, DType::i32});
        for (std::size_t i : {0U, 2U}) {
            require_same_dtype(blueprint, "an input", inputs_[i], outputs_[0]);
            require_scalar(blueprint, "an input", inputs_[i]);
        }
        if (outputs_[0].rank != 1)
            refuse(blueprint, "the output is " + describe(outputs_[0]) + ", expected one dimension");
    }

    void run(const Worker &worker) const override {
        switch (outputs_[0].dtype) {
            case DType::f32:
                return count<float, double>(worker);
            case DType::i64:
                return count<std::int64_t, std::int64_t>(worker);
            default:
                return count<std::int32_t, std::int32_t>(worker);
        }
    }

  private:
    template <class T, class Wide>
    void count(const Worker &worker) const {
        const Wide start = *worker.resolve(inputs_[0]).as<T>();
        const Wide delta = *worker.resolve(inputs_[2]).as<T>();
        const Tensor y = worker.resolve(outputs_[0]);
        const auto part = element_portion(worker, y.dims[0]);
        for (std::int64_t i = part.begin; i < part.end; ++i)
            *element<T>(y, i * y.strides[0]) =
                static_cast<T>(numbers::add(start, numbers::multiply(static_cast<Wide>(i), delta)));
    }
};

template <class T>
std::unique_ptr<Operation> make(const Blueprint &blueprint) {
    return std::make_unique<T>(blueprint);
}

}  // namespace

void add_indexing(Registry &registry) {
    registry.add("Gather", make<Gather>);
    registry.add("GatherElements", make<GatherElements>);
    registry.add("GatherND", make<GatherND>);
    registry.add("OneHot", make<OneHot>);
    registry.add("Range", make<Range>);
}

}  // namespace inferencex::cpu
