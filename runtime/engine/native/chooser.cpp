#include "chooser.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace inferencex::sampler {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Bounds on relative errors: of a weight (here and in another implementation together), and of a sum for each term.
constexpr double kWeightError = 4e-14;
constexpr double kSumError = 0x1p-51;
constexpr double kRoughError = 1e-5;
// Of the peak's weight: so little, for each token, is less than the error that is allowed for.
constexpr double kNegligible = 0x1p-53;
// Distances of float32 scores that differ at all differ by 2^-24 of themselves. For exponents above this one that is
// more than the weights' error, so heavier tokens are known to be heavier.
constexpr double kSmallestExponent = 1e-6;
// Peaks of groups this small tell a good lower bound on the n-th largest score while n is at most their number.
constexpr int64_t kGroup = 16;

double doubt(double total, size_t terms) { return total * (kWeightError + kSumError * static_cast<double>(terms)); }

// Orders floats from the largest to the smallest; both zeros are one value.
uint32_t descending(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
    return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

// A lower bound on the scores of at least this weight.
float score_of_weight(const Softmax &softmax, double weight) {
    const double score = softmax.peak + std::log(weight) / softmax.inverse_temperature;
    if (!(score > std::numeric_limits<float>::lowest())) return -kInfinity;
    return std::nextafter(static_cast<float>(score), -kInfinity);
}

}  // namespace

int64_t Chooser::choose(const float *logits, int64_t size, const Rule *rule, double uniform, const uint32_t *mask) {
    peaks_.resize(static_cast<size_t>(block_count(size, kBlock)));
    if (!block_peaks(logits, size, kBlock, peaks_.data())) return kNotFinite;
    const float *scores = logits;
    const bool adjusts = rule && rule->adjusts();
    if (adjusts || mask) {
        adjusted_.assign(logits, logits + size);
        if (adjusts) rule->adjust(adjusted_.data(), size);
        if (mask && !mask_scores(adjusted_.data(), size, mask)) return kNothingAllowed;
        scores = adjusted_.data();
        block_peaks(scores, size, kBlock, peaks_.data());
    }
    const float peak = *std::max_element(peaks_.begin(), peaks_.end());
    // A peak that is not finite means that all tokens are masked, or one is beyond all others.
    if (rule && !rule->parameters().is_greedy && std::isfinite(peak))
        return draw(scores, size, peak, rule->parameters(), uniform);
    if (mask && peak == -kInfinity) {  // what the mask allows the rule forbids: the mask counts
        adjusted_.assign(logits, logits + size);
        mask_scores(adjusted_.data(), size, mask);
        block_peaks(scores, size, kBlock, peaks_.data());
    }
    return largest(scores, size);
}

// Returns the first of the largest scores, whose blocks' peaks are known.
int64_t Chooser::largest(const float *scores, int64_t size) const {
    const auto highest = std::max_element(peaks_.begin(), peaks_.end());
    const int64_t block = highest - peaks_.begin();
    return std::find(scores + block * kBlock, scores + std::min((block + 1) * kBlock, size), *highest) - scores;
}

int64_t Chooser::draw(const float *scores, int64_t size, float peak, const Parameters &parameters, double uniform) {
    const Softmax softmax{peak, 1.0 / parameters.temperature};
    if (parameters.top_k > 0 && parameters.top_k < size) {
        keep_largest(softmax, scores, size, parameters.top_k);
        if (parameters.top_p < 1.0 && !cut_nucleus(parameters.top_p)) return kUndecided;
    } else if (parameters.top_p < 1.0) {
        return draw_from_nucleus(softmax, scores, size, parameters, uniform);
    } else if (parameters.min_p > 0.0) {
        keep_at_least(softmax, scores, size, score_of_weight(softmax, 0.5 * parameters.min_p));
    } else {
        const int64_t token = draw_from_all(softmax, scores, size, uniform, Sums::rough);
        return token == kUndecided ? draw_from_all(softmax, scores, size, uniform, Sums::fine) : token;
    }
    if (parameters.min_p > 0.0 && !drop_light(parameters.min_p)) return kUndecided;
    return draw_from_kept(uniform);
}

