// Passes over one row of scores, in blocks: the largest of each block, and sums of softmax weights.
#pragma once

#include <cstdint>

namespace inferencex::sampler {

constexpr int64_t kBlock = 256;  // so large that what is done once a block costs little

inline int64_t block_count(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Writes the largest of each `block` entries and tells whether all entries are finite. NaN is larger than nothing.
bool block_peaks(const float *scores, int64_t size, int64_t block, float *peaks);

// Makes the scores of tokens minus infinity whose bit (`id % 32` of word `id / 32`) is 0, and tells whether any is 1.
bool mask_scores(float *scores, int64_t size, const uint32_t *mask);

// A score's weight is exp((score - peak) / temperature), in double precision, relative error below 1e-14. Exponents
// below -700 count as -700: such a weight changes no sum that the peak's weight of 1 is part of.
struct Softmax {
    float peak;
    double inverse_temperature;
};

double weight(const Softmax &softmax, float score);
double sum_of_weights(const Softmax &softmax, const float *scores, int64_t count);
// In single precision: the sum over a row that holds the peak is off by 1e-5 of itself at most.
double rough_sum_of_weights(const Softmax &softmax, const float *scores, int64_t count);
void weights(const Softmax &softmax, const float *scores, int64_t count, double *weights);

}  // namespace inferencex::sampler
