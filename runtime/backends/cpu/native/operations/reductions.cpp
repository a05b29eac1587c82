// ONNX operators that combine the elements along any dimensions.
//
//   ReduceSum, ReduceMax, ReduceMin, ReduceProd, ReduceSumSquare (x, axes?; axes) -> y    f32, i64, i32
//   ReduceMean, ReduceL1, ReduceL2 (x, axes?; axes) -> y                                  f32
//   ArgMax, ArgMin (x; axis, select_last_index?) -> y i64                                 f32, i64, i32
//
// The dimensions are named by the attribute; an input with them is not read. Reduced dimensions are missing from the
// output, or are 1 there. Every element of the output is combined in an order that its layout alone decides.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../operation.h"
#include "blueprint_checks.h"
#include "kept_dimensions.h"
#include "lanes.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

template <class T>
constexpr T lowest() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity()
                                                : std::numeric_limits<T>::lowest();
}
template <class T>
constexpr T highest() {
    return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
}

template <class T>
struct Sum {
    using Type = T;
    static constexpr T identity = 0;
    static T map(T x) { return x; }
    static T merge(T a, T b) { return numbers::add(a, b); }
    static T finish(T total, std::int64_t) { return total; }
};
template <class T>
struct Mean : Sum<T> {
    static T finish(T total, std::int64_t n) { return total / static_cast<T>(n); }
};
template <class T>
struct SumOfMagnitudes : Sum<T> {
    static T map(T x) { return numbers::absolute(x); }
};
template <class T>
struct SumOfSquares : Sum<T> {
    static T map(T x) { return numbers::multiply(x, x); }
};
template <class T>
struct Length : SumOfSquares<T> {
    static T finish(T total, std::int64_t) { return std::sqrt(total); }
};
template <class T>
struct Product : Sum<T> {
    static constexpr T identity = 1;
    static T merge(T a, T b) { return numbers::multiply(a, b); }
};
template <class T>
struct Maximum : Sum<T> {
    static constexpr T identity = lowest<T>();
    static T merge(T a, T b) { return numbers::maximum(a, b); }
};
template <class T>
struct Minimum : Sum<T> {
    static constexpr T identity = highest<T>();
    static T merge(T a, T b) { return numbers::minimum(a, b); }
};

// `n` outputs, `steps` elements apart in x and y, each of them the fold of `reduced` from its place in x.
using Loop = void (*)(const Tensor &x, const Tensor &y, Walk<2>::Offsets at, Walk<2>::Offsets steps, std::int64_t n,
                      const Walk<1> &reduced, bool last_is_reduced);

template <class Fold>
void fold(const Tensor &x, const Tensor &y, Walk<2>::Offsets at, Walk<2>::Offsets steps, std::int64_t n,
          const Walk<1> &reduced, bool last_is_reduced) {
    using T = typename Fold::Type;
    constexpr std::int64_t kBlock = 64;
    if (last_is_reduced) {
        for (std::int64_t j = 0; j < n; ++j) {
            Lanes<T, Fold> lanes(Fold{}, Fold::identity);
            reduced.over(0, reduced.size(), [&](const auto &place, std::int64_t m) {
                lanes.add(element<T>(x, at[0] + j * steps[0] + place[0]), reduced.step(0), m);
            });
            *element<T>(y, at[1] + j * steps[1]) = Fold::finish(lanes.result(), reduced.size());
        }
        return;
    }
    // Neighbouring outputs are folded side by side, each in the order of its elements.
    for (std::int64_t first = 0; first < n; first += kBlock) {
        const std::int64_t width = std::min(kBlock, n - first);
        alignas(64) T totals[kBlock];
        std::fill_n(totals, width, Fold::identity);
        reduced.over(0, reduced.size(), [&](const auto &place, std::int64_t m) {
            for (std::int64_t i = 0; i < m; ++i) {
                const T *row = element<T>(x, at[0] + first * steps[0] + place[0] + i * reduced.step(0));
                if (steps[0] == 1)
                    for (std::int64_t j = 0; j < width; ++j) totals[j] = Fold::merge(totals[j], Fold::map(row[j]));
                else
                    for (std::int64_t j = 0; j < width; ++j)
                        totals[j] = Fold::merge(totals[j], Fold::map(row[j * steps[0]]));
            }
        });
        for (std::int64_t j = 0; j < width; ++j)
            *element<T>(y, at[1] + (first + j) * steps[1]) = Fold::finish(totals[j], reduced.size());
    }
}

