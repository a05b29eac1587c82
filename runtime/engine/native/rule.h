// How one sequence's tokens are chosen: its sampling parameters, and the tokens it has so far.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace inferencex::sampler {

struct Parameters {
    bool is_greedy;
    double temperature;
    int64_t top_k;  // not positive: all tokens
    double top_p;
    double min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    int64_t min_tokens;
    std::vector<int64_t> stop_ids;  // masked before `min_tokens`
    std::vector<std::pair<int64_t, float>> biases;
};

class Rule {
  public:
    // `prompt_ids` count for the repetition penalty. Throws std::out_of_range for an id that is negative, and
    // std::invalid_argument for a temperature near 0 without `is_greedy`.
    Rule(Parameters parameters, const std::vector<int64_t> &prompt_ids);

    const Parameters &parameters() const { return parameters_; }

    // Counts a token that was appended to the output.
    void record(int64_t token_id);

    // Tells whether `adjust` changes anything.
    bool adjusts() const;

    // Applies penalties, biases and the minimum length. Throws std::out_of_range for ids at or past `size`.
    void adjust(float *scores, int64_t size) const;

  private:
    bool penalizes() const;

    Parameters parameters_;
    std::unordered_map<int64_t, int64_t> counts_;  // in the output; the prompt's tokens are there too, from 0
    int64_t num_tokens_ = 0;
    int64_t largest_id_ = 0;
};

}  // namespace inferencex::sampler
