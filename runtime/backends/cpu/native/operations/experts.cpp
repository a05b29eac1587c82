// Linears and feed-forward layers whose weights every row chooses: the rows of a step are sorted by expert, and each
// expert multiplies its rows together.
#include <algorithm>
#include <array>
#include <limits>

#include "expert_routes.h"
#include "weight_bank.h"

namespace inferencex::cpu {
namespace {

constexpr std::int64_t kTaskTiles = 8;     // at most
constexpr std::int64_t kTasksAThread = 8;  // at least, so that threads finish together
constexpr std::int64_t kMostExperts = 1 << 16;
constexpr std::int64_t kMostChoices = 1 << 10;
constexpr std::int64_t kSumStride = kTaskTiles * kWeightTile;
constexpr std::size_t kSumBytes = kExpertPanelRows * kSumStride * sizeof(float);

// What both operations share: rows x [M, K], chosen experts [M, choices], and a first weight that x meets.
class Chosen : public Operation {
  public:
    std::size_t scratch_bytes(std::int64_t max_tokens, int /*threads*/) const override {
        if (x_.dims[0].at(max_tokens, max_tokens) > most_rows_)
            throw BlueprintError("experts were laid out for " + std::to_string(most_rows_) +
                                 " rows, not for steps of " + std::to_string(max_tokens) + " tokens");
        return align_bytes(router_.bytes()) + kSumBytes + most_kernel_scratch();
    }

  protected:
    Chosen(const Blueprint &b, std::int64_t features, int index_rank)
        : kernels_(*b.kernels),
          experts_(positive_attribute(b, "experts", kMostExperts)),
          features_(features),
          is_integer_(b.has("integer") && b.integer("integer") != 0),
          x_(expect_operand(b, b.inputs, 0, "x", DType::f32, 2)),
          index_(expect_operand(b, b.inputs, 1, "index", DType::i64, index_rank)) {
        const std::int64_t max_tokens = positive_attribute(b, "max_tokens", 1 << 24);
        expect_size(b, x_, 1, features, "x");
        expect_equal(b, index_.dims[0], x_.dims[0], "index");
        if (index_rank == 2) {
            choices_ = index_.dims[1].coefficient;
            if (index_.dims[1].symbol != Symbol::none || choices_ < 1 || choices_ > kMostChoices)
                refuse(b, "index has " + std::to_string(choices_) + " columns, expected 1 to " +
                              std::to_string(kMostChoices));
        }
        const std::int64_t factor = x_.dims[0].symbol == Symbol::none ? 1 : max_tokens;
        if (__builtin_mul_overflow(x_.dims[0].coefficient, factor, &most_rows_) || most_rows_ < 0 ||
            most_rows_ > (std::int64_t{1} << 30) / choices_)
            refuse(b,
                   "x has " + std::to_string(most_rows_) + " rows for " + std::to_string(choices_) + " experts each");
        router_ = ExpertRouter(experts_, most_slots());
    }

    std::int64_t most_slots() const { return most_rows_ * choices_; }

    WeightBank read_bank(const Blueprint &b, std::size_t first, const ChannelOrder &order,
                         std::int64_t features) const {
        return {b, StoredWeight::read(b, first, experts_, order.channels, features), order, is_integer_};
    }

    // Leaves x quantized in the slots of its choices. Ends with a barrier.
    void quantize_rows(const Worker &worker, const Tensor &x, const ExpertRoutes &routes, std::byte *memory) const {
        const Worker::Range mine = worker.share(x.dims[0]);
        for (std::int64_t m = mine.begin; m < mine.end; ++m) {
            std::int64_t first = -1;
            for (std::int64_t j = 0; j < choices_; ++j) {
                const std::int64_t slot = routes.slots[m * choices_ + j];
                if (slot < 0) continue;
                if (first < 0) quantized_.quantize(kernels_, x.as<float>() + m * x.strides[0], first = slot, memory);
                else quantized_.copy(first, slot, memory);
            }
        }
        worker.barrier();
    }

