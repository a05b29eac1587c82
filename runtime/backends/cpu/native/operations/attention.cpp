// StoreKV writes a step's keys and values into a layer's pages; Attention reads them.
#include "../kernels/attention.h"

#include <bit>
#include <cmath>
#include <limits>

#include "../attention_state.h"
#include "../kernels.h"
#include "../memory.h"
#include "../operation.h"
#include "attention_operands.h"

namespace inferencex::cpu {
namespace {

using namespace attention;

// The number of E4M3 next to `x`, ties to even and at most 448 (OCP 8-bit floating point, section 5.3): 3 bits of
// fraction down to 2^-6, and multiples of 2^-9 below.
float nearest_e4m3(float x) {
    const float size = std::min(std::fabs(x), 448.0F);
    std::uint32_t bits = std::bit_cast<std::uint32_t>(size);
    bits = (bits + 0x7ffffU + ((bits >> 20) & 1U)) & ~0xfffffU;
    const float small = (size + 24576.0F) - 24576.0F;  // floats from 2^14 to 2^15 are 2^-9 apart
    return std::copysign(size < 0x1p-6F ? small : std::bit_cast<float>(bits), x);
}

// Round x [n] to what E4M3 times `scale` can say, into y. What is not a number stays none.
const float *as_e4m3(const float *x, Int n, float scale, float *y) {
    for (Int i = 0; i < n; ++i) y[i] = std::isnan(x[i]) ? x[i] : scale * nearest_e4m3(x[i] / scale);
    return y;
}

class StoreKV final : public Operation {
  public:
    explicit StoreKV(const Blueprint &blueprint) : StoreKV(blueprint, Checked(blueprint)) {}

    void run(const Worker &worker) const override {
        const Batch &batch = *worker.batch;
        const Tensor k = worker.resolve(k_), v = worker.resolve(v_);
        const Int tokens = rotation_.tokens(worker, std::min({k.dims[0], v.dims[0], batch.tokens}));
        if (tokens == 0) return;
        const Rotation rotation = rotation_.resolve(worker, kernels_);
        std::byte *state = worker.resolve(state_).data;
        const HeadScales key_scales = key_scales_.resolve(worker), value_scales = value_scales_.resolve(worker);
        auto *rotated = reinterpret_cast<float *>(worker.scratch);
        float *rounded = rotated + pages_.key_width;  // a key, then a value
        const Worker::Range mine = worker.share(tokens);
        for (Int s = 0; s < batch.sequences; ++s) {
            const Sequence sequence = sequence_of(batch, s, tokens, pages_);
            const Int end = std::min(from_tile(sequence, mine.end), sequence.end);
            for (Int t = from_tile(sequence, std::max(mine.begin, sequence.begin)); t < end; ++t) {
                const Int position = sequence.position + t - sequence.begin, slot = position % pages_.block_size;
                const Int block = sequence.blocks[position / pages_.block_size];
                if (block < 0 || block >= pages_.num_blocks) continue;  // nothing outside the pool is written
                for (Int g = 0; g < pages_.heads; ++g) {
                    const float *key = k.as<float>() + t * k.strides[0] + g * k.strides[1];
                    key = rotation.apply(key, t, pages_.key_width, rotated);
                    const float *value = v.as<float>() + t * v.strides[0] + g * v.strides[1];
                    const FixedScales scales{key_scales.of(g), value_scales.of(g)};
                    if (pages_.type != PageType::i8 && key_scales_.present) {
                        key = as_e4m3(key, pages_.key_width, scales.key, rounded);
                        value = as_e4m3(value, pages_.value_width, scales.value, rounded + pages_.key_width);
                    }
                    kernels_.attention.store(pages_, state + pages_.offset(block, g, slot / kTileSlots),
                                             slot % kTileSlots, key, value, scales);
                }
            }
        }
    }

    std::size_t scratch_bytes(Int, int) const override {
        return static_cast<std::size_t>(2 * pages_.key_width + pages_.value_width) * sizeof(float);
    }

