// Python's door to rounding with error feedback: checks shapes, releases the GIL, shares the work among threads.
#include "error_feedback.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace nb = nanobind;

namespace inferencex::quantize {
namespace {

using ConstMatrix = nb::ndarray<nb::numpy, const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Order = nb::ndarray<nb::numpy, const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowArray = nb::ndarray<nb::numpy, double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct InstructionSet {
    const char *name;
    const FeedbackKernels *kernels;
    bool (*supported)();
};

const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512", &feedback_avx512, [] { return bool(__builtin_cpu_supports("avx512f")); }},
    {"avx2", &feedback_avx2, [] { return bool(__builtin_cpu_supports("avx2")); }},
#endif
    {"baseline", &feedback_baseline, [] { return true; }},
};

const FeedbackKernels &kernels_for(const std::string &name) {
    for (const InstructionSet &set : kInstructionSets)
        if ((name.empty() || name == set.name) && set.supported()) return *set.kernels;
    throw std::invalid_argument("this processor does not run the instruction set '" + name + "'");
}

void require(bool condition, const char *message) {
    if (!condition) throw std::invalid_argument(message);
}

struct FreeScratch {
    void operator()(float *scratch) const { std::free(scratch); }
};
using Scratch = std::unique_ptr<float, FreeScratch>;

Scratch make_scratch(int64_t floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    Scratch scratch(static_cast<float *>(std::aligned_alloc(64, std::max<size_t>(bytes, 64))));
    if (!scratch) throw std::bad_alloc();
    return scratch;
}

// Runs `work(first, last, scratch)` over pieces of [0, count) on up to `threads` threads.
void for_pieces(int64_t count, int64_t piece, int threads, int64_t scratch_floats,
                const std::function<void(int64_t, int64_t, float *)> &work) {
    const int64_t pieces = (count + piece - 1) / piece;
    const int64_t workers = std::clamp<int64_t>(threads, 1, std::max<int64_t>(pieces, 1));
    std::vector<Scratch> scratch;
    for (int64_t t = 0; t < workers; ++t) scratch.push_back(make_scratch(scratch_floats));
    std::atomic<int64_t> next{0};
    const auto run = [&](float *buffer) {
        for (int64_t i = next++; i < pieces; i = next++) work(i * piece, std::min((i + 1) * piece, count), buffer);
    };
    std::vector<std::jthread> others;
    for (int64_t t = 1; t < workers; ++t) others.emplace_back(run, scratch[static_cast<size_t>(t)].get());
    run(scratch[0].get());
}

void check_order(const Order &order, int64_t channels) {
    require(static_cast<int64_t>(order.shape(0)) == channels, "the order needs one entry for each channel");
    std::vector<bool> seen(static_cast<size_t>(channels));
    for (int64_t j = 0; j < channels; ++j) {
        const int64_t channel = order.data()[j];
        require(channel >= 0 && channel < channels && !seen[static_cast<size_t>(channel)],
                "the order is not a permutation of the channels");
        seen[static_cast<size_t>(channel)] = true;
    }
}

bool factorize(const ConstMatrix &gram, const Order &order, float ridge, float tolerance, Matrix &factor, int threads,
               const std::string &instruction_set) {
    const auto channels = static_cast<int64_t>(gram.shape(0));
    require(gram.shape(1) == gram.shape(0), "a Gram matrix is square");
    require(factor.shape(0) == gram.shape(0) && factor.shape(1) == gram.shape(0), "the factor has the wrong shape");
    check_order(order, channels);
    const FeedbackKernels &kernels = kernels_for(instruction_set);
    const Factorization target{factor.data(), channels};
    const int64_t *visited = order.data();
    const float *source = gram.data();
    nb::gil_scoped_release release;
    for_pieces(channels, kUpdateRows, threads, 0, [&](int64_t first, int64_t last, float *) {
        for (int64_t j = first; j < last; ++j) {
            for (int64_t i = 0; i <= j; ++i)
                target.matrix[j * channels + i] = source[visited[j] * channels + visited[i]];
            target.matrix[j * channels + j] += ridge;
        }
    });
    for (int64_t end = channels; end > 0;) {
        const int64_t begin = std::max<int64_t>(end - kFactorColumns, 0);
        if (!kernels.eliminate(target, begin, end, tolerance)) return false;
        for_pieces(begin, kUpdateRows, threads, 0,
                   [&](int64_t first, int64_t last, float *) { kernels.update(target, begin, end, first, last); });
        end = begin;
    }
    return true;
}

struct Checked {
    FeedbackOptions options;
    FeedbackData data;
};

Checked checked(const ConstMatrix &weights, const ConstMatrix &matrix, const Order *order, const Matrix &scales,
                const ConstMatrix &zero_points, int64_t group_size, float lowest, float highest, Matrix &integers,
                RowArray &errors) {
    const auto rows = static_cast<int64_t>(weights.shape(0)), channels = static_cast<int64_t>(weights.shape(1));
    require(group_size >= 1 && group_size <= channels, "the group size must be positive and at most the channels");
    require(lowest < highest && std::abs(lowest) < 0x1p20f && std::abs(highest) < 0x1p20f, "bad limits of integers");
    const auto groups = static_cast<size_t>((channels + group_size - 1) / group_size);
    require(matrix.shape(0) == weights.shape(1) && matrix.shape(1) == weights.shape(1),
            "the matrix and the weights differ in their channels");
    if (order != nullptr) check_order(*order, channels);
    require(scales.shape(0) == weights.shape(0) && scales.shape(1) == groups, "scales have the wrong shape");
    require(zero_points.shape(0) == weights.shape(0) && zero_points.shape(1) == groups,
            "zero points have the wrong shape");
    require(integers.shape(0) == weights.shape(0) && integers.shape(1) == weights.shape(1),
            "integers have the wrong shape");
    require(errors.shape(0) == weights.shape(0), "errors need one entry for each row");
    return {{rows, channels, group_size, lowest, highest},
            {weights.data(), matrix.data(), order == nullptr ? nullptr : order->data(), scales.data(),
             zero_points.data(), integers.data(), errors.data()}};
}

void round(const ConstMatrix &weights, const ConstMatrix &factor, const Order &order, Matrix &scales,
           const ConstMatrix &zero_points, int64_t group_size, float lowest, float highest, Matrix &integers,
           RowArray &errors, int threads, const std::string &instruction_set) {
    const Checked call =
        checked(weights, factor, &order, scales, zero_points, group_size, lowest, highest, integers, errors);
    const FeedbackKernels &kernels = kernels_for(instruction_set);
    nb::gil_scoped_release release;
    for_pieces(call.options.rows, kFeedbackRows, threads, feedback_scratch_floats(call.options),
               [&](int64_t first, int64_t last, float *scratch) {
                   kernels.round(call.options, call.data, first, last, scratch);
               });
}

void descend(const ConstMatrix &weights, const ConstMatrix &gram, Matrix &scales, const ConstMatrix &zero_points,
             int64_t group_size, float lowest, float highest, float ridge, int sweeps, bool half_scales,
             float smallest_scale, float largest_scale, Matrix &integers, RowArray &errors, int threads,
             const std::string &instruction_set) {
    const Checked call =
        checked(weights, gram, nullptr, scales, zero_points, group_size, lowest, highest, integers, errors);
    require(ridge > 0.0f, "the ridge must be positive");
    const DescentOptions descent{ridge, sweeps, half_scales, smallest_scale, largest_scale};
    const FeedbackKernels &kernels = kernels_for(instruction_set);
    nb::gil_scoped_release release;
    for_pieces(call.options.rows, kFeedbackRows, threads, feedback_scratch_floats(call.options),
               [&](int64_t first, int64_t last, float *scratch) {
                   kernels.descend(call.options, call.data, descent, first, last, scratch);
               });
}

void quadratic(const ConstMatrix &errors, const ConstMatrix &gram, RowArray &result, int threads,
               const std::string &instruction_set) {
    const auto rows = static_cast<int64_t>(errors.shape(0)), channels = static_cast<int64_t>(errors.shape(1));
    require(gram.shape(0) == errors.shape(1) && gram.shape(1) == errors.shape(1),
            "the Gram matrix and the errors differ in their channels");
    require(result.shape(0) == errors.shape(0), "the result needs one entry for each row");
    const FeedbackKernels &kernels = kernels_for(instruction_set);
    nb::gil_scoped_release release;
    for_pieces(rows, kFeedbackRows, threads, channels * kFeedbackRows,
               [&](int64_t first, int64_t last, float *scratch) {
                   kernels.quadratic(errors.data(), gram.data(), channels, result.data(), first, last, scratch);
               });
}

nb::list instruction_sets() {
    nb::list names;
    for (const InstructionSet &set : kInstructionSets)
        if (set.supported()) names.append(set.name);
    return names;
}

}  // namespace
}  // namespace inferencex::quantize

NB_MODULE(_error_feedback, module) {
    namespace q = inferencex::quantize;
    using namespace nb::literals;
    module.def("factorize", &q::factorize, "gram"_a, "order"_a, "ridge"_a, "tolerance"_a, "factor"_a, "threads"_a,
               "instruction_set"_a = "");
    module.def("round", &q::round, "weights"_a, "factor"_a, "order"_a, "scales"_a, "zero_points"_a, "group_size"_a,
               "lowest"_a, "highest"_a, "integers"_a, "errors"_a, "threads"_a, "instruction_set"_a = "");
    module.def("descend", &q::descend, "weights"_a, "gram"_a, "scales"_a, "zero_points"_a, "group_size"_a, "lowest"_a,
               "highest"_a, "ridge"_a, "sweeps"_a, "half_scales"_a, "smallest_scale"_a, "largest_scale"_a, "integers"_a,
               "errors"_a, "threads"_a, "instruction_set"_a = "");
    module.def("quadratic", &q::quadratic, "errors"_a, "gram"_a, "result"_a, "threads"_a, "instruction_set"_a = "");
    module.def("instruction_sets", &q::instruction_sets);
}