    // Calls `finish(panel, unit_begin, unit_end, sums)` with sums [panel.rows, kSumStride] for every panel and part of
    // the weight's units of `tiles_a_unit` tiles. `multiply` fills them for a range of tiles.
    template <class Multiply, class Finish>
    void for_each_task(Phases &phases, const Worker &worker, const ExpertRoutes &routes, const WeightBank &weight,
                       std::int64_t tiles_a_unit, Multiply &&multiply, Finish &&finish) const {
        auto *sums = reinterpret_cast<float *>(worker.scratch + align_bytes(router_.bytes()));
        std::byte *scratch = worker.scratch + align_bytes(router_.bytes()) + kSumBytes;
        const std::int64_t units = weight.tiles() / tiles_a_unit;
        const std::int64_t each = std::clamp(routes.panel_count * units / (kTasksAThread * worker.count),
                                             std::int64_t{1}, kTaskTiles / tiles_a_unit);
        const std::int64_t groups = (units + each - 1) / each;
        phases.run(routes.panel_count * groups, [&](std::int64_t task) {
            const ExpertPanel &panel = routes.panels[task / groups];
            const std::int64_t begin = task % groups * each, end = std::min(begin + each, units);
            multiply(panel, begin * tiles_a_unit, end * tiles_a_unit, sums, scratch);
            finish(panel, begin, end, sums);
        });
    }

    // The product of a panel's rows of x (or of what quantize_rows left of them) with some tiles of the first weight.
    void multiply_rows(const WeightBank &weight, const Tensor &x, const ExpertRoutes &routes, const ExpertPanel &panel,
                       std::int64_t tile_begin, std::int64_t tile_end, float *sums, std::byte *scratch,
                       std::byte *memory) const {
        if (is_integer_)
            weight.multiply(panel.expert, quantized_.from(panel.begin, memory), panel.rows, tile_begin, tile_end, sums,
                            kSumStride, scratch);
        else
            weight.multiply(panel.expert, FloatRows{x.as<float>(), x.strides[0], routes.rows + panel.begin}, panel.rows,
                            tile_begin, tile_end, sums, kSumStride, scratch);
    }

    virtual std::size_t most_kernel_scratch() const = 0;

    const Kernels &kernels_;
    std::int64_t experts_;
    std::int64_t features_;  // of x
    std::int64_t choices_ = 1;
    std::int64_t most_rows_ = 0;
    bool is_integer_;
    Operand x_, index_;
    ExpertRouter router_;
    QuantizedBuffer quantized_;  // x, in slots
};

// x [M, K], expert_ids [M]; weight [E, N, K]; bias [E, N] -> y [M, N]. A row whose expert does not exist becomes NaN.
class ExpertLinear final : public Chosen {
  public:
    explicit ExpertLinear(const Blueprint &b)
        : Chosen(b, positive_attribute(b, "features", INT32_MAX), 1),
          channels_(positive_attribute(b, "channels", INT32_MAX)),
          y_(expect_operand(b, b.outputs, 0, "y", DType::f32, 2)) {
        expect_size(b, y_, 1, channels_, "y");
        expect_equal(b, y_.dims[0], x_.dims[0], "y");
        weight_ = read_bank(b, 2, {channels_}, features_);
        bias_ = weight_.pack_bias(b, 5, "bias");
        MemoryLayout layout;
        if (is_integer_) quantized_ = QuantizedBuffer(weight_.layout(), most_slots(), layout);
        workspace_ = b.memory->workspace(layout.bytes());
    }

    std::int64_t prepare_tasks() const override { return weight_.prepare_tasks(); }
    void prepare(std::int64_t task) override { weight_.prepare(task); }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(x_.dims[0].at(batch.tokens, batch.rows));
        const double touched = std::min(rows, static_cast<double>(experts_));
        return {touched * static_cast<double>(weight_.bytes_per_expert()) +
                    4 * rows * static_cast<double>(features_ + channels_),
                2 * rows * static_cast<double>(features_) * static_cast<double>(channels_)};
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(x_), y = worker.resolve(y_);
        const ExpertRoutes routes = router_.route(worker.resolve(index_), x.dims[0], 1, worker.scratch);
        std::byte *memory = *workspace_;
        const Worker::Range mine = worker.share(x.dims[0]);
        for (std::int64_t m = mine.begin; m < mine.end; ++m)
            if (routes.slots[m] < 0)
                std::fill_n(y.as<float>() + m * y.strides[0], channels_, std::numeric_limits<float>::quiet_NaN());
        if (is_integer_) quantize_rows(worker, x, routes, memory);
        Phases phases(worker);
        for_each_task(
            phases, worker, routes, weight_, 1,
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float *sums, std::byte *scratch) {
                multiply_rows(weight_, x, routes, panel, begin, end, sums, scratch, memory);
            },
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float *sums) {
                const std::int64_t column = begin * kWeightTile,
                                   columns = std::min(end * kWeightTile, channels_) - column;
                if (bias_)
                    add_bias(bias_ + panel.expert * weight_.tiles() * kWeightTile + column, panel.rows, columns, sums,
                             kSumStride);
                for (std::int64_t m = 0; m < panel.rows; ++m)
                    std::copy_n(sums + m * kSumStride, columns,
                                y.as<float>() + routes.rows[panel.begin + m] * y.strides[0] + column);
            });
    }

  private:
    std::size_t most_kernel_scratch() const override { return weight_.scratch_bytes(kExpertPanelRows); }

    std::int64_t channels_;
    Operand y_;
    WeightBank weight_;
    const float *bias_ = nullptr;
    std::byte *const *workspace_ = nullptr;
};

