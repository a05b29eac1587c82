// ONNX operators of one tensor that compute every element alone.
//
//   Abs, Neg, Sign, Relu (x) -> y                 f32, i64, i32
//   Not (x) -> y                                  boolean
//   IsNaN (x f32) -> y boolean
//   Ceil, Cos, Elu (alpha), Erf, Exp, Floor, Gelu (approximate), HardSwish, LeakyRelu (alpha), Log, Reciprocal,
//   Round, Sigmoid, Sin, Softplus, Sqrt, Tanh (x) -> y   f32
//   Clip (x, low?, high?) -> y                    f32, i64, i32; low and high have one element
//
// x broadcasts to y; y may be the very view that x is.
#include <cmath>
#include <limits>

#include "../operation.h"
#include "blueprint_checks.h"
#include "float_functions.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

using Loop = void (*)(const Tensor &x, std::int64_t at, std::int64_t step, const Tensor &y, std::int64_t y_at,
                      std::int64_t y_step, std::int64_t n, float alpha);

template <class X, class Y, class F>
void loop(const Tensor &x_tensor, std::int64_t at, std::int64_t step, const Tensor &y_tensor, std::int64_t y_at,
          std::int64_t y_step, std::int64_t n, float alpha) {
    const F f{alpha};
    const X *x = element<X>(x_tensor, at);
    Y *y = element<Y>(y_tensor, y_at);
    if (step == 1 && y_step == 1) {
        INFERENCEX_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) y[i] = f(x[i]);
    } else {
        for (std::int64_t i = 0; i < n; ++i) y[i * y_step] = f(x[i * step]);
    }
}

// Functors of one element; those without a parameter take and ignore it.
#define INFERENCEX_FUNCTION(NAME, EXPRESSION) \
    struct NAME {                             \
        float alpha;                          \
        template <class T>                    \
        auto operator()(T x) const {          \
            return EXPRESSION;                \
        }                                     \
    };
INFERENCEX_FUNCTION(Abs, numbers::absolute(x))
INFERENCEX_FUNCTION(Neg, numbers::negative(x))
INFERENCEX_FUNCTION(Sign, numbers::sign(x))
INFERENCEX_FUNCTION(Relu, (x < T{0} ? T{0} : x))
INFERENCEX_FUNCTION(Not, static_cast<std::uint8_t>(x == 0))
INFERENCEX_FUNCTION(IsNaN, static_cast<std::uint8_t>(x != x))
INFERENCEX_FUNCTION(Ceil, std::ceil(x))
INFERENCEX_FUNCTION(Cos, std::cos(x))
INFERENCEX_FUNCTION(Elu, (x > 0 ? x : alpha * std::expm1(x)))
INFERENCEX_FUNCTION(Erf, std::erf(x))
INFERENCEX_FUNCTION(Exp, functions::exp(x))
INFERENCEX_FUNCTION(Floor, std::floor(x))
INFERENCEX_FUNCTION(Gelu, functions::gelu(x))
INFERENCEX_FUNCTION(GeluTanh, functions::gelu_tanh(x))
INFERENCEX_FUNCTION(HardSwish, x *numbers::minimum(numbers::maximum(x * (1.0F / 6.0F) + 0.5F, 0.0F), 1.0F))
INFERENCEX_FUNCTION(LeakyRelu, (x < 0 ? alpha * x : x))
INFERENCEX_FUNCTION(Log, std::log(x))
INFERENCEX_FUNCTION(Reciprocal, 1.0F / x)
INFERENCEX_FUNCTION(Round, std::nearbyint(x))
INFERENCEX_FUNCTION(Sigmoid, functions::sigmoid(x))
INFERENCEX_FUNCTION(Sin, std::sin(x))
INFERENCEX_FUNCTION(Softplus, functions::softplus(x))
INFERENCEX_FUNCTION(Sqrt, std::sqrt(x))
INFERENCEX_FUNCTION(Tanh, functions::tanh(x))
#undef INFERENCEX_FUNCTION

struct Function {
    const char *kind;
    Loop f32 = nullptr;
    Loop i64 = nullptr;
    Loop i32 = nullptr;
    Loop boolean = nullptr;
    bool predicate = false;  // y is boolean
    double alpha = 0;        // default of the attribute

    Loop of(DType dtype) const {
        switch (dtype) {
            case DType::f32:
                return f32;
            case DType::i64:
                return i64;
            case DType::i32:
                return i32;
            case DType::boolean:
                return boolean;
            default:
                return nullptr;
        }
    }
};

template <class F>
constexpr Function number(const char *kind) {
    return {kind, loop<float, float, F>, loop<std::int64_t, std::int64_t, F>, loop<std::int32_t, std::int32_t, F>};
}
template <class F>
constexpr Function real(const char *kind, double alpha = 0) {
    return {.kind = kind, .f32 = loop<float, float, F>, .alpha = alpha};
}

