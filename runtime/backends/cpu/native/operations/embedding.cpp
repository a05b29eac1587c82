// Rows of an embedding table of any stored type, as float32.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../kernels.h"
#include "row_operands.h"
#include "stored_elements.h"
#include "unpacked_rows.h"

namespace inferencex::cpu {
namespace {

enum class Stored { f32, f16, bf16, f8e4m3, int8, int4, stream, f4e2m1 };

// Inputs values, scales?, zero_points?, indices int64 [T]; output y [T, D]. The table is [V, D] of f32, f16, bf16,
// f8e4m3 or int8, packed numbers of 4 bits u8 [ceil(V * D / 2)] (`format` int4, which is assumed, or f4e2m1), or a
// stream of integers of 3, 5 or 6 bits u8 [ceil(V * D * bits / 8)] (`format` int3, int5, int6). All but the wider
// floats have scales [V, groups] or [V] of f32 or f16, integers perhaps zero points stored like the values. An index
// outside the table gives zeros.
//
// Of a large table in a mapped file a row is read with a system call: to touch it where it is mapped would have the
// kernel map sixteen pages around it, which takes longer than to copy one, and keeps them in memory.
class Embedding : public Operation {
  public:
    explicit Embedding(const Blueprint &blueprint) : kernels_(&blueprint.kernels->rows) {
        expect_operands(blueprint, 4, 1);
        values_ = required_input(blueprint, 0, "values");
        scales_ = optional_input(blueprint, 1);
        zero_points_ = optional_input(blueprint, 2);
        indices_ = required_input(blueprint, 3, "indices");
        y_ = blueprint.outputs[0];
        columns_ = columns_of_rows(blueprint, "y", y_, DType::f32);
        if (y_.rank != 2) refuse(blueprint, "y is " + describe(y_) + ", expected [tokens, width]");
        if (indices_.dtype != DType::i64 || indices_.rank != 1 || !same(indices_.dims[0], y_.dims[0]))
            refuse(blueprint,
                   "indices are " + describe(indices_) + ", expected one i64 for each row of y, " + describe(y_));
        switch (values_.dtype) {
            case DType::f32:
                stored_ = Stored::f32;
                break;
            case DType::f16:
                stored_ = Stored::f16;
                break;
            case DType::bf16:
                stored_ = Stored::bf16;
                break;
            case DType::i8:
                stored_ = Stored::int8;
                break;
            case DType::f8e4m3:
                stored_ = Stored::f8e4m3;
                break;
            case DType::u8:
                stored_ = packed_format(blueprint);
                if (stored_ == Stored::stream) bits_ = stream_bits_of(blueprint.text("format"));
                signed_ = blueprint.integer("signed") != 0;
                break;
            default:
                refuse(blueprint,
                       "values are " + describe(values_) + ", expected f32, f16, bf16, f8e4m3, i8 or packed u8");
        }
        if (is_scaled()) {
            check_scales(blueprint);
        } else if (scales_.present || zero_points_.present) {
            refuse(blueprint, "values are " + describe(values_) + " and have scales or zero points");
        }
        if (is_packed()) {
            vocabulary_ = scales_.dims[0].coefficient;
            expect_packed(blueprint, "values", values_, vocabulary_, columns_);
        } else {
            expect_contiguous(blueprint, "values", values_, 2);
            vocabulary_ = values_.dims[0].coefficient;
            if (values_.dims[1].coefficient != columns_)
                refuse(blueprint, "values are " + describe(values_) + " but y is " + describe(y_));
            if (scales_.present && scales_.dims[0].coefficient != vocabulary_)
                refuse(blueprint, "values are " + describe(values_) + " but scales are " + describe(scales_));
        }
        const std::int64_t bits = is_packed() ? bits_ : 8 * static_cast<std::int64_t>(size_of(values_.dtype));
        stored_values_ = StoredElements(*blueprint.files, values_, bits);
        if (!scales_.present) return;
        stored_scales_ =
            StoredElements(*blueprint.files, scales_, 8 * static_cast<std::int64_t>(size_of(scales_.dtype)));
        stored_zero_points_ = StoredElements(*blueprint.files, zero_points_, is_packed() ? bits_ : 8);
    }

    std::size_t scratch_bytes(std::int64_t /*max_tokens*/, int /*threads*/) const override {
        return stored_values_.room(columns_) + stored_scales_.room(groups_) + stored_zero_points_.room(groups_);
    }

