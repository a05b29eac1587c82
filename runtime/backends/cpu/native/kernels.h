// The kernels that differ by instruction set: one table for each, filled by the translation units of kernels/.
//
// Every function computes a row's values by the same operations in the same order however many rows it is given and
// wherever the row lies: results do not depend on the batch.
#pragma once

#include <cstddef>

#include "kernels/attention.h"
#include "kernels/float_linear.h"
#include "kernels/integer_linear.h"
#include "kernels/limits.h"
#include "kernels/rows.h"

namespace inferencex::cpu {

struct Kernels {
    const char *isa;  // "avx512_bf16", "avx512_vnni", "avx2", "neon", "baseline"
    AttentionKernels attention;
    IntegerLinearKernels integer_linear;
    FloatLinearKernels float_linear;
    RowKernels rows;
    LimitKernels limits;
};

// The fastest that this machine runs, or the one that the environment variable INFERENCEX_ISA names. Throws
// std::invalid_argument, saying which there are, when that name is unknown or the machine lacks it.
const Kernels &choose_kernels();
// Every table that this machine runs, fastest first.
const Kernels *const *available_kernels(std::size_t &count);

}  // namespace inferencex::cpu