    Cost cost(const Batch &batch) const override {
        const double stored = static_cast<double>(pages_.tile_bytes) / kTileSlots;
        const double read = 4.0 * static_cast<double>(pages_.key_width + pages_.value_width);
        return {static_cast<double>(batch.tokens * pages_.heads) * (stored + read), 0};
    }

  private:
    StoreKV(const Blueprint &blueprint, const Checked &checked)
        : kernels_(*blueprint.kernels),
          pages_(page_layout(checked, blueprint)),
          k_(checked.floats(blueprint.inputs, 0, "k", {-1, pages_.heads, pages_.key_width})),
          v_(checked.floats(blueprint.inputs, 1, "v", {-1, pages_.heads, pages_.value_width})),
          rotation_(checked, blueprint, 2, pages_.key_width),
          state_(pool_operand(checked, blueprint, 5, pages_)),
          key_scales_(checked, blueprint, 6, pages_.heads),
          value_scales_(checked, blueprint, 7, pages_.heads) {
        const bool scaled = key_scales_.present;
        checked.require(scaled == value_scales_.present, "scales of keys and values are not given together");
        checked.require(!scaled || pages_.type == PageType::i8 || pages_.type == PageType::f16,
                        "scales are for pages of int8, or of float16 that hold E4M3");
    }

    // The first token at or after `t` that starts a tile, or the sequence's first: a tile is written by one thread.
    Int from_tile(const Sequence &sequence, Int t) const {
        if (t <= sequence.begin) return sequence.begin;
        const Int slot = (sequence.position + t - sequence.begin) % pages_.block_size;
        const Int into = slot % kTileSlots;
        return into == 0 ? t : t + std::min(kTileSlots - into, pages_.block_size - slot);
    }

    const Kernels &kernels_;
    PageLayout pages_;
    Operand k_, v_;
    RotationOperands rotation_;
    Operand state_;
    ScaleOperand key_scales_, value_scales_;
};

class Attention final : public Operation {
  public:
    explicit Attention(const Blueprint &blueprint) : Attention(blueprint, Checked(blueprint)) {}

    void run(const Worker &worker) const override {
        const Step step(*this, worker);
        if (step.tokens == 0) return;
        for_tasks(step, worker, [&](const Sequence &sequence, const Plan &plan, Int task) {
            attend(step, worker, sequence, plan, task);
        });
        if (!step.any_split) return;
        worker.barrier();
        merge(step, worker);
    }

    std::size_t scratch_bytes(Int, int) const override { return kernels_.attention.scratch_bytes(shape_); }

    Cost cost(const Batch &batch) const override {
        double pairs = 0, keys = 0;
        for (Int s = 0; s < batch.sequences; ++s) {
            const Int count = batch.sequence_offsets[s + 1] - batch.sequence_offsets[s],
                      context = batch.context_lengths[s];
            for (Int p = context - count; p < context; ++p)
                pairs += static_cast<double>(p + 1 - shape_.first_visible(p));
            keys += static_cast<double>(context - shape_.first_visible(std::max<Int>(context - count, 0)));
        }
        const PageLayout &pages = shape_.pages;
        const double token_bytes =
            static_cast<double>(pages.tile_bytes) / kTileSlots * static_cast<double>(pages.heads);
        const double row_bytes = 4.0 * static_cast<double>(shape_.heads * (pages.key_width + pages.value_width));
        return {keys * token_bytes + static_cast<double>(batch.tokens) * row_bytes,
                2.0 * pairs * static_cast<double>(shape_.heads * (pages.key_width + pages.value_width))};
    }

  private:
    // How one sequence's work is cut. Cuts change who computes what, never a result.
    struct Plan {
        Int queries = 0;  // of a task; blocks of queries start at multiples of it, counted from position 0
        Int first_block = 0;
        Int blocks = 0;
        Int first_chunk = 0;  // of the first query
        Int chunks = 0;       // of all queries
        Int partial = -1;     // where the sequence's partial results start, in rows; -1: chunks are not split
        Int tasks = 0;
    };