    void run(const Worker &worker) const override {
        const std::int64_t tokens = y_.dims[0].at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, tokens, tokens * columns_);
        const Rows<float> y(worker.resolve(y_));
        const Tensor indices = worker.resolve(indices_);
        for (std::int64_t token = begin; token < end; ++token) {
            std::int64_t index = indices.as<std::int64_t>()[token * indices.strides[0]];
            if (index < 0) index += vocabulary_;  // counted from the end, as ONNX's Gather does
            if (index < 0 || index >= vocabulary_) {
                std::fill_n(y[token], columns_, 0.0F);
            } else {
                read(index, worker.scratch, y[token]);
            }
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto tokens = static_cast<double>(y_.dims[0].at(batch.tokens, batch.rows));
        const auto columns = static_cast<double>(columns_);
        const bool integers = scales_.present;
        const double bytes = is_packed() ? static_cast<double>(bits_) / 8 : size_of(values_.dtype);
        double row = columns * bytes;
        if (integers) row += static_cast<double>(groups_ * static_cast<std::int64_t>(size_of(scales_.dtype)));
        return {tokens * (row + columns * sizeof(float)), integers ? tokens * columns * 2 : 0};
    }

  private:
    void check_scales(const Blueprint &blueprint) {
        if (!scales_.present) refuse(blueprint, "values are " + describe(values_) + " without scales");
        if (scales_.dtype != DType::f32 && scales_.dtype != DType::f16)
            refuse(blueprint, "scales are " + describe(scales_) + ", expected f32 or f16");
        const std::int64_t group = blueprint.has("group") ? blueprint.integer("group") : -1;
        if (group < 1 && group != -1)
            refuse(blueprint, "attribute group is " + std::to_string(group) + ", expected a positive number or -1");
        group_ = group == -1 ? columns_ : std::min(group, columns_);
        groups_ = (columns_ + group_ - 1) / group_;
        expect_contiguous(blueprint, "scales", scales_, scales_.rank == 1 ? 1 : 2);
        if ((scales_.rank == 1 ? 1 : scales_.dims[1].coefficient) != groups_)
            refuse(blueprint, "scales are " + describe(scales_) + ", expected " + std::to_string(groups_) + " a row");
        if (!zero_points_.present) return;
        if (stored_ == Stored::f8e4m3 || stored_ == Stored::f4e2m1)
            refuse(blueprint, "values are floats, and have zero points");
        const std::int64_t rows = scales_.dims[0].coefficient;
        if (is_packed()) return expect_packed(blueprint, "zero points", zero_points_, rows, groups_);
        expect_contiguous(blueprint, "zero points", zero_points_, scales_.rank);
        bool equal = zero_points_.dtype == DType::i8;
        for (int i = 0; i < scales_.rank; ++i) equal = equal && same(zero_points_.dims[i], scales_.dims[i]);
        if (!equal)
            refuse(blueprint, "zero points are " + describe(zero_points_) +
                                  ", expected i8 in the shape of the scales, " + describe(scales_));
    }

    // A constant, contiguous operand of `rank`.
    static void expect_contiguous(const Blueprint &blueprint, const std::string &role, const Operand &operand,
                                  int rank) {
        bool fits = operand.rank == rank;
        std::int64_t stride = 1;
        for (int i = operand.rank - 1; fits && i >= 0; --i) {
            const std::int64_t size = operand.dims[i].coefficient;
            fits = operand.dims[i].symbol == Symbol::none && operand.strides[i].symbol == Symbol::none && size > 0 &&
                   (size == 1 || operand.strides[i].coefficient == stride) &&
                   !__builtin_mul_overflow(stride, size, &stride);
        }
        if (!fits)
            refuse(blueprint, role + " are " + describe(operand) + ", expected a contiguous constant of rank " +
                                  std::to_string(rank));
    }

    static Stored packed_format(const Blueprint &blueprint) {
        if (!blueprint.has("format") && blueprint.integer("bits") != 4)
            refuse(blueprint, "values are " + describe(blueprint.inputs[0]) + " of " +
                                  std::to_string(blueprint.integer("bits")) + " bits, expected 4");
        const std::string format = blueprint.has("format") ? blueprint.text("format") : "int4";
        if (format == "int4") return Stored::int4;
        if (stream_bits_of(format) != 0) return Stored::stream;
        if (format == "f4e2m1") return Stored::f4e2m1;
        refuse(blueprint, "format is " + format + ", expected int3 to int6 or f4e2m1 for packed values");
    }

    bool is_packed() const { return stored_ == Stored::int4 || stored_ == Stored::stream || stored_ == Stored::f4e2m1; }
    bool is_scaled() const { return is_packed() || stored_ == Stored::int8 || stored_ == Stored::f8e4m3; }

    // Numbers [rows, columns] of less than 8 bits, flat.
    void expect_packed(const Blueprint &blueprint, const std::string &role, const Operand &operand, std::int64_t rows,
                       std::int64_t columns) const {
        expect_contiguous(blueprint, role, operand, 1);
        std::int64_t count;
        if (__builtin_mul_overflow(rows, columns, &count) || __builtin_mul_overflow(count, bits_, &count) ||
            operand.dtype != DType::u8 || operand.dims[0].coefficient != count / 8 + (count % 8 != 0))
            refuse(blueprint, role + " are " + describe(operand) + ", expected " + std::to_string(bits_) +
                                  "-bit numbers of [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                  "] packed into u8");
    }