constexpr Function kFunctions[] = {
    number<Abs>("Abs"),
    number<Neg>("Neg"),
    number<Sign>("Sign"),
    number<Relu>("Relu"),
    {.kind = "Not", .boolean = loop<std::uint8_t, std::uint8_t, Not>, .predicate = true},
    {.kind = "IsNaN", .f32 = loop<float, std::uint8_t, IsNaN>, .predicate = true},
    real<Ceil>("Ceil"),
    real<Cos>("Cos"),
    real<Elu>("Elu", 1.0),
    real<Erf>("Erf"),
    real<Exp>("Exp"),
    real<Floor>("Floor"),
    real<Gelu>("Gelu"),
    real<HardSwish>("HardSwish"),
    real<LeakyRelu>("LeakyRelu", 0.01),
    real<Log>("Log"),
    real<Reciprocal>("Reciprocal"),
    real<Round>("Round"),
    real<Sigmoid>("Sigmoid"),
    real<Sin>("Sin"),
    real<Softplus>("Softplus"),
    real<Sqrt>("Sqrt"),
    real<Tanh>("Tanh"),
};

class Unary final : public StridedOperation {
  public:
    explicit Unary(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        const Operand &x = inputs_[0];
        const Operand &y = outputs_[0];
        require_broadcast(blueprint, "the input", x, y);
        const auto *function = std::find_if(std::begin(kFunctions), std::end(kFunctions),
                                            [&](const Function &f) { return blueprint.kind == f.kind; });
        if (function == std::end(kFunctions)) refuse(blueprint, "there is no such operator of one tensor");
        loop_ = function->of(x.dtype);
        alpha_ = static_cast<float>(real_or(blueprint, "alpha", function->alpha));
        if (blueprint.kind == "Gelu" && x.dtype == DType::f32) {
            const std::string approximate = text_or(blueprint, "approximate", "none");
            if (approximate == "tanh") loop_ = loop<float, float, GeluTanh>;
            else if (approximate != "none")
                refuse(blueprint, "the attribute 'approximate' is '" + approximate + "', expected 'none' or 'tanh'");
        }
        if (!loop_) refuse(blueprint, "the input is " + describe(x) + ", a type that this operator does not take");
        const DType expected = function->predicate ? DType::boolean : x.dtype;
        require_dtype(blueprint, "the output", y, {expected});
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y, x);
        const auto part = element_portion(worker, walk.size());
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            loop_(x, at[1], walk.step(1), y, at[0], walk.step(0), n, alpha_);
        });
    }

  private:
    Loop loop_ = nullptr;
    float alpha_ = 0;
};

class Clip final : public StridedOperation {
  public:
    explicit Clip(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 3);
        require_dtype(blueprint, "the input", inputs_[0], {DType::f32, DType::i64, DType::i32});
        require_same_dtype(blueprint, "the output", outputs_[0], inputs_[0]);
        require_broadcast(blueprint, "the input", inputs_[0], outputs_[0]);
        for (std::size_t i = 1; i < inputs_.size(); ++i) {
            if (!inputs_[i].present) continue;
            require_same_dtype(blueprint, "a limit", inputs_[i], inputs_[0]);
            require_scalar(blueprint, "a limit", inputs_[i]);
        }
        inputs_.resize(3);
    }

    void run(const Worker &worker) const override {
        switch (inputs_[0].dtype) {
            case DType::f32:
                return clip<float>(worker);
            case DType::i64:
                return clip<std::int64_t>(worker);
            default:
                return clip<std::int32_t>(worker);
        }
    }

  private:
    template <class T>
    void clip(const Worker &worker) const {
        using Limits = std::numeric_limits<T>;
        T low = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
        T high = Limits::has_infinity ? Limits::infinity() : Limits::max();
        if (inputs_[1].present) low = *worker.resolve(inputs_[1]).as<T>();
        if (inputs_[2].present) high = *worker.resolve(inputs_[2]).as<T>();
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const bool undefined = low != low || high != high;
        const auto bounded = [=](T value) {
            value = value < low ? low : value;  // NaN stays
            return value > high ? high : value;
        };
        const auto walk = broadcast(y, x);
        const auto part = element_portion(worker, walk.size());
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            const T *in = element<T>(x, at[1]);
            T *out = element<T>(y, at[0]);
            const std::int64_t in_step = walk.step(1);
            const std::int64_t out_step = walk.step(0);
            if (undefined) {
                for (std::int64_t i = 0; i < n; ++i) out[i * out_step] = low != low ? low : high;
            } else if (in_step == 1 && out_step == 1) {
                INFERENCEX_INDEPENDENT
                for (std::int64_t i = 0; i < n; ++i) out[i] = bounded(in[i]);
            } else {
                for (std::int64_t i = 0; i < n; ++i) out[i * out_step] = bounded(in[i * in_step]);
            }
        });
    }
};

}  // namespace

void add_elementwise(Registry &registry) {
    for (const Function &function : kFunctions)
        registry.add(function.kind, [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
            return std::make_unique<Unary>(blueprint);
        });
    registry.add("Clip", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<Clip>(blueprint);
    });
}

}  // namespace inferencex::cpu
