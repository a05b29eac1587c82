#include "heaviest_first.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace inferencex::sampler {
namespace {

constexpr size_t kTokensPerBin = 32;
constexpr size_t kMaxBins = 1024;

float distance(uint64_t key) { return std::bit_cast<float>(static_cast<uint32_t>(key >> 32)); }

}  // namespace

void HeaviestFirst::assign(const Softmax &softmax, const std::vector<int64_t> &ids, const std::vector<float> &scores,
                           const std::vector<double> &weights) {
    from_distance_ = {0.0f, softmax.inverse_temperature};
    const size_t count = ids.size(), num_bins = std::clamp<size_t>(count / kTokensPerBin, 1, kMaxBins);
    float farthest = 0.0f;
    for (const float score : scores) farthest = std::max(farthest, softmax.peak - score);
    // Without a scale all tokens are in one bin, which is slow and right, too.
    const double scale = farthest > 0.0f && std::isfinite(farthest) ? static_cast<double>(num_bins) / farthest : 0.0;
    bins_.assign(num_bins, {});
    bin_of_.assign(count, 0);
    for (size_t i = 0; i < count; ++i) {
        if (scale > 0.0) {
            const double place = static_cast<double>(softmax.peak - scores[i]) * scale;
            bin_of_[i] = static_cast<uint32_t>(std::min(place, static_cast<double>(num_bins - 1)));
        }
        bins_[bin_of_[i]].mass += weights[i];
        ++bins_[bin_of_[i]].end;
    }
    size_t begin = 0;
    for (Bin &bin : bins_) {
        const size_t size = bin.end;
        bin.begin = bin.end = begin;
        begin += size;
    }
    keys_.resize(count);
    for (size_t i = 0; i < count; ++i) {
        // Adding zero makes a difference of -0 a 0, whose bits come first.
        const auto order = std::bit_cast<uint32_t>(softmax.peak - scores[i] + 0.0F);
        keys_[bins_[bin_of_[i]].end++] = uint64_t{order} << 32 | static_cast<uint64_t>(ids[i]);
    }
}

std::optional<Share> HeaviestFirst::find(double target, double unsure) {
    double cumulative = 0.0;
    size_t index = 0;
    while (index < bins_.size() && cumulative + bins_[index].mass <= target) cumulative += bins_[index++].mass;
    if (index == bins_.size() || (cumulative > 0.0 && target - cumulative <= unsure)) return std::nullopt;
    const auto begin = keys_.begin() + static_cast<std::ptrdiff_t>(bins_[index].begin);
    const auto end = keys_.begin() + static_cast<std::ptrdiff_t>(bins_[index].end);
    std::sort(begin, end);
    for (auto key = begin; key != end; ++key) {
        cumulative += weight(from_distance_, -distance(*key));
        if (std::abs(cumulative - target) <= unsure) return std::nullopt;
        if (cumulative > target) return Share{static_cast<int64_t>(*key & 0xffffffff), cumulative};
    }
    return std::nullopt;
}

}  // namespace inferencex::sampler