// Sums the weights of each block. Blocks too light to matter count as nothing.
Chooser::Total Chooser::sum_blocks(const Softmax &softmax, const float *scores, int64_t size, Sums precision) {
    const auto sum = precision == Sums::rough ? rough_sum_of_weights : sum_of_weights;
    const float negligible = score_of_weight(softmax, kNegligible);
    sums_.resize(peaks_.size());
    double total = 0.0;
    for (int64_t block = 0; block < block_count(size, kBlock); ++block) {
        const auto index = static_cast<size_t>(block);
        const int64_t begin = block * kBlock;
        sums_[index] =
            peaks_[index] < negligible ? 0.0 : sum(softmax, scores + begin, std::min(begin + kBlock, size) - begin);
        total += sums_[index];
    }
    const double rough = precision == Sums::rough ? kRoughError * total : 0.0;
    return {total, doubt(total, static_cast<size_t>(size)) + rough};
}

int64_t Chooser::draw_from_all(const Softmax &softmax, const float *scores, int64_t size, double uniform,
                               Sums precision) {
    const auto [total, unsure] = sum_blocks(softmax, scores, size, precision);
    const double target = uniform * total;
    double cumulative = 0.0;
    int64_t block = 0;
    while (block < block_count(size, kBlock) && cumulative + sums_[static_cast<size_t>(block)] <= target)
        cumulative += sums_[static_cast<size_t>(block++)];
    if (block == block_count(size, kBlock) || (block > 0 && target - cumulative <= unsure)) return kUndecided;
    for (int64_t id = block * kBlock; id < std::min((block + 1) * kBlock, size); ++id) {
        cumulative += weight(softmax, scores[id]);
        if (std::abs(cumulative - target) <= unsure) return kUndecided;
        if (cumulative > target) return id;
    }
    return kUndecided;
}

// Draws from the fewest tokens, heaviest first, whose weights reach `top_p` of the total and are at least `min_p`.
int64_t Chooser::draw_from_nucleus(const Softmax &softmax, const float *scores, int64_t size,
                                   const Parameters &parameters, double uniform) {
    Total total = sum_blocks(softmax, scores, size, Sums::rough);
    // All tokens below this weight together are less than what may be left out. Half of it allows for errors.
    const double left_out = (1.0 - parameters.top_p) * total.value / static_cast<double>(size);
    keep_at_least(softmax, scores, size, score_of_weight(softmax, 0.5 * std::max(left_out, parameters.min_p)));
    for (const float score : kept_scores_) {
        const double exponent = static_cast<double>(softmax.peak - score) * softmax.inverse_temperature;
        if (exponent > 0.0 && exponent < kSmallestExponent) return kUndecided;
    }
    if (parameters.min_p > 0.0 && !drop_light(parameters.min_p)) return kUndecided;
    heaviest_first_.assign(softmax, ids_, kept_scores_, weights_);
    std::optional<double> mass = nucleus_mass(parameters.top_p, total);
    if (!mass) {
        total = sum_blocks(softmax, scores, size, Sums::fine);
        mass = nucleus_mass(parameters.top_p, total);
    }
    if (!mass) return kUndecided;
    const auto drawn = heaviest_first_.find(uniform * *mass, doubt(total.value, static_cast<size_t>(size)));
    return drawn ? drawn->id : kUndecided;
}

// Returns the weight of the tokens in `heaviest_first_` that reach `top_p` of the total, or of all if none do; nothing
// when errors could change which these are.
std::optional<double> Chooser::nucleus_mass(double top_p, const Total &total) {
    const double wanted = top_p * total.value, kept = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    if (std::abs(kept - wanted) <= total.unsure) return std::nullopt;
    if (kept < wanted) return kept;
    const std::optional<Share> last = heaviest_first_.find(wanted, total.unsure);
    return last ? std::optional(last->end) : std::nullopt;
}

