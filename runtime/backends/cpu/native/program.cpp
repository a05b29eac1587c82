#include "program.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>

namespace inferencex::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// More is not made ready before it is needed: the thread would hardly come to it.
constexpr std::size_t kMostExpected = std::size_t{256} << 20;
constexpr std::size_t kMostRoom = std::size_t{16} << 30;  // of addresses; it is made for what is expected in words only

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

void widen(const std::int32_t *from, std::int64_t n, const Operand &to, std::byte *arena) {
    if (!to.present) return;
    auto *out = reinterpret_cast<std::int64_t *>(arena + to.offset);
    for (std::int64_t i = 0; i < n; ++i) out[i] = from[i];
}

}  // namespace

const Registry &registry() {
    static const Registry all = [] {
        Registry r;
        add_elementwise(r);
        add_binary(r);
        add_cast(r);
        add_arrangement(r);
        add_indexing(r);
        add_scatter(r);
        add_reductions(r);
        add_along_axis(r);
        add_matmul(r);
        add_embedding(r);
        add_norms(r);
        add_gating(r);
        add_fake_quantize(r);
        add_integer_linear(r);
        add_float_linear(r);
        add_experts(r);
        add_rotary(r);
        add_attention(r);
        return r;
    }();
    return all;
}

Program::Program(const Kernels &kernels, int threads, const std::vector<int> &cpus)
    : kernels_(kernels), pool_(threads, cpus) {}

void Program::expect(std::size_t bytes, std::int64_t most_mapped) {
    if (!steps_.empty()) throw BlueprintError("memory is made ready before operations are added");
    most_mapped_ = most_mapped;
    // In one room for all, no weight leaves the end of a slab unused for being too large for it.
    Memory::Room room{nullptr, 0};
    try {
        room = memory_.make_room(std::min(bytes, kMostRoom));
    } catch (const std::bad_alloc &) {  // less may turn out to be needed: weights get slabs of their own
    }
    std::size_t left = std::min({bytes, kMostExpected, room.bytes});
    std::vector<Pages> pages{{room.begin, left, Pages::Wish::writable}};
    for (const Memory::Room &source : files_.memory()) {
        const std::size_t part = std::min(source.bytes, left);
        pages.push_back({source.begin, part, Pages::Wish::readable});
        left -= part;
    }
    page_work_.start(std::move(pages));
}

void Program::add(Blueprint blueprint) {
    const auto found = registry().factories().find(blueprint.kind);
    if (found == registry().factories().end()) throw BlueprintError("no operation is called " + blueprint.kind);
    page_work_.stop();                                        // operations may write to the memory they take
    if (steps_.empty()) files_.set_ready(page_work_.left());  // as `expect` began it
    blueprint.kernels = &kernels_;
    blueprint.memory = &memory_;
    blueprint.files = &files_;
    std::unique_ptr<Operation> operation;
    try {
        operation = found->second(blueprint);
    } catch (const std::out_of_range &) {  // an attribute that is not there
        throw BlueprintError(blueprint.kind + " " + blueprint.name + ": an attribute is missing");
    } catch (const std::bad_variant_access &) {
        throw BlueprintError(blueprint.kind + " " + blueprint.name + ": an attribute has the wrong type");
    }
    const bool repacks = operation->prepare_tasks() > 0;
    add(blueprint.kind, blueprint.name, std::move(operation));
    if (!repacks) return;
    for (const Operand &input : blueprint.inputs)
        if (input.constant_bytes != 0 && files_.hold(input.constant + input.offset, input.constant_bytes))
            steps_.back().sources.push_back({input.constant + input.offset, input.constant_bytes});
}

void Program::add(std::string kind, std::string name, std::unique_ptr<Operation> operation) {
    steps_.push_back({std::move(kind), std::move(name), std::move(operation), {}});
}

void Program::prepare(std::size_t arena_bytes, std::int64_t max_tokens, const StepInputs &inputs) {
    inputs_ = inputs;
    max_tokens_ = max_tokens;
    arena_ = memory_.allocate(arena_bytes);
    for (const Step &step : steps_)
        scratch_bytes_ = std::max(scratch_bytes_, step.operation->scratch_bytes(max_tokens, pool_.size()));
    for (int i = 0; i < pool_.size(); ++i) scratch_.push_back(memory_.allocate(scratch_bytes_));
    counters_ = std::make_unique<Counter[]>(steps_.size() + 1);

    repack();

    const Memory::Room rest = memory_.take_rest();
    if (files_.empty()) return;
    std::vector<Pages> pages;
    for (const Memory::Room &file : files_.memory()) pages.push_back({file.begin, file.bytes, Pages::Wish::given_back});
    pages.push_back({rest.begin, rest.bytes, Pages::Wish::given_back});
    page_work_.start(std::move(pages), PageWork::AtEnd::trim_heap);
}

