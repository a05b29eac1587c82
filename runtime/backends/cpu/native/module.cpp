// The native module `_cpu`: programs built from Python, operation by operation, and executed step by step.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "attention_state.h"
#include "fallback.h"
#include "limits.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace inferencex::cpu {
namespace {

using Dims = std::vector<std::tuple<std::int64_t, int>>;
using Int32 = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr const char *kTypeNames[] = {"f32", "f16", "bf16", "f8e4m3", "i64", "i32", "i8", "u8", "bool"};

DType dtype_named(const std::string &name) {
    for (std::size_t i = 0; i < std::size(kTypeNames); ++i)
        if (name == kTypeNames[i]) return static_cast<DType>(i);
    throw BlueprintError("no element type is called " + name);
}

// Memory of the program itself, for operands that outlive a step: layer state.
struct Region {
    std::byte *data;
    std::size_t bytes;
};

// The buffer of an array that a program reads (or a test writes) for as long as it lives.
struct Constant {
    explicit Constant(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    }
    ~Constant() { PyBuffer_Release(&view); }
    Constant(const Constant &) = delete;
    Constant &operator=(const Constant &) = delete;
    Py_buffer view{};
};

Extent extent_of(const std::tuple<std::int64_t, int> &pair) {
    const auto [coefficient, symbol] = pair;
    if (symbol < 0 || symbol > 2) throw BlueprintError("a dimension has symbol " + std::to_string(symbol));
    if (coefficient < 0 || coefficient > (std::int64_t{1} << 48))
        throw BlueprintError("a dimension has size " + std::to_string(coefficient));
    return {coefficient, static_cast<Symbol>(symbol)};
}

// Bytes from the operand's first element to the end of its last; only repeated elements may depend on the step.
std::size_t constant_bytes(const Operand &operand) {
    std::int64_t last = 0;
    for (int i = 0; i < operand.rank; ++i) {
        if (operand.dims[i].coefficient == 0) return 0;
        if (operand.strides[i].coefficient == 0) continue;
        if (operand.dims[i].symbol != Symbol::none || operand.strides[i].symbol != Symbol::none)
            throw BlueprintError("a constant has a dimension that depends on the step");
        std::int64_t reach;
        if (__builtin_mul_overflow(operand.dims[i].coefficient - 1, operand.strides[i].coefficient, &reach) ||
            __builtin_add_overflow(last, reach, &last))
            throw BlueprintError("a constant has an absurd size");
    }
    return (static_cast<std::size_t>(last) + 1) * size_of(operand.dtype);
}

Operand make_operand(const std::string &dtype, const Dims &dims, const Dims &strides, std::size_t offset) {
    if (dims.size() != strides.size() || dims.size() > kMaxRank)
        throw BlueprintError("an operand of rank " + std::to_string(dims.size()) + " has " +
                             std::to_string(strides.size()) + " strides; at most rank " + std::to_string(kMaxRank));
    Operand operand;
    operand.present = true;
    operand.dtype = dtype_named(dtype);
    operand.rank = static_cast<int>(dims.size());
    operand.offset = offset;
    for (std::size_t i = 0; i < dims.size(); ++i) {
        operand.dims[i] = extent_of(dims[i]);
        operand.strides[i] = extent_of(strides[i]);
    }
    return operand;
}

// Bytes from the arena's start to the end of an operand's last element in a step of `tokens` tokens and as many rows.
// Exact up to 2^53; what is larger is past any arena.
double arena_reach(const Operand &operand, std::int64_t tokens) {
    const auto at = [tokens](const Extent &extent) {
        return static_cast<double>(extent.coefficient) *
               (extent.symbol == Symbol::none ? 1 : static_cast<double>(tokens));
    };
    double last = 0;
    for (int i = 0; i < operand.rank; ++i) {
        if (operand.dims[i].coefficient == 0) return 0;
        last += (at(operand.dims[i]) - 1) * at(operand.strides[i]);
    }
    return static_cast<double>(operand.offset) + (last + 1) * static_cast<double>(size_of(operand.dtype));
}

// A program and the arrays it refers to.
class PyProgram {
  public:
    PyProgram(int threads, const std::vector<int> &cpus, const std::optional<std::string> &isa)
        : program_(kernels_named(isa), threads, cpus) {}

