// Python's door to the quantization kernels: checks shapes, releases the GIL, shares the rows among threads.
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

#include "range_search.h"

namespace nb = nanobind;

namespace inferencex::quantize {
namespace {

using WeightArray = nb::ndarray<nb::numpy, nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ImportanceArray = nb::ndarray<nb::numpy, const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ByteArray = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ScaleArray = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RowArray = nb::ndarray<nb::numpy, double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Even, so that rows of an odd number of nibbles never share a byte between blocks.
constexpr int64_t kRowsPerBlock = 16;

struct InstructionSet {
    const char *name;
    const Kernels *kernels;
    bool (*supported)();
};

const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512", &kernels_avx512, [] { return bool(__builtin_cpu_supports("avx512f")); }},
    {"avx2", &kernels_avx2, [] { return bool(__builtin_cpu_supports("avx2")); }},
#endif
    {"baseline", &kernels_baseline, [] { return true; }},
};

const Kernels &kernels_for(const std::string &name) {
    for (const InstructionSet &set : kInstructionSets)
        if ((name.empty() || name == set.name) && set.supported()) return *set.kernels;
    throw std::invalid_argument("this processor does not run the instruction set '" + name + "'");
}

struct FreeScratch {
    void operator()(float *scratch) const { std::free(scratch); }
};
using Scratch = std::unique_ptr<float, FreeScratch>;

Scratch make_scratch(const Weights &weights) {
    const size_t bytes = (static_cast<size_t>(scratch_floats(weights)) * sizeof(float) + 63) / 64 * 64;
    Scratch scratch(static_cast<float *>(std::aligned_alloc(64, bytes)));
    if (!scratch) throw std::bad_alloc();
    return scratch;
}

// Runs `work(first block's row, end, scratch)` over blocks of rows on up to `threads` threads. What a block computes
// does not depend on the thread that takes it.
void for_blocks(const Weights &weights, int threads, const std::function<void(int64_t, int64_t, float *)> &work) {
    const int64_t blocks = (weights.rows + kRowsPerBlock - 1) / kRowsPerBlock;
    const int64_t count = std::clamp<int64_t>(threads, 1, std::max<int64_t>(blocks, 1));
    std::vector<Scratch> scratch;
    for (int64_t t = 0; t < count; ++t) scratch.push_back(make_scratch(weights));
    std::atomic<int64_t> next{0};
    const auto run = [&](float *buffer) {
        for (int64_t block = next++; block < blocks; block = next++) {
            const int64_t begin = block * kRowsPerBlock;
            work(begin, std::min(begin + kRowsPerBlock, weights.rows), buffer);
        }
    };
    std::vector<std::jthread> workers;
    for (int64_t t = 1; t < count; ++t) workers.emplace_back(run, scratch[static_cast<size_t>(t)].get());
    run(scratch[0].get());
}

Weights checked_weights(const WeightArray &array, const std::string &element, int64_t group_size) {
    Weights weights{array.data(), Element::float32, static_cast<int64_t>(array.shape(0)),
                    static_cast<int64_t>(array.shape(1)), group_size};
    if (element == "float16") weights.element = Element::float16;
    else if (element == "bfloat16") weights.element = Element::bfloat16;
    else if (element != "float32") throw std::invalid_argument("unknown element type " + element);
    const bool is_float = array.dtype() == nb::dtype<float>(), is_word = array.dtype() == nb::dtype<uint16_t>();
    if (weights.element == Element::float32 ? !is_float : !is_word)
        throw std::invalid_argument("the weights' elements are not " + element);
    if (group_size < 1) throw std::invalid_argument("the group size must be positive");
    // A group larger than a row would only make the scratch memory larger.
    weights.group_size = std::min(group_size, std::max<int64_t>(weights.channels, 1));
    return weights;
}

void check_bits(int bits) {
    if ((bits < 3 || bits > 6) && bits != 8) throw std::invalid_argument("only 3, 4, 5, 6 and 8 bits are supported");
}

Scan scan(const WeightArray &array, const std::string &element, int64_t group_size, int bits, bool symmetric,
          int threads, const std::string &instruction_set) {
    const Weights weights = checked_weights(array, element, group_size);
    check_bits(bits);
    const Options options{bits, symmetric, false, false};
    const Kernels &kernels = kernels_for(instruction_set);
    const int64_t blocks = (weights.rows + kRowsPerBlock - 1) / kRowsPerBlock;
    std::vector<Scan> results(static_cast<size_t>(blocks));
    nb::gil_scoped_release release;
    for_blocks(weights, threads, [&](int64_t begin, int64_t end, float *scratch) {
        results[static_cast<size_t>(begin / kRowsPerBlock)] = kernels.scan(weights, options, begin, end, scratch);
    });
    Scan total{0x1.fffffep127f, 0.0f, -1};
    for (const Scan &result : results) {
        total.smallest_scale = std::min(total.smallest_scale, result.smallest_scale);
        total.largest_scale = std::max(total.largest_scale, result.largest_scale);
        if (total.first_bad < 0) total.first_bad = result.first_bad;
    }
    return total;
}

void require(bool condition, const char *message) {
    if (!condition) throw std::invalid_argument(message);
}

void quantize(const WeightArray &array, const std::string &element, int64_t group_size, int bits, bool symmetric,
              bool half_scales, bool search, const ImportanceArray &importance, ByteArray &values, ScaleArray &scales,
              ByteArray &zero_points, RowArray &errors, RowArray &norms, int threads,
              const std::string &instruction_set) {
    const Weights weights = checked_weights(array, element, group_size);
    check_bits(bits);
    const Options options{bits, symmetric, half_scales, search};
    const int64_t groups = group_count(weights), matrices = static_cast<int64_t>(importance.shape(0));
    const auto bytes = [bits](int64_t count) { return static_cast<size_t>(bits == 4 ? (count + 1) / 2 : count); };
    const auto rows = static_cast<size_t>(weights.rows);
    require(values.shape(0) == bytes(weights.rows * weights.channels), "values have the wrong size");
    require(scales.shape(0) == rows && scales.shape(1) == static_cast<size_t>(groups), "scales have the wrong shape");
    require(zero_points.shape(0) == (symmetric ? 0 : bytes(weights.rows * groups)), "zero points have the wrong size");
    require(errors.shape(0) == rows && norms.shape(0) == rows, "errors and norms need one entry for each row");
    require(importance.shape(1) == array.shape(1), "importances and weights differ in their input channels");
    require(matrices == 0 || weights.rows % matrices == 0, "the rows are not shared evenly by the importances");
    const Output output{values.data(), scales.data(), zero_points.data(), errors.data(), norms.data()};
    const float *importances = matrices == 0 ? nullptr : importance.data();
    const Kernels &kernels = kernels_for(instruction_set);
    nb::gil_scoped_release release;
    for_blocks(weights, threads, [&](int64_t begin, int64_t end, float *scratch) {
        kernels.quantize(weights, options, importances, matrices, output, begin, end, scratch);
    });
}

void quantize_to_floats(const WeightArray &array, const std::string &element, int64_t group_size,
                        const std::string &number, const std::string &scale_kind, float tensor_scale, bool search,
                        const ImportanceArray &importance, ByteArray &values, ScaleArray &scales, RowArray &errors,
                        RowArray &norms, int threads, const std::string &instruction_set) {
    const Weights weights = checked_weights(array, element, group_size);
    FloatOptions options{FloatNumber::e4m3, ScaleKind::float32, tensor_scale, search};
    if (number == "e2m1") options.number = FloatNumber::e2m1;
    else if (number != "e4m3") throw std::invalid_argument("unknown number " + number);
    if (scale_kind == "float16") options.scales = ScaleKind::float16;
    else if (scale_kind == "e4m3") options.scales = ScaleKind::e4m3;
    else if (scale_kind == "power_of_two") options.scales = ScaleKind::power_of_two;
    else if (scale_kind != "float32") throw std::invalid_argument("unknown type of scales " + scale_kind);
    int exponent;
    require(std::frexp(tensor_scale, &exponent) == 0.5f, "the tensor's scale is not a power of two");
    const int64_t groups = group_count(weights), matrices = static_cast<int64_t>(importance.shape(0));
    const auto rows = static_cast<size_t>(weights.rows);
    const int64_t count = weights.rows * weights.channels;
    const int64_t bytes = options.number == FloatNumber::e2m1 ? (count + 1) / 2 : count;
    require(values.shape(0) == static_cast<size_t>(bytes), "values have the wrong size");
    require(scales.shape(0) == rows && scales.shape(1) == static_cast<size_t>(groups), "scales have the wrong shape");
    require(errors.shape(0) == rows && norms.shape(0) == rows, "errors and norms need one entry for each row");
    require(importance.shape(1) == array.shape(1), "importances and weights differ in their input channels");
    require(matrices == 0 || weights.rows % matrices == 0, "the rows are not shared evenly by the importances");
    const Output output{values.data(), scales.data(), nullptr, errors.data(), norms.data()};
    const float *importances = matrices == 0 ? nullptr : importance.data();
    const Kernels &kernels = kernels_for(instruction_set);
    nb::gil_scoped_release release;
    for_blocks(weights, threads, [&](int64_t begin, int64_t end, float *scratch) {
        kernels.quantize_to_floats(weights, options, importances, matrices, output, begin, end, scratch);
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

NB_MODULE(_quantize, module) {
    namespace q = inferencex::quantize;
    using namespace nb::literals;
    nb::class_<q::Scan>(module, "Scan")
        .def_ro("smallest_scale", &q::Scan::smallest_scale)
        .def_ro("largest_scale", &q::Scan::largest_scale)
        .def_ro("first_bad", &q::Scan::first_bad);
    module.def("scan", &q::scan, "weights"_a, "element"_a, "group_size"_a, "bits"_a, "symmetric"_a, "threads"_a,
               "instruction_set"_a = "");
    module.def("quantize", &q::quantize, "weights"_a, "element"_a, "group_size"_a, "bits"_a, "symmetric"_a,
               "half_scales"_a, "search"_a, "importance"_a, "values"_a, "scales"_a, "zero_points"_a, "errors"_a,
               "norms"_a, "threads"_a, "instruction_set"_a = "");
    module.def("quantize_to_floats", &q::quantize_to_floats, "weights"_a, "element"_a, "group_size"_a, "number"_a,
               "scale_kind"_a, "tensor_scale"_a, "search"_a, "importance"_a, "values"_a, "scales"_a, "errors"_a,
               "norms"_a, "threads"_a, "instruction_set"_a = "");
    module.def("instruction_sets", &q::instruction_sets);
}
