// Loops that do nothing but reach an instruction set's limits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferencex::cpu {

struct LimitKernels {
    // Runs `iterations` rounds of INT8 dot products from registers; returns how many multiplications and additions.
    double (*dot_products)(std::int64_t iterations);
    // Reads `bytes` (a multiple of 256) and returns something that depends on them.
    std::int32_t (*read)(const std::byte *data, std::size_t bytes);
};

}  // namespace inferencex::cpu