    Program &program() { return program_; }

    void expect(std::size_t bytes, const std::vector<nb::object> &sources, const std::vector<int> &descriptors,
                std::int64_t most_mapped) {
        if (!descriptors.empty() && descriptors.size() != sources.size())
            throw BlueprintError(std::to_string(descriptors.size()) + " descriptors were given for " +
                                 std::to_string(sources.size()) + " files");
        for (std::size_t i = 0; i < sources.size(); ++i) {
            constants_.push_back(std::make_shared<Constant>(sources[i]));
            const Py_buffer &view = constants_.back()->view;
            // Memory that somebody writes to may have no file behind it, and would be lost.
            if (!view.readonly) throw BlueprintError("an array that weights come from can be written to");
            program_.files().add({static_cast<std::byte *>(view.buf), static_cast<std::size_t>(view.len)},
                                 descriptors.empty() ? -1 : descriptors[i]);
        }
        program_.expect(bytes, most_mapped);
    }

    Operand constant(const std::string &dtype, const Dims &dims, const Dims &strides, std::size_t offset,
                     nb::object array) {
        auto held = std::make_shared<Constant>(array);
        Operand operand = make_operand(dtype, dims, strides, offset);
        const std::size_t bytes = constant_bytes(operand);
        const auto available = static_cast<std::size_t>(held->view.len);
        if (offset > available || bytes > available - offset)
            throw BlueprintError("a constant of " + std::to_string(bytes) + " bytes lies in an array of " +
                                 std::to_string(available));
        operand.constant = static_cast<std::byte *>(held->view.buf);
        operand.constant_bytes = bytes;
        constants_.push_back(std::move(held));
        return operand;
    }

    Region allocate(std::size_t bytes) { return {program_.memory().allocate_apart(bytes), bytes}; }

    static Operand region_operand(const Region &region, std::size_t offset, std::optional<std::size_t> bytes) {
        if (offset > region.bytes || bytes.value_or(0) > region.bytes - offset)
            throw BlueprintError("an operand lies outside its region of " + std::to_string(region.bytes) + " bytes");
        const std::size_t length = bytes.value_or(region.bytes - offset);
        Operand operand = make_operand("u8", {{static_cast<std::int64_t>(length), 0}}, {{1, 0}}, offset);
        operand.constant = region.data;
        return operand;
    }

    void add(const std::string &kind, const std::string &name, const std::vector<std::optional<Operand>> &inputs,
             const std::vector<std::optional<Operand>> &outputs, std::map<std::string, Attribute> attributes) {
        Blueprint blueprint;
        blueprint.kind = kind;
        blueprint.name = name;
        for (const auto &input : inputs) blueprint.inputs.push_back(input.value_or(Operand{}));
        for (const auto &output : outputs) blueprint.outputs.push_back(output.value_or(Operand{}));
        expect_in_arena(kind + " " + name, inputs);
        expect_in_arena(kind + " " + name, outputs);
        blueprint.attributes = std::move(attributes);
        program_.add(std::move(blueprint));
    }

    // `function` is called with the inputs and outputs of the step as arrays; it fills the outputs.
    void add_fallback(const std::string &kind, const std::string &name,
                      const std::vector<std::optional<Operand>> &inputs,
                      const std::vector<std::optional<Operand>> &outputs, nb::callable function) {
        callables_.push_back(function);
        nb::handle callable = callables_.back();
        expect_in_arena(kind + " " + name, inputs);
        expect_in_arena(kind + " " + name, outputs);
        auto call = [this, callable, inputs, outputs](const Worker &worker) {
            if (error_) return;
            const nb::gil_scoped_acquire acquired;
            try {
                callable(arrays(inputs, worker), arrays(outputs, worker));
            } catch (...) {
                error_ = std::current_exception();
            }
        };
        program_.add(kind, name, std::make_unique<Fallback>(std::move(call)));
    }