    // What all threads work out alike about a step.
    struct Step {
        Tensor q, y;
        Rotation rotation;
        const float *sinks = nullptr;
        const float *slopes = nullptr;
        Int sink_stride = 0, slope_stride = 0;
        const std::byte *state = nullptr;
        Int tokens = 0;
        Int queries = 0;
        double most_cost = 0;  // of a task whose chunks stay together
        bool any_split = false;

        Step(const Attention &op, const Worker &worker) {
            q = worker.resolve(op.q_);
            y = worker.resolve(op.y_);
            tokens = op.rotation_.tokens(worker, std::min({q.dims[0], y.dims[0], worker.batch->tokens}));
            if (tokens == 0) return;
            rotation = op.rotation_.resolve(worker, op.kernels_);
            if (op.sinks_.present) {
                const Tensor t = worker.resolve(op.sinks_);
                sinks = t.as<float>();
                sink_stride = t.strides[0];
            }
            if (op.slopes_.present) {
                const Tensor t = worker.resolve(op.slopes_);
                slopes = t.as<float>();
                slope_stride = t.strides[0];
            }
            state = worker.resolve(op.state_).data;
            const Batch &batch = *worker.batch;
            queries = std::clamp<Int>(op.shape_.most_rows() / op.shape_.group, 1, kStripTiles * kTileSlots);
            if (queries > kTileSlots) queries = queries / kTileSlots * kTileSlots;
            if (worker.count == 1) {
                most_cost = std::numeric_limits<double>::infinity();
                return;
            }
            // Enough tasks for all threads to end at about the same time: shorter blocks of queries first, then chunks.
            const Int wanted = 4 * worker.count, heads = op.shape_.pages.heads;
            while (queries > kTileSlots && (tokens / queries + batch.sequences) * heads < wanted) queries /= 2;
            double cost = 0;
            for (Int s = 0; s < batch.sequences; ++s)
                cost += op.cost_of(sequence_of(batch, s, tokens, op.shape_.pages));
            most_cost = cost / static_cast<double>(wanted);
            Int used = 0;
            for (Int s = 0; s < batch.sequences && !any_split; ++s)
                any_split = op.plan(*this, sequence_of(batch, s, tokens, op.shape_.pages), used).partial >= 0;
        }
    };

    // Pairs of queries and keys, about, of one key-value head.
    double cost_of(const Sequence &sequence) const {
        return sequence.count() == 0
                   ? 0
                   : cost_of(sequence, sequence.position, sequence.context()) * static_cast<double>(shape_.pages.heads);
    }
    double cost_of(const Sequence &, Int first, Int last) const {
        return static_cast<double>(last - first) *
               static_cast<double>((first + last) / 2 + 1 - shape_.first_visible(first));
    }

    // `used` rows of partial results are taken by the sequences before.
    Plan plan(const Step &step, const Sequence &sequence, Int &used) const {
        Plan plan;
        if (sequence.count() == 0) return plan;
        const Int last = sequence.context() - 1;
        plan.queries = step.queries;
        plan.first_block = sequence.position / step.queries;
        plan.blocks = last / step.queries - plan.first_block + 1;
        plan.first_chunk = shape_.pages.chunk_of(shape_.first_visible(sequence.position));
        plan.chunks = shape_.pages.chunk_of(last) - plan.first_chunk + 1;
        plan.tasks = plan.blocks * shape_.pages.heads;
        if (plan.chunks > 1) {
            const Int rows = sequence.count() * shape_.heads * plan.chunks;
            const Int first = std::max(sequence.position, last / step.queries * step.queries);
            if (cost_of(sequence, first, last + 1) > step.most_cost && rows <= partial_rows_ - used) {
                plan.partial = used;
                used += rows;
                plan.tasks *= plan.chunks;
            }
        }
        return plan;
    }