struct Reduction {
    const char *kind;
    Loop f32;
    Loop i64 = nullptr;
    Loop i32 = nullptr;
};

template <template <class> class Fold>
constexpr Reduction number(const char *kind) {
    return {kind, fold<Fold<float>>, fold<Fold<std::int64_t>>, fold<Fold<std::int32_t>>};
}

constexpr Reduction kReductions[] = {
    number<Sum>("ReduceSum"),
    number<Maximum>("ReduceMax"),
    number<Minimum>("ReduceMin"),
    number<Product>("ReduceProd"),
    number<SumOfSquares>("ReduceSumSquare"),
    {"ReduceMean", fold<Mean<float>>},
    {"ReduceL1", fold<SumOfMagnitudes<float>>},
    {"ReduceL2", fold<Length<float>>},
};

class Reduce final : public StridedOperation {
  public:
    explicit Reduce(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 2);
        const Operand &x = inputs_[0];
        require_same_dtype(blueprint, "the output", outputs_[0], x);
        const auto *reduction = std::find_if(std::begin(kReductions), std::end(kReductions),
                                             [&](const Reduction &r) { return blueprint.kind == r.kind; });
        if (reduction == std::end(kReductions)) refuse(blueprint, "there is no such reduction");
        loop_ = x.dtype == DType::f32   ? reduction->f32
                : x.dtype == DType::i64 ? reduction->i64
                : x.dtype == DType::i32 ? reduction->i32
                                        : nullptr;
        if (!loop_) refuse(blueprint, "the input is " + describe(x) + ", a type that this reduction does not take");
        dimensions_ = KeptDimensions(blueprint, x, required_integers(blueprint, "axes"), outputs_[0]);
        inputs_.resize(1);
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto kept = dimensions_.kept(x, y);
        const auto reduced = dimensions_.reduced(x);
        const auto part = line_portion(worker, kept.size(), reduced.size());
        kept.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            loop_(x, y, at, {kept.step(0), kept.step(1)}, n, reduced, dimensions_.last_is_reduced());
        });
    }

  private:
    KeptDimensions dimensions_;
    Loop loop_ = nullptr;
};

// Whether a takes the place of b. NaN counts as the most extreme, as it does in numpy.
template <class T>
bool beats(T a, T b, bool largest, bool last) {
    if (a != a || b != b) return a != a && (b == b || last);
    return (largest ? a > b : a < b) || (last && a == b);
}

class ArgExtreme final : public StridedOperation {
  public:
    explicit ArgExtreme(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        const Operand &x = inputs_[0];
        require_dtype(blueprint, "the input", x, {DType::f32, DType::i64, DType::i32});
        require_dtype(blueprint, "the output", outputs_[0], {DType::i64});
        axis_ = axis_of(blueprint, "axis", x.rank);
        largest_ = blueprint.kind == "ArgMax";
        last_ = integer_or(blueprint, "select_last_index", 0) != 0;
        dimensions_ = KeptDimensions(blueprint, x, {axis_}, outputs_[0]);
    }

    void run(const Worker &worker) const override {
        switch (inputs_[0].dtype) {
            case DType::f32:
                return find<float>(worker);
            case DType::i64:
                return find<std::int64_t>(worker);
            default:
                return find<std::int32_t>(worker);
        }
    }

  private:
    template <class T>
    void find(const Worker &worker) const {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto kept = dimensions_.kept(x, y);
        const std::int64_t length = x.dims[axis_];
        const auto part = line_portion(worker, kept.size(), length);
        kept.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            for (std::int64_t j = 0; j < n; ++j) {
                const T *line = element<T>(x, at[0] + j * kept.step(0));
                std::int64_t best = 0;
                for (std::int64_t i = 1; i < length; ++i)
                    if (beats(line[i * x.strides[axis_]], line[best * x.strides[axis_]], largest_, last_)) best = i;
                *element<std::int64_t>(y, at[1] + j * kept.step(1)) = best;
            }
        });
    }

    int axis_ = 0;
    bool largest_ = true;
    bool last_ = false;
    KeptDimensions dimensions_;
};

template <class T>
std::unique_ptr<Operation> make(const Blueprint &blueprint) {
    return std::make_unique<T>(blueprint);
}

}  // namespace

void add_reductions(Registry &registry) {
    for (const Reduction &reduction : kReductions) registry.add(reduction.kind, make<Reduce>);
    registry.add("ArgMax", make<ArgExtreme>);
    registry.add("ArgMin", make<ArgExtreme>);
}

}  // namespace inferencex::cpu
