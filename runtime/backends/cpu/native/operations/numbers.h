// Arithmetic as ONNX means it, without undefined behaviour for any operand: integers wrap around, what has no result
// (division by 0) is 0, and NaN propagates.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace inferencex::cpu::numbers {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
T add(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a + b;
    else return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
}
template <class T>
T subtract(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a - b;
    else return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
}
template <class T>
T multiply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a * b;
    else return static_cast<T>(static_cast<Unsigned<T>>(a) * static_cast<Unsigned<T>>(b));
}
template <class T>
T negative(T a) {
    if constexpr (std::is_floating_point_v<T>) return -a;
    else return subtract(T{0}, a);
}
// Integers round toward zero.
template <class T>
T divide(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a / b;
    else return b == 0 ? T{0} : b == -1 ? negative(a) : static_cast<T>(a / b);
}
template <class T>
T absolute(T a) {
    if constexpr (std::is_floating_point_v<T>) return std::fabs(a);
    else return a < 0 ? negative(a) : a;
}
template <class T>
T sign(T a) {
    if (a != a) return a;
    return static_cast<T>((a > T{0}) - (a < T{0}));
}
template <class T>
T maximum(T a, T b) {
    return a > b || a != a ? a : b;
}
template <class T>
T minimum(T a, T b) {
    return a < b || a != a ? a : b;
}
// What is left has the sign of the dividend.
template <class T>
T remainder_like_c(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return std::fmod(a, b);
    else return b == 0 || b == -1 ? T{0} : static_cast<T>(a % b);
}
// What is left has the sign of the divisor.
template <class T>
T remainder_like_python(T a, T b) {
    const T left = remainder_like_c(a, b);
    return left != 0 && (left < 0) != (b < 0) ? add(left, b) : left;
}

inline float power(float base, float exponent) {
    // Squares and cubes are far more frequent than all other powers.
    if (exponent == 2.0F) return base * base;
    if (exponent == 3.0F) return base * base * base;
    return std::pow(base, exponent);
}
// Integers to a negative power are truncated: 0, but for bases 1 and -1.
template <class T>
T power(T base, T exponent) {
    if (exponent < 0) return base == 1 ? T{1} : base == -1 ? (exponent % 2 ? T{-1} : T{1}) : T{0};
    T result = 1;
    for (; exponent; exponent >>= 1, base = multiply(base, base))
        if (exponent & 1) result = multiply(result, base);
    return result;
}

// Truncates; out of range takes the nearest value there is, NaN is 0.
template <class T>
T to_integer(double value) {
    static_assert(std::is_integral_v<T>);
    if (value != value) return 0;
    // The upper limit of 64 bits is not a double: 2^63 is the first that is out of range.
    constexpr double kPast = -2.0 * static_cast<double>(std::numeric_limits<T>::min() / 2);
    if constexpr (std::is_signed_v<T>) {
        if (value >= kPast) return std::numeric_limits<T>::max();
    } else {
        if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
    }
    if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
    return static_cast<T>(value);
}

}  // namespace inferencex::cpu::numbers
