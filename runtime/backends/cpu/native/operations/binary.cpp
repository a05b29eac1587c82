// ONNX operators of several tensors that compute every element alone; inputs broadcast to the output.
//
//   Add, Div, Mod (fmod), Mul, PRelu, Sub (a, b) -> y       f32, i64, i32
//   Pow (base, exponent) -> y                               the same; the exponent's type may differ
//   Equal, Greater, GreaterOrEqual, Less, LessOrEqual (a, b) -> y boolean   f32, i64, i32; Equal also boolean
//   And, Or, Xor (a, b) -> y                                boolean
//   Max, Min, Sum (inputs, ...) -> y                        f32, i64, i32; any number of inputs
//   Where (condition boolean, a, b) -> y                    any type
//
// y may be the very view that an input is.
#include <algorithm>
#include <array>
#include <cstring>

#include "../operation.h"
#include "blueprint_checks.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

// n elements of a, b and y, so many elements apart.
struct Steps {
    std::int64_t a, b, y;
};
using Loop = void (*)(const std::byte *a, const std::byte *b, std::byte *y, Steps steps, std::int64_t n);

template <class A, class B, class Y, class F>
void loop(const std::byte *a_bytes, const std::byte *b_bytes, std::byte *y_bytes, Steps steps, std::int64_t n) {
    const F f;
    const A *a = reinterpret_cast<const A *>(a_bytes);
    const B *b = reinterpret_cast<const B *>(b_bytes);
    Y *y = reinterpret_cast<Y *>(y_bytes);
    if (steps.y == 1 && steps.a == 1 && steps.b == 1) {
        INFERENCEX_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], b[i]);
    } else if (steps.y == 1 && steps.a == 1 && steps.b == 0) {
        const B scalar = *b;
        INFERENCEX_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) y[i] = f(a[i], scalar);
    } else if (steps.y == 1 && steps.a == 0 && steps.b == 1) {
        const A scalar = *a;
        INFERENCEX_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) y[i] = f(scalar, b[i]);
    } else {
        for (std::int64_t i = 0; i < n; ++i) y[i * steps.y] = f(a[i * steps.a], b[i * steps.b]);
    }
}

#define INFERENCEX_FUNCTION(NAME, EXPRESSION) \
    struct NAME {                             \
        template <class T>                    \
        auto operator()(T a, T b) const {     \
            return EXPRESSION;                \
        }                                     \
    };
INFERENCEX_FUNCTION(Add, numbers::add(a, b))
INFERENCEX_FUNCTION(Sub, numbers::subtract(a, b))
INFERENCEX_FUNCTION(Mul, numbers::multiply(a, b))
INFERENCEX_FUNCTION(Div, numbers::divide(a, b))
INFERENCEX_FUNCTION(PRelu, (a < T{0} ? numbers::multiply(a, b) : a))
INFERENCEX_FUNCTION(Max, numbers::maximum(a, b))
INFERENCEX_FUNCTION(Min, numbers::minimum(a, b))
INFERENCEX_FUNCTION(ModOfC, numbers::remainder_like_c(a, b))
INFERENCEX_FUNCTION(ModOfPython, numbers::remainder_like_python(a, b))
INFERENCEX_FUNCTION(Equal, static_cast<std::uint8_t>(a == b))
INFERENCEX_FUNCTION(Greater, static_cast<std::uint8_t>(a > b))
INFERENCEX_FUNCTION(GreaterOrEqual, static_cast<std::uint8_t>(a >= b))
INFERENCEX_FUNCTION(Less, static_cast<std::uint8_t>(a < b))
INFERENCEX_FUNCTION(LessOrEqual, static_cast<std::uint8_t>(a <= b))
INFERENCEX_FUNCTION(And, static_cast<std::uint8_t>((a != 0) & (b != 0)))
INFERENCEX_FUNCTION(Or, static_cast<std::uint8_t>((a != 0) | (b != 0)))
INFERENCEX_FUNCTION(Xor, static_cast<std::uint8_t>((a != 0) ^ (b != 0)))
#undef INFERENCEX_FUNCTION

