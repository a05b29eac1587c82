#include "rule.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace inferencex::sampler {
namespace {

constexpr double kLowestTemperature = 1e-30;  // its inverse is a float32

int64_t checked_id(int64_t token_id) {
    if (token_id < 0) throw std::out_of_range("token id " + std::to_string(token_id) + " is negative");
    return token_id;
}

}  // namespace

Rule::Rule(Parameters parameters, const std::vector<int64_t> &prompt_ids) : parameters_(std::move(parameters)) {
    if (!parameters_.is_greedy && !(parameters_.temperature >= kLowestTemperature))
        throw std::invalid_argument("a temperature this low is greedy");
    for (const int64_t id : parameters_.stop_ids) largest_id_ = std::max(largest_id_, checked_id(id));
    for (const auto &[id, bias] : parameters_.biases) largest_id_ = std::max(largest_id_, checked_id(id));
    if (parameters_.repetition_penalty == 1.0f) return;
    for (const int64_t id : prompt_ids) {
        largest_id_ = std::max(largest_id_, checked_id(id));
        counts_.try_emplace(id, 0);
    }
}

void Rule::record(int64_t token_id) {
    ++num_tokens_;
    if (!penalizes()) return;
    largest_id_ = std::max(largest_id_, checked_id(token_id));
    ++counts_[token_id];
}

bool Rule::penalizes() const {
    return parameters_.repetition_penalty != 1.0f || parameters_.presence_penalty != 0.0f ||
           parameters_.frequency_penalty != 0.0f;
}

bool Rule::adjusts() const {
    return penalizes() || !parameters_.biases.empty() || num_tokens_ < parameters_.min_tokens;
}

void Rule::adjust(float *scores, int64_t size) const {
    if (largest_id_ >= size)
        throw std::out_of_range("token id " + std::to_string(largest_id_) + " is not in the vocabulary of " +
                                std::to_string(size));
    const float penalty = parameters_.repetition_penalty;
    for (const auto &[id, count] : counts_) {
        float &score = scores[id];
        if (penalty != 1.0f) score = score > 0.0f ? score / penalty : score * penalty;
        if (count > 0)
            score -= parameters_.presence_penalty + parameters_.frequency_penalty * static_cast<float>(count);
    }
    for (const auto &[id, bias] : parameters_.biases) scores[id] += bias;
    if (num_tokens_ < parameters_.min_tokens)
        for (const int64_t id : parameters_.stop_ids) scores[id] = -std::numeric_limits<float>::infinity();
}

}  // namespace inferencex::sampler
