// Shapes that depend on the step, operands of operations, and what they resolve to while a step runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace inferencex::cpu {

inline constexpr int kMaxRank = 6;

enum class DType : std::uint8_t { f32, f16, bf16, f8e4m3, i64, i32, i8, u8, boolean };

constexpr std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::f16:
        case DType::bf16:
            return 2;
        default:
            return 1;
    }
}

// What a step decides: T new tokens in all, R rows whose logits are wanted.
enum class Symbol : std::uint8_t { none, tokens, rows };

// A dimension, stride or size: `coefficient`, times T or R where a symbol says so.
struct Extent {
    std::int64_t coefficient = 1;
    Symbol symbol = Symbol::none;

    std::int64_t at(std::int64_t tokens, std::int64_t rows) const {
        return symbol == Symbol::none ? coefficient : coefficient * (symbol == Symbol::tokens ? tokens : rows);
    }
};

// Where an operand's elements lie: a region of the arena, or memory that outlives the program (constants, weights).
struct Operand {
    bool present = false;
    DType dtype = DType::f32;
    int rank = 0;
    std::array<Extent, kMaxRank> dims{};
    std::array<Extent, kMaxRank> strides{};  // in elements
    std::byte *constant = nullptr;           // null: the arena
    std::size_t offset = 0;                  // bytes from the constant's or the arena's start
    std::size_t constant_bytes = 0;          // from `offset` to the end of a constant array's last element
};

// An operand during a step. `strides` are in elements; a broadcast dimension has stride 0.
struct Tensor {
    std::byte *data = nullptr;
    DType dtype = DType::f32;
    int rank = 0;
    std::array<std::int64_t, kMaxRank> dims{};
    std::array<std::int64_t, kMaxRank> strides{};

    std::int64_t size() const {
        std::int64_t n = 1;
        for (int i = 0; i < rank; ++i) n *= dims[i];
        return n;
    }
    template <class T>
    T *as() const {
        return reinterpret_cast<T *>(data);
    }
};

}  // namespace inferencex::cpu