    void prepare(std::size_t arena_bytes, std::int64_t max_tokens, const std::map<std::string, Operand> &inputs,
                 const Operand &logits, std::int64_t num_blocks, std::int64_t block_size,
                 const std::optional<Operand> &hidden, std::size_t hidden_operations) {
        StepInputs step_inputs;
        const auto find = [&](const char *name) {
            const auto it = inputs.find(name);
            return it == inputs.end() ? Operand{} : it->second;
        };
        step_inputs.token_ids = find("token_ids");
        step_inputs.positions = find("positions");
        step_inputs.logit_rows = find("logit_rows");
        step_inputs.prompt_lengths = find("prompt_lengths");
        logits_ = logits;
        hidden_ = hidden.value_or(Operand{});
        hidden_operations_ = hidden_operations;
        for (const auto &[name, operand] : inputs) expect_in_arena(name, {operand});
        expect_in_arena("the logits", {logits});
        expect_in_arena("the hidden states", {hidden});
        for (const auto &[user, operand] : in_arena_)
            if (arena_reach(operand, max_tokens) > static_cast<double>(arena_bytes))
                throw BlueprintError(user + ": an operand ends beyond the arena of " + std::to_string(arena_bytes) +
                                     " bytes");
        program_.set_pool(num_blocks, block_size);
        const nb::gil_scoped_release released;
        program_.prepare(arena_bytes, max_tokens, step_inputs);
    }

    nb::object step(nb::handle self, Int32 token_ids, Int32 positions, Int32 sequence_offsets, Int32 context_lengths,
                    Table block_tables, Int32 logit_rows, Int32 prompt_lengths, bool hidden) {
        if (hidden && !hidden_.present) throw std::invalid_argument("step: this program has no hidden states");
        const std::size_t tokens = token_ids.shape(0), sequences = context_lengths.shape(0);
        if (positions.shape(0) != tokens || prompt_lengths.shape(0) != tokens ||
            sequence_offsets.shape(0) != sequences + 1 || block_tables.shape(0) != sequences)
            throw std::invalid_argument("step: the arrays of the batch have lengths that contradict each other");
        StepArrays arrays;
        arrays.token_ids = token_ids.data();
        arrays.positions = positions.data();
        arrays.sequence_offsets = sequence_offsets.data();
        arrays.context_lengths = context_lengths.data();
        arrays.block_tables = block_tables.data();
        arrays.logit_rows = logit_rows.data();
        arrays.prompt_lengths = prompt_lengths.data();
        arrays.tokens = static_cast<std::int64_t>(tokens);
        arrays.sequences = static_cast<std::int64_t>(sequences);
        arrays.table_width = static_cast<std::int64_t>(block_tables.shape(1));
        arrays.rows = static_cast<std::int64_t>(logit_rows.shape(0));
        {
            const nb::gil_scoped_release released;
            program_.step(arrays, hidden ? hidden_operations_ : program_.size());
        }
        raise_pending();
        const Operand &result = hidden ? hidden_ : logits_;
        const std::size_t shape[2] = {logit_rows.shape(0), static_cast<std::size_t>(result.dims[1].coefficient)};
        return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(program_.arena() + result.offset, 2, shape, self));
    }

    // Run every operation once; its operands are all constants, so the step has no size.
    void run(std::int64_t tokens, std::int64_t rows, std::optional<Int32> positions,
             std::optional<Int32> sequence_offsets, std::optional<Int32> context_lengths,
             std::optional<Table> block_tables) {
        Batch batch;
        batch.tokens = tokens;
        batch.rows = rows;
        if (positions) batch.positions = positions->data();
        if (sequence_offsets) batch.sequence_offsets = sequence_offsets->data();
        if (context_lengths) {
            batch.context_lengths = context_lengths->data();
            batch.sequences = static_cast<std::int64_t>(context_lengths->shape(0));
        }
        if (block_tables) {
            batch.block_tables = block_tables->data();
            batch.table_width = static_cast<std::int64_t>(block_tables->shape(1));
        }
        {
            const nb::gil_scoped_release released;
            program_.run(batch);
        }
        raise_pending();
    }

