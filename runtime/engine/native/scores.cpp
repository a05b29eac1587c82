#include "scores.h"

#include <bit>
#include <limits>

// The loader picks the widest copy that the processor runs; elsewhere the compiler's own target is the only one. It
// does so before ThreadSanitizer's library can be called, which the picking function would do.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

namespace inferencex::sampler {
namespace {

// exp(x) for x <= 0: 2^n times the Taylor polynomial of exp(r), where |r| <= log(2) / 2.
[[gnu::always_inline]] inline double exponential(double x) {
    constexpr double kLog2E = 1.4426950408889634, kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
    constexpr double kShift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    x = x < -700.0 ? -700.0 : x;
    const double shifted = x * kLog2E + kShift;
    const double n = shifted - kShift;
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return std::bit_cast<double>(std::bit_cast<uint64_t>(p) + (std::bit_cast<uint64_t>(shifted) << 52));
}

[[gnu::always_inline]] inline double weight_of(const Softmax &softmax, float score) {
    return exponential(static_cast<double>(score - softmax.peak) * softmax.inverse_temperature);
}

[[gnu::always_inline]] inline float rough_exponential(float x) {
    constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f, kShift = 0x1.8p23f;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * kLog2E + kShift;
    const float n = shifted - kShift;
    const float r = (x - n * kLn2High) - n * kLn2Low;
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
}

}  // namespace

FOR_EACH_WIDTH bool block_peaks(const float *scores, int64_t size, int64_t block, float *peaks) {
    constexpr uint32_t kExponent = 0x7f800000;
    uint32_t num_bad = 0;
    for (int64_t begin = 0; begin < size; begin += block) {
        const int64_t end = begin + block < size ? begin + block : size;
        float peak = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : peak) reduction(+ : num_bad)
        for (int64_t i = begin; i < end; ++i) {
            peak = scores[i] > peak ? scores[i] : peak;
            num_bad += (std::bit_cast<uint32_t>(scores[i]) & kExponent) == kExponent;
        }
        *peaks++ = peak;
    }
    return num_bad == 0;
}

FOR_EACH_WIDTH bool mask_scores(float *scores, int64_t size, const uint32_t *mask) {
    constexpr float kMasked = -std::numeric_limits<float>::infinity();
    uint32_t any = 0;
    for (int64_t begin = 0; begin < size; begin += 32) {
        uint32_t word = *mask++;
        const int64_t count = size - begin < 32 ? size - begin : 32;
        if (count < 32) word &= (uint32_t{1} << count) - 1;
        any |= word;
        if (word == 0xffffffff) continue;
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) scores[begin + i] = word >> i & 1 ? scores[begin + i] : kMasked;
    }
    return any != 0;
}

double weight(const Softmax &softmax, float score) { return weight_of(softmax, score); }

FOR_EACH_WIDTH double sum_of_weights(const Softmax &softmax, const float *scores, int64_t count) {
    const Softmax constants = softmax;
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += weight_of(constants, scores[i]);
    return sum;
}

FOR_EACH_WIDTH double rough_sum_of_weights(const Softmax &softmax, const float *scores, int64_t count) {
    const float peak = softmax.peak, scale = static_cast<float>(softmax.inverse_temperature);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += rough_exponential((scores[i] - peak) * scale);
    return sum;
}

FOR_EACH_WIDTH void weights(const Softmax &softmax, const float *scores, int64_t count, double *weights) {
    const Softmax constants = softmax;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) weights[i] = weight_of(constants, scores[i]);
}

}  // namespace inferencex::sampler
