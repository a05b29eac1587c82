#include "row_operands.h"

#include <cmath>

namespace inferencex::cpu {
namespace {

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

std::string describe(const Extent &extent) {
    if (extent.symbol == Symbol::none) return std::to_string(extent.coefficient);
    const std::string symbol = extent.symbol == Symbol::tokens ? "T" : "R";
    return extent.coefficient == 1 ? symbol : std::to_string(extent.coefficient) + "*" + symbol;
}

bool is_constant(const Extent &extent, std::int64_t value) {
    return extent.symbol == Symbol::none && extent.coefficient == value;
}

}  // namespace

void refuse(const Blueprint &blueprint, const std::string &what) {
    throw BlueprintError(blueprint.kind + " " + blueprint.name + ": " + what);
}

std::string describe(const Operand &operand) {
    if (!operand.present) return "nothing";
    std::string text = std::string(name_of(operand.dtype)) + " [";
    for (int i = 0; i < operand.rank; ++i) text += (i ? ", " : "") + describe(operand.dims[i]);
    return text + "]";
}

bool same(const Extent &a, const Extent &b) { return a.coefficient == b.coefficient && a.symbol == b.symbol; }

std::int64_t columns_of_rows(const Blueprint &blueprint, const std::string &role, const Operand &operand, DType dtype) {
    if (!operand.present || operand.dtype != dtype || operand.rank < 1)
        refuse(blueprint, role + " is " + describe(operand) + ", expected rows of " + name_of(dtype));
    const Extent &columns = operand.dims[operand.rank - 1];
    if (columns.symbol != Symbol::none || columns.coefficient < 1)
        refuse(blueprint, role + " is " + describe(operand) + ", expected a constant, positive last dimension");
    if (columns.coefficient > 1 && !is_constant(operand.strides[operand.rank - 1], 1))
        refuse(blueprint, role + " is " + describe(operand) + " with columns apart, expected contiguous rows");
    return columns.coefficient;
}

void expect_rows_like(const Blueprint &blueprint, const std::string &role, const Operand &operand,
                      const Operand &like) {
    columns_of_rows(blueprint, role, operand, like.dtype);
    bool equal = operand.rank == like.rank;
    for (int i = 0; equal && i < like.rank; ++i) equal = same(operand.dims[i], like.dims[i]);
    if (!equal) refuse(blueprint, role + " is " + describe(operand) + ", expected " + describe(like));
}

void expect_vector(const Blueprint &blueprint, const std::string &role, const Operand &operand, std::int64_t columns) {
    if (columns_of_rows(blueprint, role, operand, DType::f32) != columns || operand.rank != 1)
        refuse(blueprint, role + " is " + describe(operand) + ", expected f32 [" + std::to_string(columns) + "]");
}

void expect_operands(const Blueprint &blueprint, std::size_t inputs, std::size_t outputs) {
    if (blueprint.inputs.size() > inputs || blueprint.outputs.size() != outputs)
        refuse(blueprint, std::to_string(blueprint.inputs.size()) + " inputs and " +
                              std::to_string(blueprint.outputs.size()) + " outputs, expected at most " +
                              std::to_string(inputs) + " and exactly " + std::to_string(outputs));
}

const Operand &required_input(const Blueprint &blueprint, std::size_t i, const std::string &role) {
    if (!blueprint.has_input(i)) refuse(blueprint, "input " + std::to_string(i) + " (" + role + ") is missing");
    return blueprint.inputs[i];
}

Operand optional_input(const Blueprint &blueprint, std::size_t i) {
    return blueprint.has_input(i) ? blueprint.inputs[i] : Operand{};
}

float finite_attribute(const Blueprint &blueprint, const std::string &key) {
    const auto value = static_cast<float>(blueprint.real(key));
    if (!std::isfinite(value)) refuse(blueprint, "attribute " + key + " is not finite");
    return value;
}

Extent row_count(const Blueprint &blueprint, const std::string &role, const Operand &operand) {
    Extent rows;
    for (int i = 0; i + 1 < operand.rank; ++i) {
        const Extent &dim = operand.dims[i];
        if (__builtin_mul_overflow(rows.coefficient, dim.coefficient, &rows.coefficient) ||
            (dim.symbol != Symbol::none && rows.symbol != Symbol::none))
            refuse(blueprint,
                   role + " is " + describe(operand) + ", expected rows that depend on at most one of T and R");
        if (dim.symbol != Symbol::none) rows.symbol = dim.symbol;
    }
    return rows;
}

QuantizedOutput::QuantizedOutput(const Blueprint &blueprint, std::size_t first, Extent rows, std::int64_t features,
                                 bool whole) {
    std::size_t given = 0;
    for (std::size_t i = first; i < first + 3; ++i) given += blueprint.outputs.at(i).present;
    if (given == 0) return;
    if (given != 3) refuse(blueprint, "values, scales and sums of the quantized rows must be there together");
    if (whole) {
        layout_ = BlockLayout::whole(features);
    } else {
        const std::int64_t group = blueprint.integer("group");
        if (group < 1 && group != -1)
            refuse(blueprint, "attribute group is " + std::to_string(group) + ", expected a positive number or -1");
        layout_ = BlockLayout(features, group == -1 ? features : group);
    }
    const auto expect = [&](const std::string &role, const Operand &operand, DType dtype, std::int64_t columns) {
        const bool matches = columns_of_rows(blueprint, role, operand, dtype) == columns && operand.rank == 2 &&
                             same(operand.dims[0], rows) && is_constant(operand.strides[0], columns);
        // A single row has no stride.
        const bool is_row = operand.rank == 2 && is_constant(rows, 1) && is_constant(operand.dims[0], 1) &&
                            is_constant(operand.dims[1], columns);
        if (!matches && !is_row)
            refuse(blueprint, role + " is " + describe(operand) + ", expected contiguous " + name_of(dtype) + " [" +
                                  describe(rows) + ", " + std::to_string(columns) + "]");
    };
    values_ = blueprint.outputs[first];
    scales_ = blueprint.outputs[first + 1];
    sums_ = blueprint.outputs[first + 2];
    expect("values", values_, DType::i8, layout_.row_bytes());
    expect("scales", scales_, DType::f32, layout_.blocks);
    expect("sums", sums_, DType::i32, layout_.blocks);
}

QuantizedOutput::Resolved QuantizedOutput::resolve(const Worker &worker) const {
    if (!present()) return {};
    return {worker.resolve(values_).as<std::int8_t>(), worker.resolve(scales_).as<float>(),
            worker.resolve(sums_).as<std::int32_t>(), layout_.row_bytes(), layout_.blocks};
}

void QuantizedOutput::quantize(const RowKernels &kernels, const Resolved &out, std::int64_t row, std::int64_t first,
                               std::int64_t last, const float *x) const {
    std::int8_t *values = out.values_of(row);
    float *scales = out.scales_of(row);
    std::int32_t *sums = out.sums_of(row);
    const std::int64_t stride = layout_.stride, column = layout_.start(first);
    std::int64_t b = first;
    if (layout_.even()) {  // full blocks at once
        b = std::max(first, std::min(last, layout_.features / layout_.block));
        kernels.quantize_blocks(x, layout_.block, stride, b - first, values + first * stride, scales + first,
                                sums + first);
    }
    for (; b < last; ++b)
        kernels.quantize_blocks(x + layout_.start(b) - column, layout_.length(b), stride, 1, values + b * stride,
                                scales + b, sums + b);
}

}  // namespace inferencex::cpu
