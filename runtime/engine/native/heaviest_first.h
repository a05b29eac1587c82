// Tokens in the order of their weights, sorted only where somebody looks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "scores.h"

namespace inferencex::sampler {

// What one token takes of the running total over tokens, heaviest first and the first token first on a tie.
struct Share {
    int64_t id;
    double end;  // the running total, this token included
};

class HeaviestFirst {
  public:
    // Takes the tokens `ids`, with their scores and weights; the scores are at most the softmax's peak.
    void assign(const Softmax &softmax, const std::vector<int64_t> &ids, const std::vector<float> &scores,
                const std::vector<double> &weights);

    // Returns the first token whose running total is above `target`; nothing when `target` is at most `unsure` away
    // from a border between two tokens.
    std::optional<Share> find(double target, double unsure);

  private:
    struct Bin {
        double mass = 0.0;
        size_t begin = 0;
        size_t end = 0;
    };

    Softmax from_distance_;
    std::vector<Bin> bins_;  // of tokens whose distance from the peak is similar, the nearest first
    std::vector<uint32_t> bin_of_;
    std::vector<uint64_t> keys_;  // bin by bin: the distance from the peak in the high half, the token in the low half
};

}  // namespace inferencex::sampler
