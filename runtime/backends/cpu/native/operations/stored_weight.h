// A weight of a linear or of a bank of experts as a blueprint gives it.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../kernels.h"
#include "../mapped_files.h"
#include "../memory.h"
#include "../operation.h"
#include "row_operands.h"
#include "unpacked_rows.h"

namespace inferencex::cpu {

inline constexpr std::int64_t kWeightTile = PackedFloatWeight::kTile;
static_assert(PackedIntegerWeight::kTile == kWeightTile);

inline std::int64_t positive_attribute(const Blueprint &blueprint, const std::string &key, std::int64_t most) {
    const std::int64_t value = blueprint.integer(key);
    if (value < 1 || value > most)
        refuse(blueprint, key + " is " + std::to_string(value) + ", expected 1 to " + std::to_string(most));
    return value;
}

// Throws unless the operand is there, of this type and rank, with neighbouring elements in its last dimension.
inline const Operand &expect_operand(const Blueprint &blueprint, const std::vector<Operand> &operands, std::size_t i,
                                     const char *what, DType dtype, int rank) {
    if (i >= operands.size() || !operands[i].present) refuse(blueprint, std::string(what) + " is missing");
    const Operand &operand = operands[i];
    if (operand.dtype != dtype) refuse(blueprint, std::string(what) + " has the wrong element type");
    if (operand.rank != rank)
        refuse(blueprint,
               std::string(what) + " has rank " + std::to_string(operand.rank) + ", expected " + std::to_string(rank));
    const Extent &last = operand.strides[rank - 1];
    const bool single = operand.dims[rank - 1].symbol == Symbol::none && operand.dims[rank - 1].coefficient <= 1;
    if (!single && (last.symbol != Symbol::none || last.coefficient != 1))
        refuse(blueprint, std::string(what) + " does not have stride 1 in its last dimension");
    return operand;
}

inline void expect_size(const Blueprint &blueprint, const Operand &operand, int dim, std::int64_t size,
                        const char *what) {
    const Extent &found = operand.dims[dim];
    if (found.symbol != Symbol::none || found.coefficient != size)
        refuse(blueprint, std::string(what) + " has size " + std::to_string(found.coefficient) +
                              (found.symbol == Symbol::none ? "" : " a token") + " in dimension " +
                              std::to_string(dim) + ", expected " + std::to_string(size));
}

inline void expect_equal(const Blueprint &blueprint, const Extent &a, const Extent &b, const char *what) {
    if (!same(a, b)) refuse(blueprint, std::string(what) + " has another number of rows than x");
}

// A constant of `count` elements without gaps, of any rank. Returns its first byte.
inline const std::byte *expect_constant(const Blueprint &blueprint, std::size_t i, const char *what, DType dtype,
                                        std::int64_t count) {
    if (!blueprint.has_input(i)) refuse(blueprint, std::string(what) + " is missing");
    const Operand &operand = blueprint.inputs[i];
    if (operand.constant == nullptr) refuse(blueprint, std::string(what) + " is not a constant");
    if (operand.dtype != dtype) refuse(blueprint, std::string(what) + " has the wrong element type");
    std::int64_t found = 1;
    bool dense = true;
    for (int d = operand.rank - 1; d >= 0; --d) {
        const Extent &dim = operand.dims[d], &stride = operand.strides[d];
        dense = dense && dim.symbol == Symbol::none && stride.symbol == Symbol::none &&
                (dim.coefficient == 1 || stride.coefficient == found) &&
                !__builtin_mul_overflow(found, dim.coefficient, &found);
    }
    if (!dense) refuse(blueprint, std::string(what) + " is not contiguous");
    if (found != count)
        refuse(blueprint,
               std::string(what) + " has " + std::to_string(found) + " elements, expected " + std::to_string(count));
    return operand.constant + operand.offset;
}

// `count` numbers of type float32, float16 or bfloat16 as float32; nothing where the operand is absent.
inline std::vector<float> read_floats(const Blueprint &blueprint, std::size_t i, const char *what, std::int64_t count) {
    std::vector<float> values;
    if (!blueprint.has_input(i)) return values;
    const DType dtype = blueprint.inputs[i].dtype;
    if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16)
        refuse(blueprint, std::string(what) + " is neither float32 nor float16 nor bfloat16");
    const std::byte *data = expect_constant(blueprint, i, what, dtype, count);
    values.resize(count);
    if (dtype == DType::f16)
        blueprint.kernels->rows.from_f16(reinterpret_cast<const std::uint16_t *>(data), count, values.data());
    else if (dtype == DType::bf16)
        blueprint.kernels->rows.from_bf16(reinterpret_cast<const std::uint16_t *>(data), count, values.data());
    else std::copy_n(reinterpret_cast<const float *>(data), count, values.data());
    return values;
}