    void read(std::int64_t index, std::byte *room, float *y) const {
        const StoredElements::Run values = stored_values_.read(index * columns_, columns_, room);
        const std::int64_t first = values.first;
        switch (stored_) {
            case Stored::f32:
                std::copy_n(reinterpret_cast<const float *>(values.data) + first, columns_, y);
                return;
            case Stored::f16:
                return kernels_->from_f16(reinterpret_cast<const std::uint16_t *>(values.data) + first, columns_, y);
            case Stored::bf16:
                return kernels_->from_bf16(reinterpret_cast<const std::uint16_t *>(values.data) + first, columns_, y);
            default:
                break;
        }
        room += stored_values_.room(columns_);
        const StoredElements::Run scales = stored_scales_.read(index * groups_, groups_, room);
        room += stored_scales_.room(groups_);
        const StoredElements::Run zero_points =
            zero_points_.present ? stored_zero_points_.read(index * groups_, groups_, room) : StoredElements::Run{};
        for (std::int64_t group = 0, column = 0; group < groups_; ++group, column += group_) {
            const std::int64_t n = std::min(group_, columns_ - column);
            const std::int64_t at = scales.first + group, zero_at = zero_points.first + group;
            float scale, zero_point = 0;
            if (scales_.dtype == DType::f32) {
                scale = reinterpret_cast<const float *>(scales.data)[at];
            } else {
                kernels_->from_f16(reinterpret_cast<const std::uint16_t *>(scales.data) + at, 1, &scale);
            }
            if (stored_ == Stored::f8e4m3) {
                for (std::int64_t i = 0; i < n; ++i)
                    y[column + i] = from_e4m3(static_cast<std::uint8_t>(values.data[first + column + i])) * scale;
            } else if (stored_ == Stored::f4e2m1) {
                const auto *packed = reinterpret_cast<const std::uint8_t *>(values.data);
                for (std::int64_t i = column; i < column + n; ++i) {
                    const int code = packed[(first + i) / 2] >> ((first + i) % 2 * 4) & 15;
                    y[i] = 0.5F * static_cast<float>(kDoubledE2m1[code]) * scale;
                }
            } else if (stored_ == Stored::stream) {
                if (zero_points_.present) zero_point = static_cast<float>(integer(zero_points, zero_at));
                from_stream(values, first + column, n, scale, zero_point, y + column);
            } else if (stored_ == Stored::int8) {
                if (zero_points_.present) zero_point = reinterpret_cast<const std::int8_t *>(zero_points.data)[zero_at];
                kernels_->from_int8(reinterpret_cast<const std::int8_t *>(values.data) + first + column, scale,
                                    zero_point, n, y + column);
            } else {
                if (zero_points_.present)
                    kernels_->from_int4(reinterpret_cast<const std::uint8_t *>(zero_points.data), zero_at, signed_, 1,
                                        0, 1, &zero_point);
                kernels_->from_int4(reinterpret_cast<const std::uint8_t *>(values.data), first + column, signed_, scale,
                                    zero_point, n, y + column);
            }
        }
    }

    // Integers `first` to `first + n` of a stream less what stands for zero, times `scale`: eight at a time are made
    // bytes where they begin with one.
    void from_stream(const StoredElements::Run &stream, std::int64_t first, std::int64_t n, float scale,
                     float zero_point, float *y) const {
        std::int8_t bytes[64];
        for (std::int64_t done = 0, count; done < n; done += count) {
            count = std::min<std::int64_t>(n - done, sizeof bytes);
            std::int64_t i = 0;
            if ((first + done) % 8 == 0) {
                const std::int64_t at = (first + done) / 8 * bits_;
                i = kernels_->spread_stream(reinterpret_cast<const std::uint8_t *>(stream.data) + at, stream.bytes - at,
                                            static_cast<int>(bits_), signed_, count,
                                            reinterpret_cast<std::uint8_t *>(bytes));
            }
            for (; i < count; ++i) bytes[i] = static_cast<std::int8_t>(integer(stream, first + done + i));
            kernels_->from_int8(bytes, scale, zero_point, count, y + done);
        }
    }

    int integer(const StoredElements::Run &stream, std::int64_t i) const {
        return stream_at(reinterpret_cast<const std::uint8_t *>(stream.data), i, bits_, signed_, stream.bytes);
    }

    static float from_e4m3(std::uint8_t code) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        if ((code & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
        const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
        return code & 0x80 ? -magnitude : magnitude;
    }

    const RowKernels *kernels_;
    Stored stored_ = Stored::f32;
    bool signed_ = true;
    std::int64_t bits_ = 4;  // of a packed number
    Operand values_, scales_, zero_points_, indices_, y_;
    StoredElements stored_values_, stored_scales_, stored_zero_points_;
    std::int64_t columns_ = 0, vocabulary_ = 0, group_ = 0, groups_ = 0;
};

}  // namespace

void add_embedding(Registry &registry) {
    registry.add("Embedding", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<Embedding>(blueprint);
    });
}

}  // namespace inferencex::cpu
