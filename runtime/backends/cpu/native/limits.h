// What this machine can do at best, measured: the limits that profiles and benchmarks are set against.
#pragma once

#include <cstddef>

namespace inferencex::cpu {

// Multiplications and additions of INT8 dot products a second, `threads` together, with the instructions that the
// integer kernels use. Takes about 50 ms.
double measure_integer_peak(int threads);
// Bytes read from memory a second, `threads` together, over `bytes` each. Takes about 0.2 s.
double measure_bandwidth(int threads, std::size_t bytes);

}  // namespace inferencex::cpu