// The gate that ends a linear with 2F channels: `activation`, `layout`, `alpha`, `limit`.
struct Gate {
    Activation activation = Activation::silu;
    bool interleaved = false;
    float alpha = 1;
    float limit = 0;
};

inline Gate read_gate(const Blueprint &blueprint) {
    Gate gate;
    const std::optional<Activation> activation = activation_named(blueprint.text("activation"));
    if (!activation) refuse(blueprint, "there is no activation called " + blueprint.text("activation"));
    gate.activation = *activation;
    const std::string &layout = blueprint.text("layout");
    if (layout != "concat" && layout != "interleaved")
        refuse(blueprint, "layout is " + layout + ", expected concat or interleaved");
    gate.interleaved = layout == "interleaved";
    if (blueprint.has("alpha")) gate.alpha = static_cast<float>(blueprint.real("alpha"));
    if (blueprint.has("limit")) gate.limit = static_cast<float>(blueprint.real("limit"));
    return gate;
}

// A weight [experts, N, K] as it is stored, checked; experts is 1 for a plain linear.
struct StoredWeight {
    FloatWeight source;  // of the first expert; `order` is not set. Of a weight to expand: as it is stored
    std::int64_t experts = 1;
    Expansion expansion = Expansion::none;  // of streams; of f4e2m1 for integer kernels, whose scales are half as large
    std::int64_t stream_bits = 0;           // of an integer of a stream
    std::int64_t stored_bits = 0;           // of a value
    FilePart file;                          // that values are mapped from
    bool zeros_taken_off = false;  // as they are expanded: bytes have room for what integers of a stream differ by

