// Linears on float32 activations, with weights of any stored type.
#include <algorithm>

#include "weight_bank.h"

namespace inferencex::cpu {
namespace {

constexpr std::int64_t kFewRows = 24;      // up to here threads share the channels in fixed parts
constexpr std::int64_t kPanelRows = 96;    // rows of a task beyond: 96 KB of activations at a time
constexpr std::int64_t kTaskTiles = 8;     // at most, and at a time
constexpr std::int64_t kTasksAThread = 4;  // at least, so that threads finish together

// x [M, K], rows strided; weight [N, K]; bias [N] -> y [M, N], or [M, N / 2] with a gate.
class FloatLinear final : public Operation {
  public:
    explicit FloatLinear(const Blueprint &b)
        : kernels_(*b.kernels),
          channels_(positive_attribute(b, "channels", INT32_MAX)),
          features_(positive_attribute(b, "features", INT32_MAX)),
          x_(expect_operand(b, b.inputs, 0, "x", DType::f32, 2)),
          y_(expect_operand(b, b.outputs, 0, "y", DType::f32, 2)) {
        ChannelOrder order{channels_};
        if (b.has("activation")) {
            gate_ = read_gate(b);
            if (channels_ % 2 != 0)
                refuse(b, "a gate needs an even number of channels, not " + std::to_string(channels_));
            order = {channels_, true, gate_->interleaved};
        }
        columns_ = gate_ ? channels_ / 2 : channels_;
        expect_size(b, x_, 1, features_, "x");
        expect_size(b, y_, 1, columns_, "y");
        expect_equal(b, y_.dims[0], x_.dims[0], "y");
        weight_ = WeightBank(b, StoredWeight::read(b, 1, 1, channels_, features_), order, false);
        bias_ = weight_.pack_bias(b, 4, "bias");
    }

    std::int64_t prepare_tasks() const override { return weight_.prepare_tasks(); }
    void prepare(std::int64_t task) override { weight_.prepare(task); }

    std::size_t scratch_bytes(std::int64_t /*max_tokens*/, int /*threads*/) const override {
        return kPanelRows * kTaskTiles * kWeightTile * sizeof(float) + weight_.scratch_bytes(kPanelRows);
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(x_.dims[0].at(batch.tokens, batch.rows));
        return {static_cast<double>(weight_.bytes_per_expert()) + 4 * rows * static_cast<double>(features_ + columns_),
                2 * rows * static_cast<double>(features_) * static_cast<double>(channels_)};
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(x_), y = worker.resolve(y_);
        const std::int64_t rows = x.dims[0];
        if (rows <= kFewRows) {
            const Worker::Range mine = worker.share(units());
            for (std::int64_t unit = mine.begin; unit < mine.end; unit += kTaskTiles / tiles_a_unit())
                compute(worker, x, y, 0, rows, unit, std::min(unit + kTaskTiles / tiles_a_unit(), mine.end));
            return;
        }
        const std::int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
        const std::int64_t wanted = kTasksAThread * worker.count;
        const std::int64_t task_units =
            std::clamp(panels * units() / wanted, std::int64_t{1}, kTaskTiles / tiles_a_unit());
        const std::int64_t groups = (units() + task_units - 1) / task_units;
        for (std::int64_t task; (task = worker.claim()) < panels * groups;) {
            const std::int64_t row = task / groups * kPanelRows, unit = task % groups * task_units;
            compute(worker, x, y, row, std::min(row + kPanelRows, rows), unit, std::min(unit + task_units, units()));
        }
    }

  private:
    // A unit is what is computed together: a tile, or a pair of tiles of gates and ups.
    std::int64_t tiles_a_unit() const { return gate_ ? 2 : 1; }
    std::int64_t units() const { return weight_.tiles() / tiles_a_unit(); }

    void compute(const Worker &worker, const Tensor &x, const Tensor &y, std::int64_t row_begin, std::int64_t row_end,
                 std::int64_t unit_begin, std::int64_t unit_end) const {
        constexpr std::int64_t kStride = kTaskTiles * kWeightTile;
        auto *sums = reinterpret_cast<float *>(worker.scratch);
        std::byte *scratch = worker.scratch + kPanelRows * kStride * sizeof(float);
        const std::int64_t rows = row_end - row_begin;
        const std::int64_t tile_begin = unit_begin * tiles_a_unit(), tile_end = unit_end * tiles_a_unit();
        const FloatRows source{x.as<float>() + row_begin * x.strides[0], x.strides[0], nullptr};
        weight_.multiply(0, source, rows, tile_begin, tile_end, sums, kStride, scratch);
        if (bias_)
            add_bias(bias_ + tile_begin * kWeightTile, rows, (tile_end - tile_begin) * kWeightTile, sums, kStride);
        const std::int64_t column = unit_begin * kWeightTile;
        const std::int64_t columns = std::min(unit_end * kWeightTile, columns_) - column;
        float *out = y.as<float>() + row_begin * y.strides[0] + column;
        if (gate_) {
            apply_gate(kernels_, *gate_, sums, kStride, rows, columns, out, y.strides[0]);
            return;
        }
        for (std::int64_t m = 0; m < rows; ++m) std::copy_n(sums + m * kStride, columns, out + m * y.strides[0]);
    }

    const Kernels &kernels_;
    std::int64_t channels_;
    std::int64_t features_;
    std::int64_t columns_ = 0;  // of y
    Operand x_, y_;
    std::optional<Gate> gate_;
    WeightBank weight_;
    const float *bias_ = nullptr;
};

}  // namespace

void add_float_linear(Registry &registry) {
    registry.add("FloatLinear",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<FloatLinear>(b); });
}

}  // namespace inferencex::cpu