void Program::repack() {
    struct Repacking {
        Step *step;
        std::int64_t first;  // of its tasks in the order of all
        std::int64_t tasks;
        std::atomic<std::int64_t> *done;
    };
    struct Preparation {
        std::vector<Repacking> steps;
        std::int64_t total = 0;
        std::atomic<std::int64_t> next{0};
        std::atomic<std::int64_t> to_give_back;  // bytes, before all is repacked
        const std::atomic<bool> *lent;
    } preparation;
    preparation.lent = &lent_;
    preparation.to_give_back = static_cast<std::int64_t>(files_.bytes()) - most_mapped_;
    const auto done = std::make_unique<std::atomic<std::int64_t>[]>(steps_.size());
    for (std::size_t i = 0; i < steps_.size(); ++i) {
        const std::int64_t tasks = steps_[i].operation->prepare_tasks();
        if (tasks > 0) preparation.steps.push_back({&steps_[i], preparation.total, tasks, &done[i]});
        preparation.total += tasks;
    }
    pool_.run(
        [](void *context, int thread) {
            auto &p = *static_cast<Preparation *>(context);
            if (thread == 0) p.lent->wait(true);
            for (std::int64_t i; (i = p.next.fetch_add(1)) < p.total;) {
                auto after =
                    std::upper_bound(p.steps.begin(), p.steps.end(), i,
                                     [](std::int64_t value, const Repacking &step) { return value < step.first; });
                const Repacking &repacking = *--after;
                repacking.step->operation->prepare(i - repacking.first);
                if (repacking.done->fetch_add(1) + 1 < repacking.tasks || p.to_give_back.load() <= 0) continue;
                for (const Memory::Room &source : repacking.step->sources) {
                    give_back(source.begin, source.bytes);
                    p.to_give_back.fetch_sub(static_cast<std::int64_t>(source.bytes));
                }
            }
        },
        &preparation);
}

void Program::check(const StepArrays &a) const {
    const auto refuse = [](const std::string &what) { throw std::invalid_argument("step: " + what); };
    if (a.tokens < 1 || a.tokens > max_tokens_)
        refuse(std::to_string(a.tokens) + " tokens; this program was compiled for 1 to " + std::to_string(max_tokens_));
    if (a.sequences < 1 || a.sequence_offsets[0] != 0 || a.sequence_offsets[a.sequences] != a.tokens)
        refuse("sequence_offsets do not span the " + std::to_string(a.tokens) + " tokens");
    if (a.rows > a.tokens) refuse("more logit_rows than tokens");
    for (std::int64_t s = 0; s < a.sequences; ++s) {
        if (a.sequence_offsets[s + 1] > a.tokens) refuse("sequence_offsets do not ascend to the number of tokens");
        const std::int64_t count = a.sequence_offsets[s + 1] - a.sequence_offsets[s];
        const std::int64_t context = a.context_lengths[s];
        if (count < 1 || context < count) refuse("sequence " + std::to_string(s) + " has more new tokens than context");
        const std::int64_t blocks = (context + block_size_ - 1) / block_size_;
        if (blocks > a.table_width) refuse("sequence " + std::to_string(s) + " has a context beyond its block table");
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::int64_t block = a.block_tables[s * a.table_width + b];
            if (block < 0 || block >= num_blocks_)
                refuse("sequence " + std::to_string(s) + " has block " + std::to_string(block) + " of a pool of " +
                       std::to_string(num_blocks_));
        }
        for (std::int64_t i = 0; i < count; ++i)
            if (a.positions[a.sequence_offsets[s] + i] != context - count + i)
                refuse("positions of sequence " + std::to_string(s) + " are not the last of its context");
    }
    for (std::int64_t r = 0; r < a.rows; ++r)
        if (a.logit_rows[r] < 0 || a.logit_rows[r] >= a.tokens) refuse("a logit row is outside the step");
}

void Program::step(const StepArrays &a, std::size_t count) {
    check(a);
    const auto began = Clock::now();
    widen(a.token_ids, a.tokens, inputs_.token_ids, arena_);
    widen(a.positions, a.tokens, inputs_.positions, arena_);
    widen(a.logit_rows, a.rows, inputs_.logit_rows, arena_);
    widen(a.prompt_lengths, a.tokens, inputs_.prompt_lengths, arena_);
    Batch batch;
    batch.tokens = a.tokens;
    batch.rows = a.rows;
    batch.sequences = a.sequences;
    batch.table_width = a.table_width;
    batch.positions = a.positions;
    batch.sequence_offsets = a.sequence_offsets;
    batch.context_lengths = a.context_lengths;
    batch.block_tables = a.block_tables;
    run_first(count, batch);
    seconds_ += seconds_since(began);
}

void Program::run(const Batch &batch) { run_first(steps_.size(), batch); }

void Program::run_first(std::size_t count, const Batch &batch) {
    batch_ = batch;
    count_ = std::min(count, steps_.size());
    for (std::size_t i = 0; i < count_; ++i) counters_[i].value.store(0, std::memory_order_relaxed);
    pool_.run([](void *context, int thread) { static_cast<Program *>(context)->execute(thread); }, this);
}

void Program::execute(int thread) {
    Worker worker;
    worker.index = thread;
    worker.count = pool_.size();
    worker.arena = arena_;
    worker.batch = &batch_;
    worker.scratch = scratch_[thread];
    worker.pool = &pool_;
    worker.wait = [](void *pool) { static_cast<ThreadPool *>(pool)->barrier(); };
    for (std::size_t i = 0; i < count_; ++i) {
        worker.counter = &counters_[i].value;
        Step &step = steps_[i];
        if (!profiling_) {
            step.operation->run(worker);
            pool_.barrier();
            continue;
        }
        const auto began = Clock::now();
        step.operation->run(worker);
        pool_.barrier();
        if (thread == 0) {
            step.profile.seconds += seconds_since(began);
            step.profile.calls += 1;
            const Cost cost = step.operation->cost(batch_);
            step.profile.cost.bytes += cost.bytes;
            step.profile.cost.operations += cost.operations;
        }
    }
}

std::vector<Profile> Program::profile() const {
    std::vector<Profile> all;
    for (const Step &step : steps_) {
        all.push_back(step.profile);
        all.back().kind = step.kind;
        all.back().name = step.name;
    }
    return all;
}

}  // namespace inferencex::cpu
