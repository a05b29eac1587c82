// Dimensions that a reduction keeps, and where they are in its output.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "../operation.h"
#include "blueprint_checks.h"
#include "strided.h"

namespace inferencex::cpu {

class KeptDimensions {
  public:
    KeptDimensions() = default;
    // Reduced dimensions of x are missing from y, or are 1 there. Throws BlueprintError where y has another shape.
    KeptDimensions(const Blueprint &blueprint, const Operand &x, const std::vector<std::int64_t> &axes,
                   const Operand &y) {
        std::array<bool, kMaxRank> reduced{};
        for (std::int64_t axis : axes) {
            if (axis < 0 || axis >= x.rank || reduced[axis])
                checks::refuse(blueprint, "the axis " + std::to_string(axis) + " is no dimension of " +
                                              checks::describe(x) + ", or named twice");
            reduced[axis] = true;
        }
        const int kept = x.rank - static_cast<int>(axes.size());
        bool fits = y.rank == x.rank || y.rank == kept;
        int next = 0;
        for (int d = 0; fits && d < x.rank; ++d) {
            place_[d] = reduced[d] ? -1 : y.rank == x.rank ? d : next++;
            fits =
                reduced[d] ? y.rank == kept || checks::is_one(y.dims[d]) : checks::same(x.dims[d], y.dims[place_[d]]);
        }
        if (!fits)
            checks::refuse(blueprint, "the output is " + checks::describe(y) + ", not what is left of " +
                                          checks::describe(x) + " without " + std::to_string(axes.size()) +
                                          " dimensions");
        last_is_reduced_ = x.rank > 0 && reduced[x.rank - 1];
    }

    bool last_is_reduced() const { return last_is_reduced_; }
    // What is kept, of x and y.
    Walk<2> kept(const Tensor &x, const Tensor &y) const {
        Walk<2> walk;
        for (int d = 0; d < x.rank; ++d)
            if (place_[d] >= 0) walk.extend(x.dims[d], {x.strides[d], y.strides[place_[d]]});
        return walk;
    }
    // What is reduced to one element, of x.
    Walk<1> reduced(const Tensor &x) const {
        Walk<1> walk;
        for (int d = 0; d < x.rank; ++d)
            if (place_[d] < 0) walk.extend(x.dims[d], {x.strides[d]});
        return walk;
    }

  private:
    std::array<int, kMaxRank> place_{};
    bool last_is_reduced_ = false;
};

}  // namespace inferencex::cpu