  private:
    static const Kernels &kernels_named(const std::optional<std::string> &isa) {
        if (!isa) return choose_kernels();
        std::size_t count;
        const Kernels *const *tables = available_kernels(count);
        for (std::size_t i = 0; i < count; ++i)
            if (*isa == tables[i]->isa) return *tables[i];
        throw std::invalid_argument("this machine does not run the kernels called " + *isa);
    }

    // Have `prepare` check that operands lie in the arena, whose size is known only then.
    void expect_in_arena(const std::string &user, const std::vector<std::optional<Operand>> &operands) {
        for (const auto &operand : operands)
            if (operand && operand->constant == nullptr) in_arena_.emplace_back(user, *operand);
    }

    nb::list arrays(const std::vector<std::optional<Operand>> &operands, const Worker &worker) const {
        nb::list list;
        for (const auto &operand : operands) {
            if (!operand) {
                list.append(nb::none());
                continue;
            }
            const Tensor t = worker.resolve(*operand);
            std::size_t shape[kMaxRank];
            std::int64_t strides[kMaxRank];
            for (int i = 0; i < t.rank; ++i) {
                shape[i] = static_cast<std::size_t>(t.dims[i]);
                strides[i] = t.strides[i];
            }
            nb::dlpack::dtype type = nb::dtype<float>();
            switch (t.dtype) {
                case DType::i64:
                    type = nb::dtype<std::int64_t>();
                    break;
                case DType::i32:
                    type = nb::dtype<std::int32_t>();
                    break;
                case DType::i8:
                    type = nb::dtype<std::int8_t>();
                    break;
                case DType::u8:
                case DType::f8e4m3:
                    type = nb::dtype<std::uint8_t>();
                    break;
                case DType::boolean:
                    type = nb::dtype<bool>();
                    break;
                case DType::f16:
                case DType::bf16:
                    type = nb::dtype<std::uint16_t>();
                    break;
                case DType::f32:
                    break;
            }
            list.append(nb::cast(
                nb::ndarray<nb::numpy>(t.data, static_cast<std::size_t>(t.rank), shape, nb::none(), strides, type),
                nb::rv_policy::reference));
        }
        return list;
    }

    void raise_pending() {
        if (error_) {
            std::exception_ptr error = nullptr;
            std::swap(error, error_);
            std::rethrow_exception(error);
        }
    }

    std::vector<std::shared_ptr<Constant>> constants_;
    std::vector<nb::callable> callables_;
    std::vector<std::pair<std::string, Operand>> in_arena_;
    Operand logits_;
    Operand hidden_;  // what the first `hidden_operations_` operations compute, if anybody may ask for it
    std::size_t hidden_operations_ = 0;
    std::exception_ptr error_;
    Program program_;  // last, so that its threads end before what they use
};

std::vector<std::string> available_isas() {
    std::size_t count;
    const Kernels *const *tables = available_kernels(count);
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) names.emplace_back(tables[i]->isa);
    return names;
}

}  // namespace
}  // namespace inferencex::cpu

