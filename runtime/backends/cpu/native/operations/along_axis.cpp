// ONNX operators that turn every line along an axis into another line.
//
//   Softmax, LogSoftmax (x; axis) -> y                        f32; y may be x
//   CumSum (x, axis?; axis, exclusive?, reverse?) -> y        f32, i64, i32; the input is not read
//   TopK (x, k?; axis, largest?) -> values, indices i64       f32, i64, i32; as many as the outputs have
//
// TopK is always sorted; of equal elements the one with the lower index comes first, NaN counts as the largest.
#include <algorithm>
#include <cmath>
#include <string>

#include "../operation.h"
#include "blueprint_checks.h"
#include "float_functions.h"
#include "lanes.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

class Softmax final : public StridedOperation {
  public:
    explicit Softmax(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        require_dtype(blueprint, "the input", inputs_[0], {DType::f32});
        require_same_dtype(blueprint, "the output", outputs_[0], inputs_[0]);
        require_same_shape(blueprint, "the output", outputs_[0], inputs_[0]);
        axis_ = axis_of(blueprint, "axis", inputs_[0].rank);
        logarithm_ = blueprint.kind == "LogSoftmax";
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = lines(axis_, y, x);
        const auto part = line_portion(worker, walk.size(), y.dims[axis_]);
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t j = 0; j < n; ++j) {
                float *out = element<float>(y, at[0] + j * walk.step(0));
                const float *in = element<float>(x, at[1] + j * walk.step(1));
                if (x.strides[axis_] == 1 && y.strides[axis_] == 1) line(in, 1, out, 1, y.dims[axis_]);
                else line(in, x.strides[axis_], out, y.strides[axis_], y.dims[axis_]);
            }
        });
    }

  private:
    struct Largest {
        static float map(float v) { return v; }
        static float merge(float a, float b) { return numbers::maximum(a, b); }
    };
    struct Total {
        static float map(float v) { return v; }
        static float merge(float a, float b) { return a + b; }
    };
    struct TotalOfPowers {
        float most;
        float map(float v) const { return functions::exp(v - most); }
        static float merge(float a, float b) { return a + b; }
    };

    void line(const float *x, std::int64_t x_step, float *y, std::int64_t y_step, std::int64_t n) const {
        Lanes<float, Largest> largest({}, -std::numeric_limits<float>::infinity());
        largest.add(x, x_step, n);
        const float most = largest.result();
        if (logarithm_) {
            Lanes<float, TotalOfPowers> total({most}, 0.0F);
            total.add(x, x_step, n);
            const float shift = std::log(total.result());
            for (std::int64_t i = 0; i < n; ++i) y[i * y_step] = (x[i * x_step] - most) - shift;
            return;
        }
        if (x_step == 1 && y_step == 1) {
            INFERENCEX_INDEPENDENT
            for (std::int64_t i = 0; i < n; ++i) y[i] = functions::exp(x[i] - most);
        } else {
            for (std::int64_t i = 0; i < n; ++i) y[i * y_step] = functions::exp(x[i * x_step] - most);
        }
        Lanes<float, Total> total({}, 0.0F);
        total.add(y, y_step, n);
        const float sum = total.result();
        for (std::int64_t i = 0; i < n; ++i) y[i * y_step] /= sum;
    }

    int axis_ = 0;
    bool logarithm_ = false;
};

class CumSum final : public StridedOperation {
  public:
    explicit CumSum(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 2);
        require_dtype(blueprint, "the input", inputs_[0], {DType::f32, DType::i64, DType::i32});
        require_same_dtype(blueprint, "the output", outputs_[0], inputs_[0]);
        require_same_shape(blueprint, "the output", outputs_[0], inputs_[0]);
        axis_ = axis_of(blueprint, "axis", inputs_[0].rank);
        exclusive_ = integer_or(blueprint, "exclusive", 0) != 0;
        reverse_ = integer_or(blueprint, "reverse", 0) != 0;
        inputs_.resize(1);
    }

    void run(const Worker &worker) const override {
        switch (inputs_[0].dtype) {
            case DType::f32:
                return accumulate<float>(worker);
            case DType::i64:
                return accumulate<std::int64_t>(worker);
            default:
                return accumulate<std::int32_t>(worker);
        }
    }

  private:
    template <class T>
    void accumulate(const Worker &worker) const {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const std::int64_t length = y.dims[axis_];
        const auto walk = lines(axis_, y, x);
        const auto part = line_portion(worker, walk.size(), length);
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t j = 0; j < n; ++j) {
                T *out = element<T>(y, at[0] + j * walk.step(0));
                const T *in = element<T>(x, at[1] + j * walk.step(1));
                T total = 0;
                for (std::int64_t k = 0; k < length; ++k) {
                    const std::int64_t i = reverse_ ? length - 1 - k : k;
                    const T next = numbers::add(total, in[i * x.strides[axis_]]);
                    out[i * y.strides[axis_]] = exclusive_ ? total : next;
                    total = next;
                }
            }
        });
    }

    int axis_ = 0;
    bool exclusive_ = false;
    bool reverse_ = false;
};