    // Call f(sequence, its plan, task of the sequence) for the tasks this thread gets: prompts first, then single
    // tokens.
    template <class F>
    void for_tasks(const Step &step, const Worker &worker, F &&f) const {
        const Batch &batch = *worker.batch;
        Int claimed = worker.claim(), before = 0;
        for (const bool prompts : {true, false}) {
            Int used = 0;
            for (Int s = 0; s < batch.sequences; ++s) {
                const Sequence sequence = sequence_of(batch, s, step.tokens, shape_.pages);
                const Plan plan = this->plan(step, sequence, used);
                if ((sequence.count() > 1) != prompts) continue;
                for (; claimed < before + plan.tasks; claimed = worker.claim()) f(sequence, plan, claimed - before);
                before += plan.tasks;
            }
        }
    }

    void attend(const Step &step, const Worker &worker, const Sequence &sequence, const Plan &plan, Int task) const {
        const PageLayout &pages = shape_.pages;
        const bool split = plan.partial >= 0;
        const Int chunk = split ? task % plan.chunks : 0;
        if (split) task /= plan.chunks;
        const Int head = task % pages.heads, block = plan.first_block + plan.blocks - 1 - task / pages.heads;
        const Int first = std::max(block * plan.queries, sequence.position);
        const Int last = std::min((block + 1) * plan.queries, sequence.context());
        const Int token = sequence.begin + first - sequence.position, row = head * shape_.group;
        AttentionTask t;
        t.q = step.q.as<float>() + token * step.q.strides[0] + row * step.q.strides[1];
        t.q_token_stride = step.q.strides[0];
        t.q_head_stride = step.q.strides[1];
        t.rotation = step.rotation;
        t.token = token;
        t.position = first;
        t.queries = last - first;
        t.kv_head = head;
        t.state = step.state;
        t.blocks = sequence.blocks;
        t.sinks = step.sinks ? step.sinks + row * step.sink_stride : nullptr;
        t.slopes = step.slopes ? step.slopes + row * step.slope_stride : nullptr;
        t.sink_stride = step.sink_stride;
        t.slope_stride = step.slope_stride;
        if (split) {
            t.partial_chunk_stride = shape_.partial_size();
            t.partial_head_stride = plan.chunks * t.partial_chunk_stride;
            t.partial_token_stride = shape_.heads * t.partial_head_stride;
            t.first_chunk = plan.first_chunk + chunk;
            t.last_chunk = t.first_chunk + 1;
            t.partials = partials() + plan.partial * shape_.partial_size() +
                         (first - sequence.position) * t.partial_token_stride + row * t.partial_head_stride +
                         chunk * t.partial_chunk_stride;
        } else {
            t.y = step.y.as<float>() + token * step.y.strides[0] + row * pages.value_width;
            t.y_token_stride = step.y.strides[0];
        }
        kernels_.attention.attend(shape_, t, worker.scratch);
    }

    void merge(const Step &step, const Worker &worker) const {
        const PageLayout &pages = shape_.pages;
        const Batch &batch = *worker.batch;
        Int used = 0;
        for (Int s = 0; s < batch.sequences; ++s) {
            const Sequence sequence = sequence_of(batch, s, step.tokens, pages);
            const Plan plan = this->plan(step, sequence, used);
            if (plan.partial < 0) continue;
            const Worker::Range mine = worker.share(sequence.count() * shape_.heads);
            for (Int row = mine.begin; row < mine.end; ++row) {
                const Int i = row / shape_.heads, h = row % shape_.heads, position = sequence.position + i;
                const Int first = pages.chunk_of(shape_.first_visible(position)), last = pages.chunk_of(position);
                const float *rows =
                    partials() + (plan.partial + row * plan.chunks + first - plan.first_chunk) * shape_.partial_size();
                kernels_.attention.merge(
                    shape_, rows, shape_.partial_size(), last - first + 1,
                    step.sinks ? step.sinks + h * step.sink_stride : nullptr, worker.scratch,
                    step.y.as<float>() + (sequence.begin + i) * step.y.strides[0] + h * pages.value_width);
            }
        }
    }

