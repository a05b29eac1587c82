// Linears with INT4 and INT8 weights on activations quantized to INT8, with what follows them: bias, a gated
// activation, quantization of the result. All of it is done on a part of the result while that is in a near cache.
#include <algorithm>
#include <numeric>

#include "row_operands.h"
#include "weight_bank.h"

namespace inferencex::cpu {
namespace {

constexpr std::int64_t kTile = PackedIntegerWeight::kTile;
constexpr std::int64_t kFewRows = 32;          // up to here threads share the channels in fixed parts
constexpr std::int64_t kPanelRows = 132;       // of a task beyond, at most
constexpr std::int64_t kFewestPanelRows = 18;  // where tasks are few
constexpr std::int64_t kRowStep = 6;           // panels are multiples of the rows that kernels work on at once
static_assert(kPanelRows % kRowStep == 0, "scratch is for kPanelRows");
constexpr std::int64_t kTasksAThread = 16;       // at least, so that threads finish together
constexpr std::int64_t kPrepareTiles = 4;        // packed by one task
constexpr std::int64_t kStripBytes = 192 << 10;  // of results before they are gated or quantized
// Sums of a block are 32 bits: this many products of 8-bit integers fit.
constexpr std::int64_t kLongestWholeBlock = INT32_MAX / (128 * 256);

Blueprint with_attribute(Blueprint blueprint, const std::string &key, Attribute value) {
    blueprint.attributes[key] = std::move(value);
    return blueprint;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// values [M, row_bytes], scales [M, blocks], sums [M, blocks] of quantized x [M, K]; weight [N, K]; bias [N].
// Results: y [M, N], or [M, N / 2] with a gate, and the same quantized; at least one of the two.
class IntegerLinear final : public Operation {
  public:
    explicit IntegerLinear(const Blueprint &b)
        : kernels_(*b.kernels),
          channels_(positive_attribute(b, "channels", INT32_MAX)),
          features_(positive_attribute(b, "features", INT32_MAX)) {
        expect_operands(b, 7, 4);
        if (b.has("activation")) {
            gate_ = read_gate(b);
            if (channels_ % 2) refuse(b, "a gate needs an even number of channels, not " + std::to_string(channels_));
        }
        columns_ = gate_ ? channels_ / 2 : channels_;
        tiles_a_column_tile_ = gate_ ? 2 : 1;
        plan_weight(b);
        check_activations(b);
        check_results(b);
    }

    std::int64_t prepare_tasks() const override { return (weight_.tiles() + kPrepareTiles - 1) / kPrepareTiles; }
    void prepare(std::int64_t task) override {
        StoredWeight::Room room;
        StoredWeight::Expanded memory;
        const std::int64_t end = std::min((task + 1) * kPrepareTiles, weight_.tiles());
        for (std::int64_t tile = task * kPrepareTiles; tile < end; ++tile) {
            const std::int64_t first = tile * kTile, count = std::min(kTile, weight_.channels - first);
            std::int32_t rows[kTile];
            for (std::int64_t c = 0; c < count; ++c)
                rows[c] = order_.empty() ? static_cast<std::int32_t>(first + c) : order_[first + c];
            const StoredWeight stored = stored_.nearby(rows, count, room);
            const bool expands = stored.expansion != Expansion::none;
            IntegerWeight source =
                StoredWeight::as_integer(expands ? stored.expand(kernels_.rows, rows, count, memory) : stored.source);
            source.order = expands ? nullptr : rows;
            PackedIntegerWeight plan = weight_;
            plan.channels = count;
            kernels_.integer_linear.pack(source, plan, 0, packed_ + tile * weight_.tile_bytes);
        }
    }

    std::size_t scratch_bytes(std::int64_t /*max_tokens*/, int /*threads*/) const override {
        return strip_bytes() + gated_bytes() + kernels_.integer_linear.scratch_bytes(weight_, kPanelRows);
    }

    Cost cost(const Batch &batch) const override {
        const auto rows = static_cast<double>(rows_.at(batch.tokens, batch.rows));
        const double result = (y_.present ? 4.0 * static_cast<double>(columns_) : 0.0) + quantized_.bytes_per_row();
        const auto x = static_cast<double>(weight_.layout.row_bytes() + 8 * weight_.layout.blocks);
        return {static_cast<double>(weight_.tiles() * weight_.tile_bytes) + rows * (x + result),
                2 * rows * static_cast<double>(features_) * static_cast<double>(channels_)};
    }

    void run(const Worker &worker) const override {
        const std::int64_t rows = rows_.at(worker.batch->tokens, worker.batch->rows);
        if (rows == 0) return;
        Step step{worker,
                  {weight_.layout, worker.resolve(values_).as<std::int8_t>(), worker.resolve(scales_).as<float>(),
                   worker.resolve(sums_).as<std::int32_t>()},
                  nullptr,
                  0,
                  quantized_.resolve(worker)};
        if (y_.present) {
            const Tensor y = worker.resolve(y_);
            step.y = y.as<float>();
            step.y_stride = y.strides[0];
        }
        if (rows <= kFewRows) {
            const std::int64_t most = units_at_once(rows);
            const auto [begin, end] = worker.share(units_);
            for (std::int64_t unit = begin; unit < end; unit += most)
                compute(step, 0, rows, unit, std::min(unit + most, end), unit > begin);
            return;
        }
        // Fewer rows a task where there are too few tasks.
        const std::int64_t tasks = kTasksAThread * worker.count;
        // No more than are kept near, unless those are few: the whole weight is read for each panel of rows.
        const std::int64_t near_rows = kernels_.integer_linear.rows_at_once(weight_);
        std::int64_t most_rows = 2 * near_rows < kPanelRows ? kPanelRows : std::min(kPanelRows, near_rows);
        while (most_rows > kFewestPanelRows && (rows + most_rows - 1) / most_rows * units_ < tasks) most_rows /= 2;
        const std::int64_t fewest = (rows + most_rows - 1) / most_rows;
        const std::int64_t panel_rows = round_up((rows + fewest - 1) / fewest, kRowStep);
        const std::int64_t panels = (rows + panel_rows - 1) / panel_rows;
        const std::int64_t most = units_at_once(panel_rows);
        std::int64_t parts = std::clamp((tasks + panels - 1) / panels, (units_ + most - 1) / most, units_);
        while (panels * parts % worker.count != 0 && parts < units_) ++parts;  // nobody waits for a last task
        std::int64_t row_before = -1;
        for (std::int64_t task; (task = worker.claim()) < panels * parts;) {
            const std::int64_t row = task / parts * panel_rows, part = task % parts;
            compute(step, row, std::min(row + panel_rows, rows), units_ * part / parts, units_ * (part + 1) / parts,
                    row == row_before);
            row_before = row;
        }
    }

  private:
    struct Step {
        const Worker &worker;
        QuantizedRows x;
        float *y;
        std::int64_t y_stride;
        QuantizedOutput::Resolved quantized;
    };

    void plan_weight(const Blueprint &b) {
        // `format` says how the weight is stored where that is not the integers of `bits` that kernels read.
        const std::int64_t bits = b.integer("bits");
        if (bits != 4 && bits != 8) refuse(b, "bits is " + std::to_string(bits) + ", expected 4 or 8");
        const std::string format = b.has("format") ? b.text("format") : bits == 4 ? "int4" : "int8";
        const Blueprint named = with_attribute(b, "format", format);
        stored_ = StoredWeight::read(named, 3, 1, channels_, features_);
        stored_.for_integers(named);
        source_ = stored_.integer();
        if (source_.bits != bits)
            refuse(b, "weights of format " + format + " are not multiplied in " + std::to_string(bits) + " bits");
        source_.whole = b.has("whole") && b.integer("whole") != 0;
        if (source_.whole && source_.group < features_)
            refuse(b, "activations with one scale a row need a weight with one scale a channel, not groups of " +
                          std::to_string(source_.group));
        if (source_.whole && features_ > kLongestWholeBlock)
            refuse(b, "features is " + std::to_string(features_) + "; activations with one scale a row have at most " +
                          std::to_string(kLongestWholeBlock));
        const ChannelOrder order{channels_, gate_.has_value(), gate_ && gate_->interleaved};
        source_.channels = order.packed_channels();
        if (gate_) {
            order_.resize(source_.channels);
            for (std::int64_t c = 0; c < source_.channels; ++c) order_[c] = static_cast<std::int32_t>(order.stored(c));
        }
        weight_ = kernels_.integer_linear.plan(source_);
        std::int64_t bytes;
        if (__builtin_mul_overflow(weight_.tiles(), weight_.tile_bytes, &bytes))
            refuse(b, "the weight has an absurd size");
        packed_ = b.memory->allocate(static_cast<std::size_t>(bytes));
        weight_.data = packed_;
        const std::vector<float> bias = read_floats(b, 6, "bias", channels_);
        if (bias.empty()) return;
        bias_.resize(weight_.tiles() * kTile);
        for (std::int64_t c = 0; c < source_.channels; ++c) bias_[c] = bias[order.stored(c)];
    }

    void check_activations(const Blueprint &b) {
        values_ = required_input(b, 0, "values");
        scales_ = required_input(b, 1, "scales");
        sums_ = required_input(b, 2, "sums");
        const auto expect = [&](const char *role, const Operand &operand, DType dtype, std::int64_t columns) {
            const bool fits = columns_of_rows(b, role, operand, dtype) == columns && operand.rank == 2;
            const bool single = fits && operand.dims[0].symbol == Symbol::none && operand.dims[0].coefficient == 1;
            const bool dense =
                fits && operand.strides[0].symbol == Symbol::none && operand.strides[0].coefficient == columns;
            if (!fits || !(single || dense) || !same(operand.dims[0], values_.dims[0]))
                refuse(b, std::string(role) + " is " + describe(operand) + ", expected contiguous rows of " +
                              std::to_string(columns) + ", as many as values has");
        };
        expect("values", values_, DType::i8, weight_.layout.row_bytes());
        expect("scales", scales_, DType::f32, weight_.layout.blocks);
        expect("sums", sums_, DType::i32, weight_.layout.blocks);
        rows_ = values_.dims[0];
    }

    void check_results(const Blueprint &b) {
        y_ = b.outputs[0];
        if (y_.present && (columns_of_rows(b, "y", y_, DType::f32) != columns_ || y_.rank != 2 ||
                           !same(y_.dims[0], rows_) || y_.strides[0].symbol != Symbol::none))
            refuse(b, "y is " + describe(y_) + ", expected " + std::to_string(columns_) + " columns and the rows of x");
        const bool quantizes = b.outputs[1].present || b.outputs[2].present || b.outputs[3].present;
        if (quantizes)
            quantized_ = QuantizedOutput(with_attribute(b, "group", b.integer("out_group")), 1, rows_, columns_);
        if (!y_.present && !quantizes) refuse(b, "neither y nor quantized rows are asked for");
        unit_ = kTile;
        if (quantizes) {
            const BlockLayout &layout = quantized_.layout();
            // Where blocks are, or else where groups are.
            boundary_ = layout.even() ? layout.block : layout.group;
            boundary_blocks_ = layout.even() ? 1 : layout.blocks_per_group;
            unit_ = std::min(std::lcm(boundary_, kTile), round_up(columns_, kTile));
        }
        units_ = (columns_ + unit_ - 1) / unit_;
    }

    // Columns of the packed weight for `columns` of the result.
    std::int64_t width(std::int64_t columns) const { return round_up(columns, kTile) * tiles_a_column_tile_; }
    // Floats between rows of a strip; not a power of two, which would put all rows into the same lines of a cache.
    static std::int64_t strip_stride(std::int64_t width) { return width + 16; }

    std::int64_t units_at_once(std::int64_t rows) const {
        const std::int64_t most = kStripBytes / static_cast<std::int64_t>(sizeof(float)) / rows - 16;
        return std::max<std::int64_t>(1, most / width(unit_));
    }
    std::size_t strip_bytes() const {
        const std::int64_t unit = kPanelRows * strip_stride(width(unit_)) * static_cast<std::int64_t>(sizeof(float));
        return align_bytes(static_cast<std::size_t>(std::max(unit, kStripBytes)));
    }
    // A row of gated results that are only quantized.
    std::size_t gated_bytes() const {
        if (!gate_ || y_.present) return 0;
        return align_bytes(static_cast<std::size_t>(round_up(columns_, kTile)) * sizeof(float));
    }

    void compute(const Step &step, std::int64_t row_begin, std::int64_t row_end, std::int64_t unit_begin,
                 std::int64_t unit_end, bool same_rows) const {
        const std::int64_t rows = row_end - row_begin;
        const std::int64_t column = unit_begin * unit_, end = std::min(unit_end * unit_, columns_);
        const std::int64_t columns = end - column;
        const std::int64_t tile_begin = column / kTile * tiles_a_column_tile_;
        const std::int64_t tile_end = tile_begin + width(columns) / kTile;
        auto *strip = reinterpret_cast<float *>(step.worker.scratch);
        auto *gated = reinterpret_cast<float *>(step.worker.scratch + strip_bytes());
        std::byte *scratch = step.worker.scratch + strip_bytes() + gated_bytes();

        // Whole tiles are written where they belong; what is gated, or stops within a tile, goes through the strip.
        const bool direct = y_.present && !gate_ && columns % kTile == 0;
        float *y = y_.present ? step.y + row_begin * step.y_stride + column : nullptr;
        float *sums = direct ? y : strip;
        const std::int64_t stride = direct ? step.y_stride : strip_stride(width(columns));
        kernels_.integer_linear.multiply(weight_, step.x, row_begin, row_end, tile_begin, tile_end, sums, stride,
                                         scratch, same_rows);
        if (!bias_.empty()) add_bias(bias_.data() + tile_begin * kTile, rows, width(columns), sums, stride);
        if (direct && !quantized_.present()) return;
        // The blocks of these columns, which are whole ones.
        const std::int64_t first_block = column / boundary_ * boundary_blocks_;
        const std::int64_t last_block =
            std::min((end + boundary_ - 1) / boundary_ * boundary_blocks_, quantized_.layout().blocks);
        for (std::int64_t m = 0; m < rows; ++m) {
            const float *result = sums + m * stride;
            if (gate_) {
                float *out = y_.present ? y + m * step.y_stride : gated;
                apply_gate(kernels_, *gate_, result, stride, 1, columns, out, columns);
                result = out;
            } else if (y_.present && !direct) {
                std::copy_n(result, columns, y + m * step.y_stride);
            }
            if (quantized_.present())
                quantized_.quantize(kernels_.rows, step.quantized, row_begin + m, first_block, last_block, result);
        }
    }

    const Kernels &kernels_;
    std::int64_t channels_;
    std::int64_t features_;
    std::int64_t columns_ = 0;              // of the result
    std::int64_t tiles_a_column_tile_ = 1;  // tiles of the weight for kTile columns of the result
    std::int64_t unit_ = 0;                 // columns of the result that are computed together, and how many such units
    std::int64_t units_ = 0;
    std::int64_t boundary_ = 1;  // columns between places where a block starts, and the blocks between
    std::int64_t boundary_blocks_ = 1;
    Extent rows_;
    Operand values_, scales_, sums_, y_;
    QuantizedOutput quantized_;
    std::optional<Gate> gate_;
    StoredWeight stored_;
    IntegerWeight source_;
    std::vector<std::int32_t> order_;
    std::vector<float> bias_;  // in the order of packed channels
    PackedIntegerWeight weight_;
    std::byte *packed_ = nullptr;
};

}  // namespace

void add_integer_linear(Registry &registry) {
    registry.add("IntegerLinear",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<IntegerLinear>(b); });
}

}  // namespace inferencex::cpu
