// Folding a sequence of elements in an order that depends on nothing but their number: element i goes to lane i % 16,
// and the lanes are folded in halves at the end.
#pragma once

#include <array>
#include <cstdint>

namespace inferencex::cpu {

// `Fold` has the element type, `T map(T)` of an element, and `T merge(T, T)`.
template <class T, class Fold>
class Lanes {
  public:
    Lanes(const Fold &fold, T identity) : fold_(fold) { lanes_.fill(identity); }

    void add(const T *x, std::int64_t step, std::int64_t n) {
        std::int64_t i = 0;
        if (step == 1 && next_ == 0)
            for (; i + kLanes <= n; i += kLanes)
                for (int lane = 0; lane < kLanes; ++lane)
                    lanes_[lane] = fold_.merge(lanes_[lane], fold_.map(x[i + lane]));
        for (; i < n; ++i) {
            lanes_[next_] = fold_.merge(lanes_[next_], fold_.map(x[i * step]));
            next_ = (next_ + 1) % kLanes;
        }
    }

    T result() {
        for (int width = kLanes / 2; width; width /= 2)
            for (int lane = 0; lane < width; ++lane) lanes_[lane] = fold_.merge(lanes_[lane], lanes_[lane + width]);
        return lanes_[0];
    }

  private:
    static constexpr int kLanes = 16;

    Fold fold_;
    int next_ = 0;
    alignas(64) std::array<T, kLanes> lanes_;
};

}  // namespace inferencex::cpu
