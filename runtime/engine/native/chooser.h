// Chooses tokens from rows of logits without sorting the vocabulary.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "heaviest_first.h"
#include "rule.h"
#include "scores.h"

namespace inferencex::sampler {

// Answers that are no token ids.
constexpr int64_t kNotFinite = -1;       // the logits hold NaN or infinity
constexpr int64_t kUndecided = -2;       // rounding errors could change the choice, so exact arithmetic is needed
constexpr int64_t kNothingAllowed = -3;  // the mask has no bit of any token

// Holds the scratch memory that a choice takes; one for each thread.
//
// Weights are summed in whatever order and precision is fast. That cannot change a choice: each decision that falls
// within the errors of the sums involved is made again with better ones, or left undecided in the end, and for all
// others any sum gives the same token.
class Chooser {
  public:
    // Returns the next token for logits [size], or one of the answers above. Without a rule it is the largest, the
    // first one on a tie. `uniform` is in [0, 1) and used by rules that are not greedy. Tokens without their bit in
    // `mask`, of size / 32 words rounded up, are never chosen; nullptr allows all. Throws std::out_of_range when the
    // rule names a token past `size`.
    int64_t choose(const float *logits, int64_t size, const Rule *rule, double uniform, const uint32_t *mask);

  private:
    struct Total {
        double value;
        double unsure;  // bound on its error, and on that of a running total on the way there
    };
    enum class Sums { rough, fine };

    int64_t largest(const float *scores, int64_t size) const;
    int64_t draw(const float *scores, int64_t size, float peak, const Parameters &parameters, double uniform);
    int64_t draw_from_all(const Softmax &softmax, const float *scores, int64_t size, double uniform, Sums precision);
    int64_t draw_from_nucleus(const Softmax &softmax, const float *scores, int64_t size, const Parameters &parameters,
                              double uniform);
    std::optional<double> nucleus_mass(double top_p, const Total &total);
    int64_t draw_from_kept(double uniform) const;
    Total sum_blocks(const Softmax &softmax, const float *scores, int64_t size, Sums precision);

    void keep_largest(const Softmax &softmax, const float *scores, int64_t size, int64_t count);
    void keep_at_least(const Softmax &softmax, const float *scores, int64_t size, float cut);
    bool cut_nucleus(double top_p);
    bool drop_light(double min_p);

    void weigh(const Softmax &softmax, const float *scores);

    std::vector<float> peaks_;     // of the blocks
    std::vector<double> sums_;     // of the blocks' weights
    std::vector<float> adjusted_;  // logits after penalties and mask
    std::vector<uint64_t> keys_;   // the score's rank in the high half, the token id in the low half
    HeaviestFirst heaviest_first_;

    // The tokens that are kept, in the order in which they share [0, 1), their scores and weights.
    std::vector<int64_t> ids_;
    std::vector<float> kept_scores_;
    std::vector<double> weights_;
};

}  // namespace inferencex::sampler
