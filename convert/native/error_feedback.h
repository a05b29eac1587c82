// Rounding of weights one input channel after another, each error made good by the channels that come later.
//
// For integers that minimize e G e^T over a row, e = w - dequantized and G the Gram matrix of the inputs, G is written
// as V D V^T with V unit upper triangular in the order in which the channels are visited. Then
//   e G e^T = sum_j D_j (e_j + sum_{i<j} V_ij e_i)^2,
// and channel j is rounded at w_j + sum_{i<j} V_ij e_i. These are GPTQ's numbers (arXiv 2210.17323), reached without
// an inverse (QuIP, arXiv 2307.13304, shows that the two are the same). `descend` then visits the channels again, each
// rounded at the minimum of e G e^T with all others as they are, and moves the scale of each group to its minimum in
// the same way; no step makes the error larger.
//
// Rows are independent. They are taken in tiles of fixed size, sums run in a fixed order, and products are not
// contracted into fused multiply-adds: the result depends neither on the threads nor on the instruction set.
#pragma once

#include <cstdint>

namespace inferencex::quantize {

constexpr int64_t kFeedbackRows = 64;   // rows to a tile of weights
constexpr int64_t kFactorColumns = 64;  // channels eliminated at a time
constexpr int64_t kUpdateRows = 32;     // rows that one call of `update` changes at most

// Row-major [channels, channels]; row j of the factor holds V_ij for i < j, then D_j; the rest is undefined.
struct Factorization {
    float *matrix;
    int64_t channels;
};

struct FeedbackOptions {
    int64_t rows;
    int64_t channels;
    int64_t group_size;  // at most `channels`
    float lowest;        // smallest and largest integer
    float highest;
};

struct FeedbackData {
    const float *weights;      // [rows, channels]
    const float *matrix;       // [channels, channels]: the factor in visiting order, or the Gram matrix in its own
    const int64_t *order;      // [channels] channel visited at each step of `round`
    float *scales;             // [rows, groups]; changed by `descend` only
    const float *zero_points;  // [rows, groups]
    float *integers;           // [rows, channels]; read by `descend`
    double *errors;            // [rows] sum of e_j^2 over the row
};

// Floats of scratch memory, aligned to 64 bytes, that `round` and `descend` need.
static inline int64_t feedback_scratch_floats(const FeedbackOptions &options) {
    return (2 * options.channels + options.group_size) * kFeedbackRows;
}

struct DescentOptions {
    float ridge;  // added to the diagonal of the Gram matrix
    int sweeps;
    bool half_scales;      // scales are rounded to float16
    float smallest_scale;  // limits that scales stay within
    float largest_scale;
};

// `eliminate` finishes rows [begin, end) of the factor, the largest indices first, and returns false where a pivot is
// not above `tolerance`. `update` then subtracts them from rows [first, last) above; those may be shared by threads.
// The others work on a tile: rows [first, last), at most kFeedbackRows. `quadratic` measures e G e^T of each row.
struct FeedbackKernels {
    bool (*eliminate)(const Factorization &, int64_t begin, int64_t end, float tolerance);
    void (*update)(const Factorization &, int64_t begin, int64_t end, int64_t first, int64_t last);
    void (*round)(const FeedbackOptions &, const FeedbackData &, int64_t first, int64_t last, float *scratch);
    void (*descend)(const FeedbackOptions &, const FeedbackData &, const DescentOptions &, int64_t first, int64_t last,
                    float *scratch);
    void (*quadratic)(const float *errors, const float *gram, int64_t channels, double *result, int64_t first,
                      int64_t last, float *scratch);
};

extern const FeedbackKernels feedback_baseline;
#if defined(__x86_64__)
extern const FeedbackKernels feedback_avx2;
extern const FeedbackKernels feedback_avx512;
#endif

}  // namespace inferencex::quantize