// Feed-forward experts: x [M, S], index [M, k], weights [M, k]; gate_up [E, 2F, S], down [E, S, F], biases [E, 2F] and
// [E, S] -> y [M, S], the sum over a row's choices, in their order. A row that chose an expert which does not exist
// becomes NaN.
class Experts final : public Chosen {
  public:
    explicit Experts(const Blueprint &b)
        : Chosen(b, positive_attribute(b, "hidden", INT32_MAX), 2),
          inner_features_(positive_attribute(b, "inner", INT32_MAX / 2)),
          gate_(read_gate(b)),
          weights_(expect_operand(b, b.inputs, 2, "weights", DType::f32, 2)),
          y_(expect_operand(b, b.outputs, 0, "y", DType::f32, 2)) {
        expect_equal(b, weights_.dims[0], x_.dims[0], "weights");
        expect_size(b, weights_, 1, choices_, "weights");
        expect_equal(b, y_.dims[0], x_.dims[0], "y");
        expect_size(b, y_, 1, features_, "y");
        gate_up_ = read_bank(b, 3, {2 * inner_features_, true, gate_.interleaved}, features_);
        down_ = read_bank(b, 6, {features_}, inner_features_);
        gate_up_bias_ = gate_up_.pack_bias(b, 9, "gate_up_bias");
        down_bias_ = down_.pack_bias(b, 10, "down_bias");
        MemoryLayout layout;
        if (is_integer_) {
            quantized_ = QuantizedBuffer(gate_up_.layout(), most_slots(), layout);
            quantized_inner_ = QuantizedBuffer(down_.layout(), most_slots(), layout);
        }
        inner_ = layout.add(most_slots() * inner_features_, sizeof(float));
        outer_ = layout.add(most_slots() * outer_stride(), sizeof(float));
        workspace_ = b.memory->workspace(layout.bytes());
    }

    std::int64_t prepare_tasks() const override { return gate_up_.prepare_tasks() + down_.prepare_tasks(); }
    void prepare(std::int64_t task) override {
        const std::int64_t first = gate_up_.prepare_tasks();
        if (task < first) gate_up_.prepare(task);
        else down_.prepare(task - first);
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(x_.dims[0].at(batch.tokens, batch.rows));
        const double slots = rows * static_cast<double>(choices_);
        const double touched = std::min(slots, static_cast<double>(experts_));
        const auto hidden = static_cast<double>(features_), inner = static_cast<double>(inner_features_);
        return {touched * static_cast<double>(gate_up_.bytes_per_expert() + down_.bytes_per_expert()) +
                    8 * rows * hidden + 8 * slots * (hidden + inner),
                slots * 6 * hidden * inner};
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(x_);
        const ExpertRoutes routes = router_.route(worker.resolve(index_), x.dims[0], choices_, worker.scratch);
        std::byte *memory = *workspace_;
        Phases phases(worker);
        if (is_integer_) quantize_rows(worker, x, routes, memory);
        widen(phases, worker, x, routes, memory);
        worker.barrier();
        if (is_integer_) {
            const Worker::Range mine = worker.share(routes.slot_count);
            for (std::int64_t slot = mine.begin; slot < mine.end; ++slot)
                quantized_inner_.quantize(kernels_, inner(slot, memory), slot, memory);
            worker.barrier();
        }
        narrow(phases, worker, routes, memory);
        worker.barrier();
        combine(worker, routes, memory);
    }

