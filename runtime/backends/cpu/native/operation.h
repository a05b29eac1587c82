// One operation of a program: what it is built from, and what every thread of the pool calls in every step.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "tensor.h"

namespace inferencex::cpu {

struct Kernels;
class MappedFiles;
class Memory;

// The step's batch, as base.py's StepBatch lays it out; pointers are valid during the step.
struct Batch {
    std::int64_t tokens = 0;     // T
    std::int64_t rows = 0;       // R
    std::int64_t sequences = 0;  // S
    std::int64_t table_width = 0;
    const std::int32_t *positions = nullptr;         // [T]
    const std::int32_t *sequence_offsets = nullptr;  // [S + 1]
    const std::int32_t *context_lengths = nullptr;   // [S]
    const std::int32_t *block_tables = nullptr;      // [S, table_width]
};

// What a thread has during a step. All threads run every operation; they share its work by `share` or `claim`.
struct Worker {
    int index = 0;
    int count = 1;
    std::byte *arena = nullptr;
    const Batch *batch = nullptr;
    std::byte *scratch = nullptr;  // this thread's own, `scratch_bytes` of the largest operation, 64-byte aligned
    std::atomic<std::int64_t> *counter = nullptr;  // the current operation's, 0 when it starts

    struct Range {
        std::int64_t begin, end;
    };
    // Wait for the other threads within an operation; all of them must call it equally often.
    void (*wait)(void *) = nullptr;
    void *pool = nullptr;
    void barrier() const { wait(pool); }

    // This thread's contiguous part of `total` tasks, the same in every step of that size.
    Range share(std::int64_t total) const { return {total * index / count, total * (index + 1) / count}; }
    // The next task nobody has; past the last one the operation is over for this thread.
    std::int64_t claim() const { return counter->fetch_add(1, std::memory_order_relaxed); }

    Tensor resolve(const Operand &operand) const {
        Tensor t;
        t.data = (operand.constant ? operand.constant : arena) + operand.offset;
        t.dtype = operand.dtype;
        t.rank = operand.rank;
        for (int i = 0; i < operand.rank; ++i) {
            t.dims[i] = operand.dims[i].at(batch->tokens, batch->rows);
            t.strides[i] = operand.strides[i].at(batch->tokens, batch->rows);
        }
        return t;
    }
};

// What an operation costs in a step: for profiles and fractions of the machine's limits.
struct Cost {
    double bytes = 0;       // read and written in memory, weights included
    double operations = 0;  // multiplications and additions
};

using Attribute = std::variant<std::int64_t, double, std::string, std::vector<std::int64_t>>;

// Everything an operation is built from. Pointers of constants stay valid until `prepare` is over for weights that
// are repacked, and as long as the program lives for all others.
struct Blueprint {
    std::string kind;
    std::string name;  // of the first output, for messages and profiles
    std::vector<Operand> inputs;
    std::vector<Operand> outputs;
    std::map<std::string, Attribute> attributes;
    const Kernels *kernels = nullptr;    // of the instruction set chosen at start
    Memory *memory = nullptr;            // where packed weights go
    const MappedFiles *files = nullptr;  // that constants may be mapped from

    std::int64_t integer(const std::string &key) const { return std::get<std::int64_t>(attributes.at(key)); }
    double real(const std::string &key) const {
        const Attribute &value = attributes.at(key);
        return std::holds_alternative<double>(value) ? std::get<double>(value)
                                                     : static_cast<double>(std::get<std::int64_t>(value));
    }
    const std::string &text(const std::string &key) const { return std::get<std::string>(attributes.at(key)); }
    const std::vector<std::int64_t> &integers(const std::string &key) const {
        return std::get<std::vector<std::int64_t>>(attributes.at(key));
    }
    bool has(const std::string &key) const { return attributes.contains(key); }
    bool has_input(std::size_t i) const { return i < inputs.size() && inputs[i].present; }
};

// A malformed blueprint (wrong shape, type or attribute). Constructors throw it; it becomes BackendError in Python.
struct BlueprintError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Operation {
  public:
    virtual ~Operation() = default;
    // Called by all threads of a step at once, between two barriers; allocates nothing, throws nothing.
    virtual void run(const Worker &worker) const = 0;
    virtual std::size_t scratch_bytes(std::int64_t /*max_tokens*/, int /*threads*/) const { return 0; }
    virtual Cost cost(const Batch & /*batch*/) const { return {}; }
    // Repacking of weights while loading: independent tasks, run by the pool in any order.
    virtual std::int64_t prepare_tasks() const { return 0; }
    virtual void prepare(std::int64_t /*task*/) {}
};

using Factory = std::unique_ptr<Operation> (*)(const Blueprint &);

// Kinds of operations by name. Each file of operations/ adds its own in a function that `register_all` calls.
class Registry {
  public:
    void add(const std::string &kind, Factory factory) { factories_[kind] = factory; }
    const std::map<std::string, Factory> &factories() const { return factories_; }

  private:
    std::map<std::string, Factory> factories_;
};

void add_elementwise(Registry &);     // operations/elementwise.cpp
void add_binary(Registry &);          // operations/binary.cpp
void add_cast(Registry &);            // operations/cast.cpp
void add_arrangement(Registry &);     // operations/arrangement.cpp: Copy, Concat, ...
void add_indexing(Registry &);        // operations/indexing.cpp
void add_scatter(Registry &);         // operations/scatter.cpp
void add_reductions(Registry &);      // operations/reductions.cpp
void add_along_axis(Registry &);      // operations/along_axis.cpp: Softmax, CumSum, TopK
void add_matmul(Registry &);          // operations/matmul.cpp
void add_embedding(Registry &);       // operations/embedding.cpp
void add_norms(Registry &);           // operations/norms.cpp
void add_gating(Registry &);          // operations/gating.cpp
void add_fake_quantize(Registry &);   // operations/fake_quantize.cpp
void add_integer_linear(Registry &);  // operations/integer_linear.cpp
void add_float_linear(Registry &);    // operations/float_linear.cpp
void add_experts(Registry &);         // operations/experts.cpp
void add_rotary(Registry &);          // operations/rotary.cpp
void add_attention(Registry &);       // operations/attention.cpp

}  // namespace inferencex::cpu