NB_MODULE(_cpu, m) {
    using namespace inferencex::cpu;
    m.doc() = "Programs of the CPU backend.";
    nb::set_leak_warnings(false);  // a program that lives until the interpreter ends is no leak
    nb::exception<BlueprintError>(m, "BlueprintError", PyExc_ValueError);
    nb::class_<Operand>(m, "Operand");
    nb::class_<Region>(m, "Region").def_ro("bytes", &Region::bytes);
    m.def("operand", &make_operand, "dtype"_a, "dims"_a, "strides"_a, "offset"_a);
    m.def("available_isas", &available_isas);
    m.def("chosen_isa", [] { return std::string(choose_kernels().isa); });
    m.def("operation_kinds", [] {
        std::vector<std::string> kinds;
        for (const auto &[kind, factory] : registry().factories()) kinds.push_back(kind);
        return kinds;
    });
    m.def("state_bytes", &state_bytes, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "key_width"_a, "value_width"_a,
          "kv_dtype"_a);
    m.def(
        "block_layout",
        [](std::int64_t features, std::int64_t group, bool whole) {
            if (features < 1 || group < 1 || features > (std::int64_t{1} << 40))
                throw BlueprintError("rows of " + std::to_string(features) +
                                     " features are not quantized in groups of " + std::to_string(group));
            const BlockLayout layout = whole ? BlockLayout::whole(features) : BlockLayout(features, group);
            return std::make_tuple(layout.blocks, layout.row_bytes());
        },
        "features"_a, "group"_a, "whole"_a = false);
    m.def("measure_integer_peak", &measure_integer_peak, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("measure_bandwidth", &measure_bandwidth, "threads"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<PyProgram>(m, "Program")
        .def(nb::init<int, const std::vector<int> &, const std::optional<std::string> &>(), "threads"_a,
             "cpus"_a = std::vector<int>{}, "isa"_a = nb::none())
        .def("expect", &PyProgram::expect, "bytes"_a, "sources"_a, "descriptors"_a = std::vector<int>{},
             "most_mapped"_a = std::int64_t{512} << 20)
        .def("constant", &PyProgram::constant, "dtype"_a, "dims"_a, "strides"_a, "offset"_a, "array"_a)
        .def("allocate", &PyProgram::allocate, "bytes"_a)
        .def_static("region_operand", &PyProgram::region_operand, "region"_a, "offset"_a = 0, "bytes"_a = nb::none())
        .def("add", &PyProgram::add, "kind"_a, "name"_a, "inputs"_a, "outputs"_a, "attributes"_a)
        .def("add_fallback", &PyProgram::add_fallback, "kind"_a, "name"_a, "inputs"_a, "outputs"_a, "function"_a)
        .def("prepare", &PyProgram::prepare, "arena_bytes"_a, "max_tokens"_a, "inputs"_a, "logits"_a, "num_blocks"_a,
             "block_size"_a, "hidden"_a = nb::none(), "hidden_operations"_a = 0)
        .def(
            "step",
            [](nb::handle self, Int32 token_ids, Int32 positions, Int32 sequence_offsets, Int32 context_lengths,
               Table block_tables, Int32 logit_rows, Int32 prompt_lengths, bool hidden) {
                return nb::cast<PyProgram &>(self).step(self, token_ids, positions, sequence_offsets, context_lengths,
                                                        block_tables, logit_rows, prompt_lengths, hidden);
            },
            "token_ids"_a, "positions"_a, "sequence_offsets"_a, "context_lengths"_a, "block_tables"_a, "logit_rows"_a,
            "prompt_lengths"_a, "hidden"_a = false)
        .def("lend_processor", [](PyProgram &self) { self.program().lend_processor(); })
        .def("take_processor_back", [](PyProgram &self) { self.program().take_processor_back(); })
        .def("run", &PyProgram::run, "tokens"_a = 1, "rows"_a = 1, "positions"_a = nb::none(),
             "sequence_offsets"_a = nb::none(), "context_lengths"_a = nb::none(), "block_tables"_a = nb::none())
        .def("set_profiling", [](PyProgram &self, bool on) { self.program().set_profiling(on); })
        .def("profile",
             [](PyProgram &self) {
                 std::vector<std::tuple<std::string, std::string, std::int64_t, double, double, double>> rows;
                 for (const Profile &p : self.program().profile())
                     rows.emplace_back(p.kind, p.name, p.calls, p.seconds, p.cost.bytes, p.cost.operations);
                 return rows;
             })
        .def_prop_ro("seconds", [](PyProgram &self) { return self.program().seconds(); })
        .def_prop_ro("threads", [](PyProgram &self) { return self.program().threads(); })
        .def_prop_ro("isa", [](PyProgram &self) { return std::string(self.program().kernels().isa); })
        .def_prop_ro("memory_bytes", [](PyProgram &self) { return self.program().memory().allocated(); })
        .def_prop_ro("scratch_bytes", [](PyProgram &self) { return self.program().scratch_bytes(); });
}