struct Power {
    float operator()(float base, float exponent) const { return numbers::power(base, exponent); }
    template <class E>
    float operator()(float base, E exponent) const {
        return numbers::power(base, static_cast<float>(exponent));
    }
    template <class T, class E>
    T operator()(T base, E exponent) const {
        if constexpr (std::is_integral_v<E>)
            return static_cast<T>(numbers::power(static_cast<std::int64_t>(base), static_cast<std::int64_t>(exponent)));
        else return numbers::to_integer<T>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
    }
};

// The square of a whole run, by the same product as `numbers::power`.
void power_loop(const std::byte *a, const std::byte *b, std::byte *y, Steps steps, std::int64_t n) {
    if (steps.b == 0 && *reinterpret_cast<const float *>(b) == 2.0F)
        loop<float, float, float, Mul>(a, a, y, {steps.a, steps.a, steps.y}, n);
    else loop<float, float, float, Power>(a, b, y, steps, n);
}

struct Loops {
    Loop f32 = nullptr;
    Loop i64 = nullptr;
    Loop i32 = nullptr;
    Loop boolean = nullptr;

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
constexpr Loops numeric() {
    return {loop<float, float, float, F>, loop<std::int64_t, std::int64_t, std::int64_t, F>,
            loop<std::int32_t, std::int32_t, std::int32_t, F>};
}
template <class F>
constexpr Loops comparison() {
    return {loop<float, float, std::uint8_t, F>, loop<std::int64_t, std::int64_t, std::uint8_t, F>,
            loop<std::int32_t, std::int32_t, std::uint8_t, F>};
}
template <class F>
constexpr Loops logical() {
    return {.boolean = loop<std::uint8_t, std::uint8_t, std::uint8_t, F>};
}
constexpr Loops equal() {
    Loops loops = comparison<Equal>();
    // Any byte but 0 is true.
    loops.boolean = [](const std::byte *a, const std::byte *b, std::byte *y, Steps steps, std::int64_t n) {
        struct Agree {
            std::uint8_t operator()(std::uint8_t p, std::uint8_t q) const { return (p != 0) == (q != 0); }
        };
        loop<std::uint8_t, std::uint8_t, std::uint8_t, Agree>(a, b, y, steps, n);
    };
    return loops;
}
template <class T>
constexpr Loops powers() {
    return {loop<T, float, T, Power>, loop<T, std::int64_t, T, Power>, loop<T, std::int32_t, T, Power>};
}

struct Function {
    const char *kind;
    Loops loops;
    bool predicate = false;  // y is boolean
};

constexpr Function kBinary[] = {
    {"Add", numeric<Add>()},
    {"Sub", numeric<Sub>()},
    {"Mul", numeric<Mul>()},
    {"Div", numeric<Div>()},
    {"PRelu", numeric<PRelu>()},
    {"Mod", numeric<ModOfPython>()},
    {"Equal", equal(), true},
    {"Greater", comparison<Greater>(), true},
    {"GreaterOrEqual", comparison<GreaterOrEqual>(), true},
    {"Less", comparison<Less>(), true},
    {"LessOrEqual", comparison<LessOrEqual>(), true},
    {"And", logical<And>(), true},
    {"Or", logical<Or>(), true},
    {"Xor", logical<Xor>(), true},
};
constexpr Function kVariadic[] = {
    {"Max", numeric<Max>()},
    {"Min", numeric<Min>()},
    {"Sum", numeric<Add>()},
};

template <std::size_t N>
const Loops *loops_of(const Function (&functions)[N], const std::string &kind, bool &predicate) {
    for (const Function &function : functions)
        if (kind == function.kind) {
            predicate = function.predicate;
            return &function.loops;
        }
    return nullptr;
}

class Binary final : public StridedOperation {
  public:
    explicit Binary(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 2, 2);
        const Operand &a = inputs_[0];
        const Operand &b = inputs_[1];
        const Operand &y = outputs_[0];
        require_broadcast(blueprint, "input 0", a, y);
        require_broadcast(blueprint, "input 1", b, y);
        bool predicate = false;
        if (blueprint.kind == "Pow") {
            loop_ = a.dtype == DType::f32   ? powers<float>().of(b.dtype)
                    : a.dtype == DType::i64 ? powers<std::int64_t>().of(b.dtype)
                    : a.dtype == DType::i32 ? powers<std::int32_t>().of(b.dtype)
                                            : nullptr;
            if (a.dtype == DType::f32 && b.dtype == DType::f32) loop_ = power_loop;
        } else {
            const Loops *loops = loops_of(kBinary, blueprint.kind, predicate);
            if (!loops) loops = loops_of(kVariadic, blueprint.kind, predicate);
            if (!loops) refuse(blueprint, "there is no such operator of two tensors");
            require_same_dtype(blueprint, "input 1", b, a);
            loop_ = loops->of(a.dtype);
            if (blueprint.kind == "Mod" && integer_or(blueprint, "fmod", 0) != 0) loop_ = numeric<ModOfC>().of(a.dtype);
        }
        if (!loop_)
            refuse(blueprint, "the inputs are " + describe(a) + " and " + describe(b) + ", types it does not take");
        require_dtype(blueprint, "the output", y, {predicate ? DType::boolean : a.dtype});
    }