    // Inputs `first`, `first + 1`, `first + 2` are values, scales and zero points.
    static StoredWeight read(const Blueprint &blueprint, std::size_t first, std::int64_t experts, std::int64_t channels,
                             std::int64_t features) {
        std::int64_t rows, count;
        if (__builtin_mul_overflow(experts, channels, &rows) || __builtin_mul_overflow(rows, features, &count) ||
            count > (std::int64_t{1} << 44) || rows > INT32_MAX)
            refuse(blueprint, "the weight has an absurd size");
        StoredWeight weight;
        weight.experts = experts;
        FloatWeight &s = weight.source;
        s.channels = channels;
        s.features = features;
        s.format = format_named(blueprint);
        weight.stream_bits = stream_bits_of(blueprint.text("format"));
        const bool is_stream = weight.stream_bits != 0;
        if (is_stream) weight.expansion = Expansion::stream;
        std::int64_t group = blueprint.has("group") ? blueprint.integer("group") : -1;
        if (group == 0 || group < -1)
            refuse(blueprint, "group is " + std::to_string(group) + ", expected -1 or more than 0");
        s.group = group == -1 || group > features ? features : group;
        s.is_signed = !blueprint.has("signed") || blueprint.integer("signed") != 0;
        const bool packed = s.format == WeightFormat::int4 || s.format == WeightFormat::f4e2m1;
        const auto stored = [&](std::int64_t elements) {
            return is_stream ? stream_bytes(elements, weight.stream_bits) : packed ? (elements + 1) / 2 : elements;
        };
        const DType dtype = is_stream ? DType::u8 : stored_type(s.format);
        const std::byte *values = expect_constant(blueprint, first, "weight", dtype, stored(count));
        s.values = reinterpret_cast<const std::uint8_t *>(values);
        weight.stored_bits = is_stream ? weight.stream_bits
                             : packed  ? 4
                                       : 8 * static_cast<std::int64_t>(size_of(dtype));
        if (blueprint.files != nullptr)
            weight.file = blueprint.files->part(
                values, static_cast<std::size_t>(stored_bytes(rows * features, weight.stored_bits)));
        const bool is_integer = s.format == WeightFormat::int4 || s.format == WeightFormat::int8;
        const bool needs_scales = is_integer || s.format == WeightFormat::f4e2m1;
        const bool may_have_scales = needs_scales || s.format == WeightFormat::f8e4m3;
        const std::int64_t scales = rows * ((features + s.group - 1) / s.group);
        if (blueprint.has_input(first + 1)) {
            if (!may_have_scales) refuse(blueprint, "a weight of this format has no scales");
            s.scales_are_f16 = blueprint.inputs[first + 1].dtype == DType::f16;
            s.scales =
                expect_constant(blueprint, first + 1, "scales", s.scales_are_f16 ? DType::f16 : DType::f32, scales);
        } else if (needs_scales) {
            refuse(blueprint, "a weight of this format needs scales");
        }
        if (blueprint.has_input(first + 2)) {
            if (!is_integer) refuse(blueprint, "a weight of this format has no zero points");
            s.zero_points = reinterpret_cast<const std::uint8_t *>(
                expect_constant(blueprint, first + 2, "zero_points", dtype, stored(scales)));
        }
        return weight;
    }

    // Throws unless integer kernels can multiply it; says how it is expanded for them.
    void for_integers(const Blueprint &blueprint) {
        if (source.format == WeightFormat::f4e2m1) expansion = Expansion::e2m1x2;
        else if (stream_bits > 4 && source.zero_points != nullptr) zeros_taken_off = true;
        else if (source.format != WeightFormat::int8 && source.format != WeightFormat::int4)
            refuse(blueprint, "activations cannot be quantized for weights of format " + blueprint.text("format"));
    }

    static std::int64_t stored_bytes(std::int64_t elements, std::int64_t bits) { return (elements * bits + 7) / 8; }

    // Memory for values of some rows, not zeroed.
    class Room {
      public:
        std::uint8_t *of(std::int64_t bytes) {
            if (bytes > bytes_) {
                memory_.reset();
                memory_ = std::make_unique_for_overwrite<std::uint8_t[]>(static_cast<std::size_t>(bytes));
                bytes_ = bytes;
            }
            return memory_.get();
        }

      private:
        std::unique_ptr<std::uint8_t[]> memory_;
        std::int64_t bytes_ = 0;
    };

    // A weight that has rows `rows[0..count)`, and their numbers in it: this one, or where they lie side by side, on
    // pages of a file that are not mapped yet, one of values read into `room`. To map what is read once takes as long
    // as to copy it, and only the copy is in a near cache then.
    StoredWeight nearby(std::int32_t *rows, std::int64_t count, Room &room) const {
        constexpr std::int64_t kWholeBytes = 8;  // so many rows of anything end with a byte
        const auto [least, most] = std::minmax_element(rows, rows + count);
        const std::int64_t first = *least / kWholeBytes * kWholeBytes, span = *most + 1 - first;
        if (file.descriptor < 0 || span >= count + kWholeBytes) return *this;
        const std::int64_t features = source.features, groups = (features + source.group - 1) / source.group;
        const std::int64_t at = first * features * stored_bits / 8, bytes = stored_bytes(span * features, stored_bits);
        if (at + bytes <= file.ready) return *this;
        std::uint8_t *values = room.of(bytes);
        if (!file.read(at, bytes, reinterpret_cast<std::byte *>(values))) return *this;
        StoredWeight part = *this;
        part.experts = 1;
        part.source.channels = span;
        part.source.values = values;
        if (source.scales != nullptr)
            part.source.scales =
                static_cast<const std::uint8_t *>(source.scales) + first * groups * (source.scales_are_f16 ? 2 : 4);
        if (source.zero_points != nullptr) part.source.zero_points += first * groups * stored_bits / 8;
        for (std::int64_t i = 0; i < count; ++i) rows[i] -= static_cast<std::int32_t>(first);
        return part;
    }

