// Quantization of rows of weights in groups, with a search for each group's range.
//
// A group of weights w becomes integers q with w ~= (q - z) * s. The search measures the squared error
// sum_k h_k (w_k - (q_k - z) s)^2 for a grid of ranges inside the group's own, with s already rounded to the type it
// is stored in, and then refits s to the integers of the best one by least squares. It starts from the full range and
// moves only to smaller errors. h is the importance of an input channel. Where none is given it is w^2 + mean(w^2):
// the plain squared error would clip the few large weights for the sake of the many small ones, which costs a language
// model more than it gains.
//
// The same source is compiled for several instruction sets. All give the same bits: sums run over 16 lanes in a fixed
// order, and products are not contracted into fused multiply-adds.
#pragma once

#include <cstdint>

namespace inferencex::quantize {

enum class Element { float32, float16, bfloat16 };

// Rows of `channels` weights, each cut into groups of `group_size`; the last group of a row may be shorter.
struct Weights {
    const void *data;
    Element element;
    int64_t rows;
    int64_t channels;
    int64_t group_size;
};

// Static, so that no copy of it compiled for one instruction set can be linked in place of another's.
static inline int64_t group_count(const Weights &weights) {
    return (weights.channels + weights.group_size - 1) / weights.group_size;
}

struct Options {
    int bits;          // 3, 4, 5, 6 or 8
    bool symmetric;    // no zero point
    bool half_scales;  // scales are rounded to float16; the caller knows that they fit
    bool search;       // otherwise the full range
};

enum class FloatNumber { e4m3, e2m1 };
enum class ScaleKind { float32, float16, e4m3, power_of_two };

struct FloatOptions {
    FloatNumber number;
    ScaleKind scales;    // how they are stored; the caller knows that the full range's fit
    float tensor_scale;  // a power of two; scales are multiples of it for ScaleKind::e4m3
    bool search;         // otherwise the full range
};

struct Output {
    uint8_t *values;       // row-major, zeroed by the caller: 4 bits an element that has 4, else 8
    float *scales;         // [rows, groups]
    uint8_t *zero_points;  // of integers, one a group, like the values; unused when symmetric
    double *errors;        // [rows] squared error, importance not counted
    double *norms;         // [rows] squared norm of the weights
};

struct Scan {
    float smallest_scale;  // of the full ranges of groups that are not zero
    float largest_scale;
    int64_t first_bad;  // element that is not finite, or -1
};

// Floats of scratch memory, aligned to 64 bytes, that one call of a kernel below needs.
static inline int64_t scratch_floats(const Weights &weights) { return 3 * ((weights.group_size + 15) / 16 * 16) + 16; }

// Kernels work on rows [begin, end). With 4 bits, begin must be even, so that no two calls share a byte of output.
// `importance` is float [matrices, channels], each for `rows / matrices` consecutive rows, or null.
struct Kernels {
    Scan (*scan)(const Weights &, const Options &, int64_t begin, int64_t end, float *scratch);
    void (*quantize)(const Weights &, const Options &, const float *importance, int64_t matrices, const Output &,
                     int64_t begin, int64_t end, float *scratch);
    void (*quantize_to_floats)(const Weights &, const FloatOptions &, const float *importance, int64_t matrices,
                               const Output &, int64_t begin, int64_t end, float *scratch);
};

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace inferencex::quantize
