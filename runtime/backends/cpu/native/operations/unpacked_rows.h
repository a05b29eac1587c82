// Weights that kernels do not read as they are stored: expanded, some rows at a time, while they are packed.
#pragma once

#include <cstdint>
#include <vector>

namespace inferencex::cpu {

// How a stored weight is expanded first.
enum class Expansion : std::uint8_t {
    none,
    int3,    // a stream of 3-bit integers, values and zero points, to 4 bits
    e2m1x2,  // FLOAT4E2M1, two to a byte, to INT8 of twice their values
};

// Element `i` of a stream of 3-bit integers (the dialect's UnpackBits). `bytes` are all the stream has.
inline int int3_at(const std::uint8_t *stream, std::int64_t i, std::int64_t bytes) {
    const std::int64_t bit = 3 * i, at = bit / 8;
    const unsigned high = at + 1 < bytes ? stream[at + 1] : 0U;
    return static_cast<int>((stream[at] | high << 8) >> (bit % 8) & 7U);
}

// Twice the numbers that the codes of FLOAT4E2M1 stand for.
inline constexpr std::int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline void put_nibble(std::vector<std::uint8_t> &to, std::int64_t i, int value) {
    to[i / 2] = static_cast<std::uint8_t>(to[i / 2] | (value & 15) << (i % 2 * 4));
}

// Rows `rows[0..count)` of [all rows, columns] 3-bit integers, as rows 0..count of 4-bit ones. Signed ones keep their
// value.
inline void expand_int3(const std::uint8_t *stream, std::int64_t elements, const std::int32_t *rows, std::int64_t count,
                        std::int64_t columns, bool is_signed, std::vector<std::uint8_t> &to) {
    to.assign((count * columns + 1) / 2, 0);
    const std::int64_t bytes = (elements * 3 + 7) / 8;
    for (std::int64_t r = 0; r < count; ++r)
        for (std::int64_t c = 0; c < columns; ++c) {
            const int value = int3_at(stream, rows[r] * columns + c, bytes);
            put_nibble(to, r * columns + c, is_signed && value > 3 ? value - 8 : value);
        }
}

// The same for FLOAT4E2M1, as bytes.
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