  private:
    std::size_t most_kernel_scratch() const override {
        return std::max(gate_up_.scratch_bytes(kExpertPanelRows), down_.scratch_bytes(kExpertPanelRows));
    }
    std::int64_t outer_stride() const { return down_.tiles() * kWeightTile; }
    float *inner(std::int64_t slot, std::byte *memory) const {
        return reinterpret_cast<float *>(memory + inner_) + slot * inner_features_;
    }
    float *outer(std::int64_t slot, std::byte *memory) const {
        return reinterpret_cast<float *>(memory + outer_) + slot * outer_stride();
    }

    // From x to gated features, in slots.
    void widen(Phases &phases, const Worker &worker, const Tensor &x, const ExpertRoutes &routes,
               std::byte *memory) const {
        for_each_task(
            phases, worker, routes, gate_up_, 2,
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float *sums, std::byte *scratch) {
                multiply_rows(gate_up_, x, routes, panel, begin, end, sums, scratch, memory);
            },
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float *sums) {
                const std::int64_t packed = 2 * kWeightTile;
                if (gate_up_bias_)
                    add_bias(gate_up_bias_ + panel.expert * gate_up_.tiles() * kWeightTile + begin * packed, panel.rows,
                             (end - begin) * packed, sums, kSumStride);
                const std::int64_t column = begin * kWeightTile;
                apply_gate(kernels_, gate_, sums, kSumStride, panel.rows,
                           std::min(end * kWeightTile, inner_features_) - column, inner(panel.begin, memory) + column,
                           inner_features_);
            });
    }

    // From gated features to one output a slot.
    void narrow(Phases &phases, const Worker &worker, const ExpertRoutes &routes, std::byte *memory) const {
        for_each_task(
            phases, worker, routes, down_, 1,
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float * /*sums*/, std::byte *scratch) {
                float *out = outer(panel.begin, memory) + begin * kWeightTile;
                if (is_integer_)
                    down_.multiply(panel.expert, quantized_inner_.from(panel.begin, memory), panel.rows, begin, end,
                                   out, outer_stride(), scratch);
                else
                    down_.multiply(panel.expert, FloatRows{inner(panel.begin, memory), inner_features_, nullptr},
                                   panel.rows, begin, end, out, outer_stride(), scratch);
            },
            [&](const ExpertPanel &panel, std::int64_t begin, std::int64_t end, float * /*sums*/) {
                if (down_bias_)
                    add_bias(down_bias_ + panel.expert * outer_stride() + begin * kWeightTile, panel.rows,
                             (end - begin) * kWeightTile, outer(panel.begin, memory) + begin * kWeightTile,
                             outer_stride());
            });
    }

    void combine(const Worker &worker, const ExpertRoutes &routes, std::byte *memory) const {
        constexpr std::int64_t kColumns = 256;  // so that threads can share even one row
        const Tensor weights = worker.resolve(weights_), y = worker.resolve(y_);
        const std::int64_t blocks = (features_ + kColumns - 1) / kColumns;
        const Worker::Range mine = worker.share(y.dims[0] * blocks);
        for (std::int64_t part = mine.begin; part < mine.end; ++part) {
            const std::int64_t m = part / blocks, begin = part % blocks * kColumns;
            const std::int64_t columns = std::min(kColumns, features_ - begin);
            std::array<float, kColumns> sum{};
            for (std::int64_t j = 0; j < choices_; ++j) {
                const std::int64_t slot = routes.slots[m * choices_ + j];
                if (slot < 0) {
                    sum.fill(std::numeric_limits<float>::quiet_NaN());
                    continue;
                }
                const float weight = weights.as<float>()[m * weights.strides[0] + j];
                const float *from = outer(slot, memory) + begin;
                for (std::int64_t c = 0; c < columns; ++c) sum[c] += weight * from[c];
            }
            std::copy_n(sum.data(), columns, y.as<float>() + m * y.strides[0] + begin);
        }
    }

    std::int64_t inner_features_;
    Gate gate_;
    Operand weights_, y_;
    WeightBank gate_up_, down_;
    const float *gate_up_bias_ = nullptr;
    const float *down_bias_ = nullptr;
    QuantizedBuffer quantized_inner_;
    std::size_t inner_ = 0, outer_ = 0;  // in the workspace
    std::byte *const *workspace_ = nullptr;
};

}  // namespace

void add_experts(Registry &registry) {
    registry.add("ExpertLinear",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<ExpertLinear>(b); });
    registry.add("Experts",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<Experts>(b); });
}

}  // namespace inferencex::cpu
