// Tensors of indices, i64 or i32; negative ones count from the end.
#pragma once

#include <cstdint>

#include "../operation.h"
#include "blueprint_checks.h"
#include "strided.h"

namespace inferencex::cpu {

// The index at an offset of a tensor of i64 or i32, made positive; -1 when it is out of range.
inline std::int64_t index_at(const Tensor &indices, std::int64_t offset, std::int64_t size) {
    const std::int64_t index =
        indices.dtype == DType::i64 ? *element<std::int64_t>(indices, offset) : *element<std::int32_t>(indices, offset);
    if (index < -size || index >= size) return -1;
    return index < 0 ? index + size : index;
}

inline void require_indices(const Blueprint &blueprint, const Operand &indices) {
    checks::require_dtype(blueprint, "the indices", indices, {DType::i64, DType::i32});
}

// Whether a dimension is at most another one in every step.
inline bool within(const Extent &part, const Extent &whole) {
    return checks::same(part, whole) || part.coefficient == 0 ||
           (part.symbol == whole.symbol && part.coefficient <= whole.coefficient);
}

}  // namespace inferencex::cpu
