// Cast (x) -> y, CastLike (x, target?) -> y: conversion to the output's type.
//
// Floats become integers by truncation; what is out of range takes the nearest integer there is, NaN is 0. Integers
// wrap around. Rounding to float16 and bfloat16 is to nearest, ties to even. Booleans are 0 and 1; what is not 0 is
// true.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../half.h"
#include "../operation.h"
#include "arrangement.h"
#include "blueprint_checks.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

// Stored types by the value that one element is converted through.
struct Float32 {
    using Stored = float;
    static float value(float x) { return x; }
};
struct Float16 {
    using Stored = std::uint16_t;
    static float value(std::uint16_t x) { return from_f16(x); }
};
struct BFloat16 {
    using Stored = std::uint16_t;
    static float value(std::uint16_t x) { return from_bf16(x); }
};
template <class T>
struct Integer {
    using Stored = T;
    static T value(T x) { return x; }
};
struct Boolean {
    using Stored = std::uint8_t;
    static std::uint8_t value(std::uint8_t x) { return x != 0; }
};

template <class To, class V>
typename To::Stored converted(V value) {
    if constexpr (std::is_same_v<To, Float32>) return static_cast<float>(value);
    else if constexpr (std::is_same_v<To, Float16>) return to_f16(static_cast<float>(value));
    else if constexpr (std::is_same_v<To, BFloat16>) return to_bf16(static_cast<float>(value));
    else if constexpr (std::is_same_v<To, Boolean>) return value != V{0};
    else if constexpr (std::is_floating_point_v<V>) return numbers::to_integer<typename To::Stored>(value);
    else return static_cast<typename To::Stored>(value);
}

template <class From, class To>
void convert(const std::byte *x_bytes, std::int64_t x_step, std::byte *y_bytes, std::int64_t y_step, std::int64_t n) {
    const auto *x = reinterpret_cast<const typename From::Stored *>(x_bytes);
    auto *y = reinterpret_cast<typename To::Stored *>(y_bytes);
    if (x_step == 1 && y_step == 1)
        for (std::int64_t i = 0; i < n; ++i) y[i] = converted<To>(From::value(x[i]));
    else
        for (std::int64_t i = 0; i < n; ++i) y[i * y_step] = converted<To>(From::value(x[i * x_step]));
}

template <class From>
CopyLoop loop_to(DType to) {
    switch (to) {
        case DType::f32:
            return convert<From, Float32>;
        case DType::f16:
            return convert<From, Float16>;
        case DType::bf16:
            return convert<From, BFloat16>;
        case DType::i64:
            return convert<From, Integer<std::int64_t>>;
        case DType::i32:
            return convert<From, Integer<std::int32_t>>;
        case DType::i8:
            return convert<From, Integer<std::int8_t>>;
        case DType::u8:
            return convert<From, Integer<std::uint8_t>>;
        case DType::boolean:
            return convert<From, Boolean>;
        default:
            return nullptr;
    }
}

CopyLoop loop_between(DType from, DType to) {
    if (from == to) return copy_loop(size_of(from));
    switch (from) {
        case DType::f32:
            return loop_to<Float32>(to);
        case DType::f16:
            return loop_to<Float16>(to);
        case DType::bf16:
            return loop_to<BFloat16>(to);
        case DType::i64:
            return loop_to<Integer<std::int64_t>>(to);
        case DType::i32:
            return loop_to<Integer<std::int32_t>>(to);
        case DType::i8:
            return loop_to<Integer<std::int8_t>>(to);
        case DType::u8:
            return loop_to<Integer<std::uint8_t>>(to);
        case DType::boolean:
            return loop_to<Boolean>(to);
        default:
            return nullptr;
    }
}

class Cast final : public StridedOperation {
  public:
    explicit Cast(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 2);
        require_broadcast(blueprint, "the input", inputs_[0], outputs_[0]);
        loop_ = loop_between(inputs_[0].dtype, outputs_[0].dtype);
        if (!loop_)
            refuse(blueprint, "there is no conversion from " + describe(inputs_[0]) + " to " + describe(outputs_[0]));
        inputs_.resize(1);
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y, x);
        const auto part = element_portion(worker, walk.size());
        copy_run(walk, part, x, y, loop_);
    }

  private:
    CopyLoop loop_ = nullptr;
};

std::unique_ptr<Operation> make_cast(const Blueprint &blueprint) { return std::make_unique<Cast>(blueprint); }

}  // namespace

void add_cast(Registry &registry) {
    registry.add("Cast", make_cast);
    registry.add("CastLike", make_cast);
}

}  // namespace inferencex::cpu
