// Copying elements between strided views.
#pragma once

#include <cstddef>
#include <cstdint>

#include "strided.h"

namespace inferencex::cpu {

// n elements from x to y, so many elements apart.
using CopyLoop = void (*)(const std::byte *x, std::int64_t x_step, std::byte *y, std::int64_t y_step, std::int64_t n);
CopyLoop copy_loop(std::size_t element_bytes);

// Run `loop` over a part of a walk of y and x.
inline void copy_run(const Walk<2> &walk, Worker::Range part, const Tensor &x, const Tensor &y, CopyLoop loop) {
    const auto x_size = static_cast<std::int64_t>(size_of(x.dtype));
    const auto y_size = static_cast<std::int64_t>(size_of(y.dtype));
    walk.over(part.begin, part.end, [&](const Walk<2>::Offsets &at, std::int64_t n) {
        loop(x.data + at[1] * x_size, walk.step(1), y.data + at[0] * y_size, walk.step(0), n);
    });
}

}  // namespace inferencex::cpu
