// Python's door to Gram matrices of bfloat16 rows: checks shapes, releases the GIL, shares the tiles among threads.
#include "gram.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace inferencex::quantize {

void pack_panel(const uint16_t *rows, int64_t count, int64_t channels, int64_t first_column, uint32_t *panel) {
    const int64_t columns = std::min(kPanelColumns, channels - first_column);
    for (int64_t row = 0; row < count; row += 2, panel += kPanelColumns) {
        const uint16_t *even = rows + row * channels + first_column, *odd = even + channels;
        for (int64_t c = 0; c < columns; ++c)
            panel[c] = even[c] | (row + 1 < count ? static_cast<uint32_t>(odd[c]) << 16 : 0);
        for (int64_t c = columns; c < kPanelColumns; ++c) panel[c] = 0;
    }
}

namespace {

using Rows = nb::ndarray<nb::numpy, const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

bool supported() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

void for_tasks(int64_t count, int threads, const std::function<void(int64_t)> &work) {
    std::atomic<int64_t> next{0};
    const auto run = [&] {
        for (int64_t i = next++; i < count; i = next++) work(i);
    };
    std::vector<std::jthread> others;
    for (int64_t t = 1; t < std::min<int64_t>(threads, count); ++t) others.emplace_back(run);
    run();
}

// Adds to the upper triangle what rows of one tile of panels give, and copies it to the lower.
void add_tile(const float *tile, float *gram, int64_t channels, int64_t left, int64_t right) {
    const int64_t first_row = left * kPanelColumns, first_column = right * kPanelColumns;
    const int64_t rows = std::min(kPanelColumns, channels - first_row);
    const int64_t columns = std::min(kPanelColumns, channels - first_column);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = left == right ? r : 0; c < columns; ++c) {
            float &sum = gram[(first_row + r) * channels + first_column + c];
            sum += tile[r * kPanelColumns + c];
            gram[(first_column + c) * channels + first_row + r] = sum;
        }
}

void accumulate(const Rows &rows, Matrix &gram, int threads) {
    if (!supported()) throw std::runtime_error("this processor has no instructions for products of bfloat16 numbers");
    const auto count = static_cast<int64_t>(rows.shape(0)), channels = static_cast<int64_t>(rows.shape(1));
    if (static_cast<int64_t>(gram.shape(0)) != channels || static_cast<int64_t>(gram.shape(1)) != channels)
        throw std::invalid_argument("the Gram matrix and the rows differ in their channels");
    const int64_t pairs = (count + 1) / 2, panels = (channels + kPanelColumns - 1) / kPanelColumns;
    const int64_t panel_words = pairs * kPanelColumns;
    const uint16_t *source = rows.data();
    float *target = gram.data();
    nb::gil_scoped_release release;
    std::vector<uint32_t> packed(static_cast<size_t>(panels * panel_words));
    for_tasks(panels, threads, [&](int64_t panel) {
        pack_panel(source, count, channels, panel * kPanelColumns, packed.data() + panel * panel_words);
    });
    std::vector<std::pair<int64_t, int64_t>> tiles;
    for (int64_t left = 0; left < panels; ++left)
        for (int64_t right = left; right < panels; ++right) tiles.emplace_back(left, right);
    for_tasks(static_cast<int64_t>(tiles.size()), threads, [&](int64_t index) {
        const auto [left, right] = tiles[static_cast<size_t>(index)];
        float tile[kPanelColumns * kPanelColumns]{};
#if defined(__x86_64__)
        multiply_panels(packed.data() + left * panel_words, packed.data() + right * panel_words, pairs, tile);
#endif
        add_tile(tile, target, channels, left, right);
    });
}

}  // namespace
}  // namespace inferencex::quantize

NB_MODULE(_gram, module) {
    namespace q = inferencex::quantize;
    using namespace nb::literals;
    module.def("supported", &q::supported);
    module.def("accumulate", &q::accumulate, "rows"_a, "gram"_a, "threads"_a);
}
