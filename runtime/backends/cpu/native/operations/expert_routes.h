// The way of a step's rows through experts: sorted by expert, cut into panels, and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "weight_bank.h"

namespace inferencex::cpu {

inline constexpr std::int64_t kExpertPanelRows = 96;  // of one expert, in one task
inline constexpr std::int64_t kExpertRowStep = 12;    // kernels take so many rows at once

// Pieces of memory one after the other, each aligned to 64 bytes.
class MemoryLayout {
  public:
    std::size_t add(std::int64_t elements, std::size_t size) {
        const std::size_t offset = bytes_;
        bytes_ += align_bytes(static_cast<std::size_t>(elements) * size);
        return offset;
    }
    std::size_t bytes() const { return bytes_; }

  private:
    std::size_t bytes_ = 0;
};

// Up to kExpertPanelRows rows of one expert: slots `begin..begin + rows`.
struct ExpertPanel {
    std::int32_t expert, begin, rows;
};

// Where the rows of a step go. A slot is the place of one choice of one row, in the order of experts, then of rows.
struct ExpertRoutes {
    const std::int32_t *slots = nullptr;  // [rows, choices]: -1 where there is no such expert
    const std::int32_t *rows = nullptr;   // of each slot
    std::int64_t slot_count = 0;
    const ExpertPanel *panels = nullptr;
    std::int64_t panel_count = 0;
};

// Sorts by counting. Every thread sorts for itself, which takes less time than waiting for one that does.
class ExpertRouter {
  public:
    ExpertRouter() = default;
    ExpertRouter(std::int64_t experts, std::int64_t most_slots) : experts_(experts) {
        counts_ = layout_.add(experts, sizeof(std::int32_t));
        slots_ = layout_.add(most_slots, sizeof(std::int32_t));
        rows_ = layout_.add(most_slots, sizeof(std::int32_t));
        panels_ = layout_.add(std::min(experts, most_slots) + most_slots / kExpertRowStep + 1, sizeof(ExpertPanel));
    }
    std::size_t bytes() const { return layout_.bytes(); }

    // `index` [rows, choices] with strides.
    ExpertRoutes route(const Tensor &index, std::int64_t rows, std::int64_t choices, std::byte *memory) const {
        auto *next = reinterpret_cast<std::int32_t *>(memory + counts_);
        auto *slots = reinterpret_cast<std::int32_t *>(memory + slots_);
        auto *slot_rows = reinterpret_cast<std::int32_t *>(memory + rows_);
        auto *panels = reinterpret_cast<ExpertPanel *>(memory + panels_);
        std::fill_n(next, experts_, 0);
        for (std::int64_t m = 0; m < rows; ++m)
            for (std::int64_t j = 0; j < choices; ++j) {
                const std::int64_t expert = index.as<std::int64_t>()[m * index.strides[0] + j];
                const bool known = expert >= 0 && expert < experts_;
                slots[m * choices + j] = known ? static_cast<std::int32_t>(expert) : -1;
                if (known) ++next[expert];
            }
        ExpertRoutes routes{slots, slot_rows, 0, panels, 0};
        for (std::int64_t e = 0; e < experts_; ++e) {
            const std::int64_t count = next[e], begin = routes.slot_count;
            next[e] = static_cast<std::int32_t>(begin);
            routes.slot_count += count;
            const std::int64_t parts = (count + kExpertPanelRows - 1) / kExpertPanelRows;
            if (parts == 0) continue;
            const std::int64_t each =
                ((count + parts - 1) / parts + kExpertRowStep - 1) / kExpertRowStep * kExpertRowStep;
            for (std::int64_t done = 0; done < count; done += each)
                panels[routes.panel_count++] = {static_cast<std::int32_t>(e), static_cast<std::int32_t>(begin + done),
                                                static_cast<std::int32_t>(std::min(each, count - done))};
        }
        for (std::int64_t i = 0; i < rows * choices; ++i)
            if (slots[i] >= 0) {
                slots[i] = next[slots[i]]++;
                slot_rows[slots[i]] = static_cast<std::int32_t>(i / choices);
            }
        return routes;
    }

  private:
    std::int64_t experts_ = 0;
    MemoryLayout layout_;
    std::size_t counts_ = 0, slots_ = 0, rows_ = 0, panels_ = 0;
};

// Hands out the tasks of one phase after the other from the operation's counter. A thread's last claim in a phase finds
// nothing left, so a phase takes as many numbers as it has tasks, and one a thread.
class Phases {
  public:
    explicit Phases(const Worker &worker) : worker_(worker) {}

    template <class Task>
    void run(std::int64_t tasks, Task &&task) {
        for (std::int64_t i; (i = worker_.claim() - taken_) < tasks;) task(i);
        taken_ += tasks + worker_.count;
    }

  private:
    const Worker &worker_;
    std::int64_t taken_ = 0;
};

// Rows of activations in shared memory, quantized for a weight.
class QuantizedBuffer {
  public:
    QuantizedBuffer() = default;
    QuantizedBuffer(const BlockLayout &layout, std::int64_t rows, MemoryLayout &memory) : layout_(layout) {
        values_ = memory.add(rows * layout.row_bytes(), 1);
        scales_ = memory.add(rows * layout.blocks, sizeof(float));
        sums_ = memory.add(rows * layout.blocks, sizeof(std::int32_t));
    }

    QuantizedRows from(std::int64_t row, std::byte *memory) const {
        return {layout_, reinterpret_cast<std::int8_t *>(memory + values_) + row * layout_.row_bytes(),
                reinterpret_cast<float *>(memory + scales_) + row * layout_.blocks,
                reinterpret_cast<std::int32_t *>(memory + sums_) + row * layout_.blocks};
    }
    void quantize(const Kernels &kernels, const float *x, std::int64_t row, std::byte *memory) const {
        const QuantizedRows to = from(row, memory);
        kernels.rows.quantize(x, layout_, to.values, to.scales, to.sums);
    }
    void copy(std::int64_t row, std::int64_t to_row, std::byte *memory) const {
        const QuantizedRows source = from(row, memory), to = from(to_row, memory);
        std::copy_n(source.values, layout_.row_bytes(), to.values);
        std::copy_n(source.scales, layout_.blocks, to.scales);
        std::copy_n(source.sums, layout_.blocks, to.sums);
    }

  private:
    BlockLayout layout_;
    std::size_t values_ = 0, scales_ = 0, sums_ = 0;
};

}  // namespace inferencex::cpu
