// A bundle's graph as the machine runs it: operations in order, their memory, and the threads that execute them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "mapped_files.h"
#include "memory.h"
#include "operation.h"
#include "page_work.h"
#include "thread_pool.h"

namespace inferencex::cpu {

// A step as Python hands it over: pointers and lengths, not yet believed.
struct StepArrays {
    const std::int32_t *token_ids = nullptr;
    const std::int32_t *positions = nullptr;
    const std::int32_t *sequence_offsets = nullptr;
    const std::int32_t *context_lengths = nullptr;
    const std::int32_t *block_tables = nullptr;
    const std::int32_t *logit_rows = nullptr;
    const std::int32_t *prompt_lengths = nullptr;
    std::int64_t tokens = 0, sequences = 0, table_width = 0, rows = 0;
};

// Where the graph's inputs lie in the arena (int64 there), by name; absent ones are not inputs of this graph.
struct StepInputs {
    Operand token_ids, positions, logit_rows, prompt_lengths;
};

struct Profile {
    std::string kind, name;
    std::int64_t calls = 0;
    double seconds = 0;
    Cost cost;  // summed over the calls
};

class Program {
  public:
    Program(const Kernels &kernels, int threads, const std::vector<int> &cpus);

    Memory &memory() { return memory_; }
    const Kernels &kernels() const { return kernels_; }
    int threads() const { return pool_.size(); }

    // What will be repacked is mapped from `files()`, which were added before, and takes about `bytes`: have a thread
    // see to the pages of both until the first operation is added. When all is repacked, a thread gives those of the
    // files back; what they have beyond `most_mapped` bytes goes as soon as it is repacked, and loading waits for that,
    // a tenth of a microsecond for each page.
    void expect(std::size_t bytes, std::int64_t most_mapped);
    MappedFiles &files() { return files_; }
    // Append an operation; `blueprint.kernels` and `memory` are filled in here. Throws BlueprintError.
    void add(Blueprint blueprint);
    void add(std::string kind, std::string name, std::unique_ptr<Operation> operation);
    // Everything was added: allocate the arena and scratch, and repack weights on all threads.
    void prepare(std::size_t arena_bytes, std::int64_t max_tokens, const StepInputs &inputs);
    // While one other thread of the process works beside `prepare`, leave it a processor: the thread that called
    // `prepare` waits until it is told that the processor is free.
    void lend_processor() { lent_.store(true); }
    void take_processor_back() {
        lent_.store(false);
        lent_.notify_all();
    }
    // The limits of a step that `check` holds it to: pool and tables come from the engine, but are not believed.
    void set_pool(std::int64_t num_blocks, std::int64_t block_size) {
        num_blocks_ = num_blocks, block_size_ = block_size;
    }

    // Run the first `count` operations on a step. Throws std::invalid_argument for arrays that contradict each other or
    // the limits.
    void step(const StepArrays &arrays, std::size_t count);
    // Run the operations once without a batch of an engine (tests of single operations).
    void run(const Batch &batch);

    std::byte *arena() const { return arena_; }
    std::size_t size() const { return steps_.size(); }
    std::size_t scratch_bytes() const { return scratch_bytes_; }
    void set_profiling(bool on) { profiling_ = on; }
    std::vector<Profile> profile() const;
    double seconds() const { return seconds_; }  // inside `step` so far, all steps together

  private:
    struct Step {
        std::string kind, name;
        std::unique_ptr<Operation> operation;
        Profile profile;
        std::vector<Memory::Room> sources{};  // of what it repacks, in mapped files
    };
    // On a cache line of its own: threads claim tasks from it while others spin nearby.
    struct alignas(64) Counter {
        std::atomic<std::int64_t> value{0};
    };

    void repack();
    void check(const StepArrays &arrays) const;
    void run_first(std::size_t count, const Batch &batch);
    void execute(int thread);

    const Kernels &kernels_;
    Memory memory_;
    MappedFiles files_;
    std::int64_t most_mapped_ = 0;
    PageWork page_work_;
    ThreadPool pool_;
    std::vector<Step> steps_;
    std::unique_ptr<Counter[]> counters_;
    std::byte *arena_ = nullptr;
    std::vector<std::byte *> scratch_;
    std::size_t scratch_bytes_ = 0;
    std::int64_t max_tokens_ = 0;
    std::int64_t num_blocks_ = 0, block_size_ = 1;
    StepInputs inputs_;
    Batch batch_;
    std::size_t count_ = 0;  // operations that this run has
    bool profiling_ = false;
    std::atomic<bool> lent_{false};
    double seconds_ = 0;
};

const Registry &registry();

}  // namespace inferencex::cpu