int64_t Chooser::draw_from_kept(double uniform) const {
    const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    const double target = uniform * total, unsure = doubt(total, weights_.size());
    double cumulative = 0.0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        cumulative += weights_[i];
        if (std::abs(cumulative - target) <= unsure) return kUndecided;
        if (cumulative > target) return ids_[i];
    }
    return kUndecided;
}

// Keeps the scores that are at least `cut`, in the order of the tokens.
void Chooser::keep_at_least(const Softmax &softmax, const float *scores, int64_t size, float cut) {
    ids_.resize(static_cast<size_t>(size));
    size_t count = 0;
    for (int64_t block = 0; block < block_count(size, kBlock); ++block) {
        if (peaks_[static_cast<size_t>(block)] < cut) continue;
        for (int64_t id = block * kBlock; id < std::min((block + 1) * kBlock, size); ++id) {
            ids_[count] = id;
            count += scores[id] >= cut;
        }
    }
    ids_.resize(count);
    weigh(softmax, scores);
}

// Keeps the `count` largest scores, the largest first and the first token first on a tie.
void Chooser::keep_largest(const Softmax &softmax, const float *scores, int64_t size, int64_t count) {
    // Each of the groups with the `count` largest peaks has an entry that is at least the smallest of these peaks.
    float cut = -kInfinity;
    const int64_t group = count <= block_count(size, kBlock) ? kBlock : kGroup;
    if (count <= block_count(size, group)) {
        kept_scores_.resize(static_cast<size_t>(block_count(size, group)));
        block_peaks(scores, size, group, kept_scores_.data());
        const auto last = kept_scores_.begin() + (count - 1);
        std::nth_element(kept_scores_.begin(), last, kept_scores_.end(), std::greater<>());
        cut = *last;
    }
    keep_at_least(softmax, scores, size, cut);
    keys_.clear();
    for (const int64_t id : ids_) keys_.push_back(uint64_t{descending(scores[id])} << 32 | static_cast<uint64_t>(id));
    std::nth_element(keys_.begin(), keys_.begin() + (count - 1), keys_.end());
    keys_.resize(static_cast<size_t>(count));
    std::sort(keys_.begin(), keys_.end());
    ids_.clear();
    for (const uint64_t key : keys_) ids_.push_back(static_cast<int64_t>(key & 0xffffffff));
    weigh(softmax, scores);
}

// Looks up the scores of the tokens that are kept, and their weights.
void Chooser::weigh(const Softmax &softmax, const float *scores) {
    kept_scores_.clear();
    for (const int64_t id : ids_) kept_scores_.push_back(scores[id]);
    weights_.resize(ids_.size());
    weights(softmax, kept_scores_.data(), static_cast<int64_t>(ids_.size()), weights_.data());
}

// Keeps the fewest tokens, of those kept already, whose weights reach `top_p` of their total; false when rounding
// errors could change which these are.
bool Chooser::cut_nucleus(double top_p) {
    const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    const double wanted = top_p * total, unsure = doubt(total, weights_.size());
    double cumulative = 0.0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        cumulative += weights_[i];
        if (std::abs(cumulative - wanted) <= unsure) return false;
        if (cumulative > wanted) {
            ids_.resize(i + 1);
            kept_scores_.resize(i + 1);
            weights_.resize(i + 1);
            return true;
        }
    }
    return false;
}

// Drops tokens lighter than `min_p`; false when rounding errors could change which these are.
bool Chooser::drop_light(double min_p) {
    size_t count = 0;
    for (size_t i = 0; i < weights_.size(); ++i) {
        if (weights_[i] != 1.0 && std::abs(weights_[i] - min_p) <= kWeightError * min_p) return false;
        if (weights_[i] < min_p) continue;
        ids_[count] = ids_[i];
        kept_scores_[count] = kept_scores_[i];
        weights_[count++] = weights_[i];
    }
    ids_.resize(count);
    kept_scores_.resize(count);
    weights_.resize(count);
    return true;
}

}  // namespace inferencex::sampler
