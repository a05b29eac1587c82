#include "blueprint_checks.h"

#include <algorithm>

namespace inferencex::cpu::checks {
namespace {

const Attribute &attribute(const Blueprint &blueprint, const char *key) {
    const auto found = blueprint.attributes.find(key);
    if (found == blueprint.attributes.end()) refuse(blueprint, std::string("the attribute '") + key + "' is missing");
    return found->second;
}

template <class T>
const T &typed(const Blueprint &blueprint, const char *key, const char *expected) {
    const T *value = std::get_if<T>(&attribute(blueprint, key));
    if (!value) refuse(blueprint, std::string("the attribute '") + key + "' is not " + expected);
    return *value;
}

void require_sane(const Blueprint &blueprint, const std::string &role, const Operand &operand) {
    if (operand.rank < 0 || operand.rank > kMaxRank)
        refuse(blueprint,
               role + " has rank " + std::to_string(operand.rank) + ", expected 0 to " + std::to_string(kMaxRank));
    for (int i = 0; i < operand.rank; ++i)
        if (operand.dims[i].coefficient < 0)
            refuse(blueprint, role + " has a negative dimension: " + describe(operand));
}

}  // namespace

void refuse(const Blueprint &blueprint, const std::string &complaint) {
    throw BlueprintError(blueprint.kind + " '" + blueprint.name + "': " + complaint);
}

const char *name_of(DType dtype) {
    switch (dtype) {
        case DType::f32:
            return "f32";
        case DType::f16:
            return "f16";
        case DType::bf16:
            return "bf16";
        case DType::f8e4m3:
            return "f8e4m3";
        case DType::i64:
            return "i64";
        case DType::i32:
            return "i32";
        case DType::i8:
            return "i8";
        case DType::u8:
            return "u8";
        case DType::boolean:
            return "bool";
    }
    return "an unknown type";
}

std::string describe(const Operand &operand) {
    std::string text = std::string(name_of(operand.dtype)) + "[";
    for (int i = 0; i < std::clamp(operand.rank, 0, kMaxRank); ++i) {
        const Extent &extent = operand.dims[i];
        if (i) text += ", ";
        if (extent.symbol == Symbol::none || extent.coefficient != 1) text += std::to_string(extent.coefficient);
        if (extent.symbol != Symbol::none) {
            if (extent.coefficient != 1) text += "*";
            text += extent.symbol == Symbol::tokens ? "T" : "R";
        }
    }
    return text + "]";
}

void require_operands(const Blueprint &blueprint, std::size_t required, std::size_t at_most, std::size_t outputs) {
    if (blueprint.inputs.size() < required || blueprint.inputs.size() > at_most)
        refuse(blueprint, std::to_string(blueprint.inputs.size()) + " inputs, expected " + std::to_string(required) +
                              (at_most == required ? "" : " or more"));
    if (blueprint.outputs.size() != outputs)
        refuse(blueprint, std::to_string(blueprint.outputs.size()) + " outputs, expected " + std::to_string(outputs));
    for (std::size_t i = 0; i < blueprint.inputs.size(); ++i) {
        const std::string role = "input " + std::to_string(i);
        if (blueprint.inputs[i].present) require_sane(blueprint, role, blueprint.inputs[i]);
        else if (i < required) refuse(blueprint, role + " is missing");
    }
    for (std::size_t i = 0; i < outputs; ++i) {
        const std::string role = "output " + std::to_string(i);
        if (!blueprint.outputs[i].present) refuse(blueprint, role + " is missing");
        require_sane(blueprint, role, blueprint.outputs[i]);
    }
}

void require_dtype(const Blueprint &blueprint, const char *role, const Operand &operand,
                   std::initializer_list<DType> allowed) {
    if (std::find(allowed.begin(), allowed.end(), operand.dtype) != allowed.end()) return;
    std::string names;
    for (DType dtype : allowed) names += (names.empty() ? "" : ", ") + std::string(name_of(dtype));
    refuse(blueprint, std::string(role) + " is " + describe(operand) + ", expected one of the types " + names);
}

void require_same_dtype(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &other) {
    if (operand.dtype != other.dtype)
        refuse(blueprint,
               std::string(role) + " is " + describe(operand) + ", expected the type " + name_of(other.dtype));
}

void require_same_shape(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &other) {
    bool equal = operand.rank == other.rank;
    for (int i = 0; equal && i < operand.rank; ++i) equal = same(operand.dims[i], other.dims[i]);
    if (!equal)
        refuse(blueprint,
               std::string(role) + " is " + describe(operand) + ", expected the shape of " + describe(other));
}

void require_broadcast(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &target) {
    bool fits = operand.rank <= target.rank;
    for (int i = 0; fits && i < operand.rank; ++i)
        fits = is_one(operand.dims[i]) || same(operand.dims[i], target.dims[i + target.rank - operand.rank]);
    if (!fits)
        refuse(blueprint, std::string(role) + " is " + describe(operand) + ", which does not broadcast to the output " +
                              describe(target));
}

void require_scalar(const Blueprint &blueprint, const char *role, const Operand &operand) {
    for (int i = 0; i < operand.rank; ++i)
        if (!is_one(operand.dims[i]))
            refuse(blueprint, std::string(role) + " is " + describe(operand) + ", expected a single element");
}

std::int64_t integer_or(const Blueprint &blueprint, const char *key, std::int64_t otherwise) {
    return blueprint.has(key) ? typed<std::int64_t>(blueprint, key, "an integer") : otherwise;
}

double real_or(const Blueprint &blueprint, const char *key, double otherwise) {
    if (!blueprint.has(key)) return otherwise;
    const std::int64_t *whole = std::get_if<std::int64_t>(&attribute(blueprint, key));
    return whole ? static_cast<double>(*whole) : typed<double>(blueprint, key, "a number");
}

std::string text_or(const Blueprint &blueprint, const char *key, const std::string &otherwise) {
    return blueprint.has(key) ? typed<std::string>(blueprint, key, "a text") : otherwise;
}

std::vector<std::int64_t> required_integers(const Blueprint &blueprint, const char *key) {
    return typed<std::vector<std::int64_t>>(blueprint, key, "a list of integers");
}

int axis_of(const Blueprint &blueprint, const char *key, int rank) {
    const std::int64_t axis = typed<std::int64_t>(blueprint, key, "an integer");
    if (axis < 0 || axis >= rank)
        refuse(blueprint, std::string("the attribute '") + key + "' is " + std::to_string(axis) +
                              ", expected a dimension of a tensor of rank " + std::to_string(rank));
    return static_cast<int>(axis);
}

}  // namespace inferencex::cpu::checks