    void run(const Worker &worker) const override {
        const Tensor a = worker.resolve(inputs_[0]);
        const Tensor b = worker.resolve(inputs_[1]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y, a, b);
        const auto part = element_portion(worker, walk.size());
        const Steps steps{walk.step(1), walk.step(2), walk.step(0)};
        const auto a_size = static_cast<std::int64_t>(size_of(a.dtype));
        const auto b_size = static_cast<std::int64_t>(size_of(b.dtype));
        const auto y_size = static_cast<std::int64_t>(size_of(y.dtype));
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            loop_(a.data + at[1] * a_size, b.data + at[2] * b_size, y.data + at[0] * y_size, steps, n);
        });
    }

  private:
    Loop loop_ = nullptr;
};

// Combines one input after the other in a buffer, which is written once all of them have been read.
class Variadic final : public StridedOperation {
  public:
    explicit Variadic(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, blueprint.inputs.empty() ? 1 : blueprint.inputs.size(), blueprint.inputs.size());
        const Operand &y = outputs_[0];
        require_dtype(blueprint, "the output", y, {DType::f32, DType::i64, DType::i32});
        for (const Operand &input : inputs_) {
            require_broadcast(blueprint, "an input", input, y);
            require_same_dtype(blueprint, "an input", input, y);
        }
        bool predicate = false;
        loop_ = loops_of(kVariadic, blueprint.kind, predicate)->of(y.dtype);
    }

    void run(const Worker &worker) const override {
        switch (size_of(outputs_[0].dtype)) {
            case 8:
                return combine<std::int64_t>(worker);
            default:
                return combine<std::int32_t>(worker);
        }
    }

  private:
    // `Bits` are as wide as the elements.
    template <class Bits>
    void combine(const Worker &worker) const {
        constexpr std::int64_t kBlock = 256;
        alignas(64) std::array<Bits, kBlock> buffer;
        auto *buffered = reinterpret_cast<std::byte *>(buffer.data());
        const Tensor y = worker.resolve(outputs_[0]);
        const auto part = element_portion(worker, y.size());
        for (std::int64_t begin = part.begin; begin < part.end; begin += kBlock) {
            const std::int64_t end = std::min(begin + kBlock, part.end);
            for (std::size_t k = 0; k < inputs_.size(); ++k) {
                const Tensor x = worker.resolve(inputs_[k]);
                const auto walk = broadcast(y, x);
                const std::int64_t step = walk.step(1);
                std::int64_t done = 0;
                walk.over(begin, end, [&](const auto &at, std::int64_t n) {
                    Bits *out = buffer.data() + done;
                    if (k == 0)
                        for (std::int64_t i = 0; i < n; ++i)
                            std::memcpy(out + i, element<Bits>(x, at[1] + i * step), sizeof(Bits));
                    else
                        loop_(buffered + done * sizeof(Bits), x.data + at[1] * static_cast<std::int64_t>(sizeof(Bits)),
                              buffered + done * sizeof(Bits), {1, step, 1}, n);
                    done += n;
                });
            }
            std::int64_t done = 0;
            const auto walk = broadcast(y);
            walk.over(begin, end, [&](const auto &at, std::int64_t n) {
                for (std::int64_t i = 0; i < n; ++i)
                    std::memcpy(element<Bits>(y, at[0] + i * walk.step(0)), buffer.data() + done + i, sizeof(Bits));
                done += n;
            });
        }
    }

    Loop loop_ = nullptr;
};