class TopK final : public StridedOperation {
  public:
    explicit TopK(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 2, 2);
        const Operand &x = inputs_[0];
        const Operand &values = outputs_[0];
        require_dtype(blueprint, "the input", x, {DType::f32, DType::i64, DType::i32});
        require_same_dtype(blueprint, "the values", values, x);
        require_dtype(blueprint, "the indices", outputs_[1], {DType::i64});
        require_same_shape(blueprint, "the indices", outputs_[1], values);
        axis_ = axis_of(blueprint, "axis", x.rank);
        largest_ = integer_or(blueprint, "largest", 1) != 0;
        Operand expected = x;
        if (values.rank == x.rank) expected.dims[axis_] = values.dims[axis_];
        require_same_shape(blueprint, "the values", values, expected);
        const Extent &k = values.dims[axis_];
        if (k.symbol != x.dims[axis_].symbol || k.coefficient > x.dims[axis_].coefficient)
            refuse(blueprint, "the values are " + describe(values) + ", more than there are in " + describe(x));
        inputs_.resize(1);
    }

    void run(const Worker &worker) const override {
        switch (inputs_[0].dtype) {
            case DType::f32:
                return select<float>(worker);
            case DType::i64:
                return select<std::int64_t>(worker);
            default:
                return select<std::int32_t>(worker);
        }
    }

  private:
    // A line of x and the indices of the best so far: a heap with the worst of them at its root.
    template <class T>
    struct Best {
        const T *x;
        std::int64_t x_step;
        std::int64_t *indices;
        std::int64_t step;
        bool largest;

        std::int64_t &at(std::int64_t i) const { return indices[i * step]; }
        T value(std::int64_t index) const { return x[index * x_step]; }
        bool better(std::int64_t i, std::int64_t j) const {
            const T a = value(i);
            const T b = value(j);
            const bool a_more = b == b && (a > b || a != a);
            const bool b_more = a == a && (b > a || b != b);
            if (a_more == b_more) return i < j;
            return largest ? a_more : b_more;
        }
        void sink(std::int64_t i, std::int64_t n) const {
            const std::int64_t moved = at(i);
            for (std::int64_t child = 2 * i + 1; child < n; child = 2 * i + 1) {
                if (child + 1 < n && better(at(child), at(child + 1))) ++child;
                if (!better(moved, at(child))) break;
                at(i) = at(child);
                i = child;
            }
            at(i) = moved;
        }
        void rise(std::int64_t i) const {
            const std::int64_t moved = at(i);
            while (i > 0 && better(at((i - 1) / 2), moved)) {
                at(i) = at((i - 1) / 2);
                i = (i - 1) / 2;
            }
            at(i) = moved;
        }
    };

    template <class T>
    void select(const Worker &worker) const {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor values = worker.resolve(outputs_[0]);
        const Tensor indices = worker.resolve(outputs_[1]);
        const std::int64_t length = x.dims[axis_];
        const std::int64_t k = values.dims[axis_];
        if (k == 0) return;
        const auto walk = lines(axis_, values, indices, x);
        const auto part = line_portion(worker, walk.size(), length);
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t j = 0; j < n; ++j) {
                const Best<T> best{element<T>(x, at[2] + j * walk.step(2)), x.strides[axis_],
                                   element<std::int64_t>(indices, at[1] + j * walk.step(1)), indices.strides[axis_],
                                   largest_};
                for (std::int64_t i = 0; i < k; ++i) {
                    best.at(i) = i;
                    best.rise(i);
                }
                for (std::int64_t i = k; i < length; ++i) {
                    if (!best.better(i, best.at(0))) continue;
                    best.at(0) = i;
                    best.sink(0, k);
                }
                for (std::int64_t left = k - 1; left > 0; --left) {
                    std::swap(best.at(0), best.at(left));
                    best.sink(0, left);
                }
                T *out = element<T>(values, at[0] + j * walk.step(0));
                for (std::int64_t i = 0; i < k; ++i) out[i * values.strides[axis_]] = best.value(best.at(i));
            }
        });
    }

    int axis_ = 0;
    bool largest_ = true;
};

template <class T>
std::unique_ptr<Operation> make(const Blueprint &blueprint) {
    return std::make_unique<T>(blueprint);
}

}  // namespace

void add_along_axis(Registry &registry) {
    registry.add("Softmax", make<Softmax>);
    registry.add("LogSoftmax", make<Softmax>);
    registry.add("CumSum", make<CumSum>);
    registry.add("TopK", make<TopK>);
}

}  // namespace inferencex::cpu