    // Rows of a weight to expand, as a weight of their own that points into `memory`.
    struct Expanded {
        std::vector<std::uint8_t> values, zero_points, scales;
    };
    FloatWeight expand(const RowKernels &kernels, const std::int32_t *rows, std::int64_t count,
                       Expanded &memory) const {
        const std::int64_t all = experts * source.channels, features = source.features;
        const std::int64_t groups = (features + source.group - 1) / source.group;
        FloatWeight w = source;
        w.channels = count;
        if (expansion == Expansion::e2m1x2) {
            expand_e2m1(source.values, rows, count, features, memory.values);
            w.format = WeightFormat::int8;
        } else {
            expand_stream(kernels, source.values, all * features, stream_bits, rows, count, features, source.is_signed,
                          memory.values);
            if (source.zero_points) {
                expand_stream(kernels, source.zero_points, all * groups, stream_bits, rows, count, groups,
                              source.is_signed, memory.zero_points);
                w.zero_points = memory.zero_points.data();
            }
            if (zeros_taken_off) {
                for (std::int64_t r = 0; r < count; ++r)
                    kernels.subtract_zeros(memory.zero_points.data() + r * groups, source.group, features,
                                           memory.values.data() + r * features);
                w.zero_points = nullptr;
            }
        }
        w.values = memory.values.data();
        const std::int64_t row_bytes = groups * (source.scales_are_f16 ? 2 : 4);
        memory.scales.resize(count * row_bytes);
        for (std::int64_t r = 0; r < count; ++r)
            std::copy_n(static_cast<const std::uint8_t *>(source.scales) + rows[r] * row_bytes, row_bytes,
                        memory.scales.data() + r * row_bytes);
        w.scales = memory.scales.data();
        return w;
    }

    // The weight as integer kernels plan for it.
    IntegerWeight integer() const {
        IntegerWeight w = as_integer(source);
        if (zeros_taken_off) w.zero_points = nullptr;
        return w;
    }

    static IntegerWeight as_integer(const FloatWeight &source) {
        IntegerWeight w;
        w.channels = source.channels;
        w.features = source.features;
        w.group = source.group;
        w.bits = source.format == WeightFormat::int4 ? 4 : 8;  // f4e2m1 is expanded to 8
        w.is_signed = source.is_signed;
        w.values = source.values;
        w.scales = source.scales;
        w.scales_are_f16 = source.scales_are_f16;
        w.zero_points = source.zero_points;
        return w;
    }

  private:
    static WeightFormat format_named(const Blueprint &blueprint) {
        const std::string &name = blueprint.text("format");
        if (name == "f32") return WeightFormat::f32;
        if (name == "bf16") return WeightFormat::bf16;
        if (name == "f16") return WeightFormat::f16;
        if (name == "f8e4m3") return WeightFormat::f8e4m3;
        if (name == "int8" || name == "int5" || name == "int6") return WeightFormat::int8;
        if (name == "int4" || name == "int3") return WeightFormat::int4;
        if (name == "f4e2m1") return WeightFormat::f4e2m1;
        refuse(blueprint, "format is " + name + ", expected f32, bf16, f16, f8e4m3, int3 to int6, int8 or f4e2m1");
    }

    static DType stored_type(WeightFormat format) {
        switch (format) {
            case WeightFormat::f32:
                return DType::f32;
            case WeightFormat::bf16:
                return DType::bf16;
            case WeightFormat::f16:
                return DType::f16;
            case WeightFormat::f8e4m3:
                return DType::f8e4m3;
            case WeightFormat::int8:
                return DType::i8;
            default:
                return DType::u8;
        }
    }
};

}  // namespace inferencex::cpu