    float *partials() const { return reinterpret_cast<float *>(*workspace_); }

    Attention(const Blueprint &blueprint, const Checked &checked)
        : kernels_(*blueprint.kernels),
          shape_(shape_of(checked, blueprint)),
          q_(checked.floats(blueprint.inputs, 0, "q", {-1, shape_.heads, shape_.pages.key_width})),
          rotation_(checked, blueprint, 3, shape_.pages.key_width),
          state_(pool_operand(checked, blueprint, 6, shape_.pages)),
          y_(checked.floats(blueprint.outputs, 0, "y", {-1, shape_.heads * shape_.pages.value_width})) {
        if (blueprint.has_input(1)) sinks_ = checked.floats(blueprint.inputs, 1, "sinks", {shape_.heads}, false);
        if (blueprint.has_input(2)) slopes_ = checked.floats(blueprint.inputs, 2, "slopes", {shape_.heads}, false);
        // Room for one sequence at the longest, or for many short ones; what does not fit is not split.
        constexpr Int kRows = 8192;
        const Int longest = checked.integer_or("max_context", 1, kMostSlots, 1);
        partial_rows_ = std::max(kRows, shape_.heads * (shape_.pages.chunk_of(longest - 1) + 1));
        const std::size_t bytes = static_cast<std::size_t>(partial_rows_ * shape_.partial_size()) * sizeof(float);
        workspace_ = blueprint.memory->workspace(bytes);
    }

    static AttentionShape shape_of(const Checked &checked, const Blueprint &blueprint) {
        AttentionShape shape;
        shape.pages = page_layout(checked, blueprint);
        shape.heads = checked.integer("num_heads", 1, kMostHeads);
        checked.require(shape.heads % shape.pages.heads == 0, "num_heads " + std::to_string(shape.heads) +
                                                                  " is no multiple of num_kv_heads " +
                                                                  std::to_string(shape.pages.heads));
        shape.group = shape.heads / shape.pages.heads;
        shape.scale = checked.real("scale");
        shape.window = checked.integer_or("window", 0, kMostSlots, 0);
        shape.chunk = checked.integer_or("chunk", 0, kMostSlots, 0);
        shape.softcap = blueprint.has("softcap") ? checked.real("softcap") : 0.0F;
        checked.require(shape.softcap >= 0, "softcap is negative");
        return shape;
    }

    const Kernels &kernels_;
    AttentionShape shape_;
    Operand q_;
    RotationOperands rotation_;
    Operand state_, y_, sinks_, slopes_;
    std::byte *const *workspace_ = nullptr;  // partial results, [partial_rows_, partial_size]
    Int partial_rows_ = 0;
};

}  // namespace

std::size_t state_bytes(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads,
                        std::int64_t key_width, std::int64_t value_width, const std::string &kv_dtype) {
    const auto type = page_type(kv_dtype);
    if (!type) throw BlueprintError("kv_dtype is '" + kv_dtype + "', expected float32, float16, bfloat16 or int8");
    const auto layout = PageLayout::of(*type, num_blocks, block_size, num_kv_heads, key_width, value_width);
    if (!layout)
        throw BlueprintError("no pool can have " + std::to_string(num_blocks) + " blocks of " +
                             std::to_string(block_size) + " tokens, " + std::to_string(num_kv_heads) +
                             " heads, keys of " + std::to_string(key_width) + " and values of " +
                             std::to_string(value_width));
    return layout->bytes;
}

void add_attention(Registry &registry) {
    registry.add("StoreKV",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<StoreKV>(b); });
    registry.add("Attention",
                 [](const Blueprint &b) -> std::unique_ptr<Operation> { return std::make_unique<Attention>(b); });
}

}  // namespace inferencex::cpu