class Where final : public StridedOperation {
  public:
    explicit Where(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 3, 3);
        require_dtype(blueprint, "the condition", inputs_[0], {DType::boolean});
        for (const Operand &input : inputs_) require_broadcast(blueprint, "an input", input, outputs_[0]);
        require_same_dtype(blueprint, "input 1", inputs_[1], outputs_[0]);
        require_same_dtype(blueprint, "input 2", inputs_[2], outputs_[0]);
    }

    void run(const Worker &worker) const override {
        switch (size_of(outputs_[0].dtype)) {
            case 8:
                return choose<std::uint64_t>(worker);
            case 4:
                return choose<std::uint32_t>(worker);
            case 2:
                return choose<std::uint16_t>(worker);
            default:
                return choose<std::uint8_t>(worker);
        }
    }

  private:
    // Both values are read whatever the condition is, so that the loop has no branch.
    template <class Bits, class Yes, class No>
    static void pick(Bits *out, const std::uint8_t *chosen, std::int64_t n, Yes yes, No no) {
        INFERENCEX_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) {
            const Bits a = yes(i);
            const Bits b = no(i);
            out[i] = chosen[i] ? a : b;
        }
    }

    template <class Bits>
    void choose(const Worker &worker) const {
        const Tensor condition = worker.resolve(inputs_[0]);
        const Tensor a = worker.resolve(inputs_[1]);
        const Tensor b = worker.resolve(inputs_[2]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y, condition, a, b);
        const auto part = element_portion(worker, walk.size());
        const std::int64_t steps[4] = {walk.step(0), walk.step(1), walk.step(2), walk.step(3)};
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            Bits *out = element<Bits>(y, at[0]);
            const auto *chosen = element<std::uint8_t>(condition, at[1]);
            const Bits *yes = element<Bits>(a, at[2]);
            const Bits *no = element<Bits>(b, at[3]);
            if (steps[1] == 0) {  // one condition for the whole run
                const Bits *source = *chosen ? yes : no;
                const std::int64_t step = *chosen ? steps[2] : steps[3];
                for (std::int64_t i = 0; i < n; ++i) out[i * steps[0]] = source[i * step];
            } else if (steps[0] == 1 && steps[1] == 1 && steps[2] == 1 && steps[3] == 1) {
                pick(out, chosen, n, [=](std::int64_t i) { return yes[i]; }, [=](std::int64_t i) { return no[i]; });
            } else if (steps[0] == 1 && steps[1] == 1 && steps[2] == 0 && steps[3] == 1) {
                pick(out, chosen, n, [v = *yes](std::int64_t) { return v; }, [=](std::int64_t i) { return no[i]; });
            } else if (steps[0] == 1 && steps[1] == 1 && steps[2] == 1 && steps[3] == 0) {
                pick(out, chosen, n, [=](std::int64_t i) { return yes[i]; }, [v = *no](std::int64_t) { return v; });
            } else {
                for (std::int64_t i = 0; i < n; ++i)
                    out[i * steps[0]] = chosen[i * steps[1]] ? yes[i * steps[2]] : no[i * steps[3]];
            }
        });
    }
};

template <class T>
std::unique_ptr<Operation> make(const Blueprint &blueprint) {
    return std::make_unique<T>(blueprint);
}

std::unique_ptr<Operation> make_variadic(const Blueprint &blueprint) {
    return blueprint.inputs.size() == 2 ? make<Binary>(blueprint) : make<Variadic>(blueprint);
}

}  // namespace

void add_binary(Registry &registry) {
    for (const Function &function : kBinary) registry.add(function.kind, make<Binary>);
    for (const Function &function : kVariadic) registry.add(function.kind, make_variadic);
    registry.add("Pow", make<Binary>);
    registry.add("Where", make<Where>);
}

}  // namespace inferencex::cpu
