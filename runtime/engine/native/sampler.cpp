// Python's door to the sampler: checks shapes, releases the GIL, goes through the rows of a step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "chooser.h"

namespace nb = nanobind;

namespace inferencex::sampler {
namespace {

using Logits = nb::ndarray<nb::numpy, const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_rows(const Logits &logits, int64_t first, int64_t last) {
    if (first < 0 || last > static_cast<int64_t>(logits.shape(0))) throw std::out_of_range("no such row of logits");
    if (logits.shape(1) == 0 || logits.shape(1) > 0xffffffff) throw std::invalid_argument("no such vocabulary");
}

// Returns the mask of each row, nullptr where it has none.
std::vector<const uint32_t *> masks_of(const std::optional<Masks> &masks, const std::vector<int64_t> &mask_rows,
                                       size_t count, int64_t size) {
    std::vector<const uint32_t *> pointers(count, nullptr);
    if (!masks) return pointers;
    const auto width = static_cast<int64_t>(masks->shape(1));
    if (mask_rows.size() != count || width < block_count(size, 32))
        throw std::invalid_argument("a mask, or -1, is needed for each row, with a bit for each token");
    for (size_t i = 0; i < count; ++i) {
        if (mask_rows[i] < -1 || mask_rows[i] >= static_cast<int64_t>(masks->shape(0)))
            throw std::out_of_range("no such mask");
        if (mask_rows[i] >= 0) pointers[i] = reinterpret_cast<const uint32_t *>(masks->data() + mask_rows[i] * width);
    }
    return pointers;
}

std::vector<int64_t> choose(const Logits &logits, const std::vector<int64_t> &rows, const nb::list &rules,
                            const std::vector<double> &uniforms, const std::optional<Masks> &masks,
                            const std::vector<int64_t> &mask_rows) {
    if (rules.size() != rows.size() || uniforms.size() != rows.size())
        throw std::invalid_argument("one rule and one number are needed for each row");
    std::vector<const Rule *> pointers;
    pointers.reserve(rows.size());
    for (const nb::handle rule : rules) pointers.push_back(nb::cast<const Rule *>(rule));
    for (const int64_t row : rows) check_rows(logits, row, row + 1);
    const float *data = logits.data();
    const auto size = static_cast<int64_t>(logits.shape(1));
    const std::vector<const uint32_t *> allowed = masks_of(masks, mask_rows, rows.size(), size);
    std::vector<int64_t> answers(rows.size());
    nb::gil_scoped_release release;
    thread_local Chooser chooser;
    for (size_t i = 0; i < rows.size(); ++i)
        answers[i] = chooser.choose(data + rows[i] * size, size, pointers[i], uniforms[i], allowed[i]);
    return answers;
}

bool all_finite(const Logits &logits, int64_t first, int64_t count) {
    check_rows(logits, first, first + count);
    const auto size = static_cast<int64_t>(logits.shape(1));
    const float *data = logits.data();
    nb::gil_scoped_release release;
    std::vector<float> peaks(static_cast<size_t>(block_count(size, kBlock)));
    for (int64_t row = first; row < first + count; ++row)
        if (!block_peaks(data + row * size, size, kBlock, peaks.data())) return false;
    return true;
}

}  // namespace
}  // namespace inferencex::sampler

NB_MODULE(_sampler, module) {
    namespace s = inferencex::sampler;
    using namespace nb::literals;
    nb::set_leak_warnings(false);  // programs may well end with requests in progress
    module.attr("NOT_FINITE") = s::kNotFinite;
    module.attr("UNDECIDED") = s::kUndecided;
    module.attr("NOTHING_ALLOWED") = s::kNothingAllowed;
    nb::class_<s::Rule>(module, "Rule")
        .def(
            "__init__",
            [](s::Rule *rule, bool is_greedy, double temperature, int64_t top_k, double top_p, double min_p,
               double repetition_penalty, double presence_penalty, double frequency_penalty, int64_t min_tokens,
               std::vector<int64_t> stop_ids, std::vector<std::pair<int64_t, float>> biases,
               const std::vector<int64_t> &prompt_ids) {
                new (rule) s::Rule({is_greedy, temperature, top_k, top_p, min_p, static_cast<float>(repetition_penalty),
                                    static_cast<float>(presence_penalty), static_cast<float>(frequency_penalty),
                                    min_tokens, std::move(stop_ids), std::move(biases)},
                                   prompt_ids);
            },
            nb::kw_only(), "is_greedy"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
            "presence_penalty"_a, "frequency_penalty"_a, "min_tokens"_a, "stop_ids"_a, "biases"_a, "prompt_ids"_a)
        .def("record", &s::Rule::record, "token_id"_a);
    module.def("choose", &s::choose, "logits"_a, "rows"_a, "rules"_a, "uniforms"_a, "masks"_a = nb::none(),
               "mask_rows"_a = std::vector<int64_t>{});
    module.def("all_finite", &s::all_finite, "logits"_a, "first"_a, "count"_a);
}
