// Weights that kernels do not read as they are stored: expanded, some rows at a time, while they are packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../kernels/rows.h"

namespace inferencex::cpu {

// How a stored weight is expanded first.
enum class Expansion : std::uint8_t {
    none,
    stream,  // of integers of 3, 5 or 6 bits, values and zero points, to 4 bits or to INT8
    e2m1x2,  // FLOAT4E2M1, two to a byte, to INT8 of twice their values
};

// Bits of a format whose integers are stored as a stream, else 0.
inline std::int64_t stream_bits_of(const std::string &format) {
    return format == "int3" ? 3 : format == "int5" ? 5 : format == "int6" ? 6 : 0;
}

// Bytes of a stream of `count` integers.
inline std::int64_t stream_bytes(std::int64_t count, std::int64_t bits) { return (count * bits + 7) / 8; }

// Element `i` of a stream of integers of up to 8 bits (the dialect's UnpackBits). `bytes` are all the stream has.
inline int stream_at(const std::uint8_t *stream, std::int64_t i, std::int64_t bits, bool is_signed,
                     std::int64_t bytes) {
    const std::int64_t bit = bits * i, at = bit / 8;
    const unsigned high = at + 1 < bytes ? stream[at + 1] : 0U;
    const int value = static_cast<int>((stream[at] | high << 8) >> (bit % 8) & ((1U << bits) - 1));
    return is_signed && value >> (bits - 1) != 0 ? value - (1 << bits) : value;
}

// Twice the numbers that the codes of FLOAT4E2M1 stand for.
inline constexpr std::int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline void put_nibble(std::vector<std::uint8_t> &to, std::int64_t i, int value) {
    to[i / 2] = static_cast<std::uint8_t>(to[i / 2] | (value & 15) << (i % 2 * 4));
}

// Rows `rows[0..count)` of [all rows, columns] integers of a stream, as rows 0..count of 4-bit ones if they have less
// bits, else of INT8. All keep their value.
inline void expand_stream(const RowKernels &kernels, const std::uint8_t *stream, std::int64_t elements,
                          std::int64_t bits, const std::int32_t *rows, std::int64_t count, std::int64_t columns,
                          bool is_signed, std::vector<std::uint8_t> &to) {
    const bool nibbles = bits < 4;
    to.assign(nibbles ? (count * columns + 1) / 2 : count * columns, 0);
    const std::int64_t bytes = stream_bytes(elements, bits);
    for (std::int64_t r = 0; r < count; ++r) {
        const std::int64_t first = rows[r] * columns;
        std::int64_t c = 0;
        if (!nibbles && first % 8 == 0) {
            const std::int64_t at = first / 8 * bits;
            c = kernels.spread_stream(stream + at, bytes - at, static_cast<int>(bits), is_signed, columns,
                                      to.data() + r * columns);
        }
        for (; c < columns; ++c) {
            const int value = stream_at(stream, first + c, bits, is_signed, bytes);
            if (nibbles) put_nibble(to, r * columns + c, value);
            else to[r * columns + c] = static_cast<std::uint8_t>(value);
        }
    }
}

// `expand_stream` for FLOAT4E2M1, as bytes.
inline void expand_e2m1(const std::uint8_t *packed, const std::int32_t *rows, std::int64_t count, std::int64_t columns,
                        std::vector<std::uint8_t> &to) {
    to.resize(count * columns);
    for (std::int64_t r = 0; r < count; ++r)
        for (std::int64_t c = 0; c < columns; ++c) {
            const std::int64_t i = rows[r] * columns + c;
            to[r * columns + c] = static_cast<std::uint8_t>(kDoubledE2m1[packed[i / 2] >> (i % 2 * 4) & 15]);
        }
}

}  // namespace inferencex::cpu
