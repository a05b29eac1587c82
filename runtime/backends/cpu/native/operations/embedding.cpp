// Rows of an embedding table of any stored type, as float32.
#include <algorithm>

#include "../kernels.h"
#include "row_operands.h"

namespace inferencex::cpu {
namespace {

enum class Stored { f32, f16, bf16, int8, int4 };

// Inputs values, scales?, zero_points?, indices int64 [T]; output y [T, D]. The table is [V, D] of f32, f16, bf16 or
// int8, or packed 4-bit integers u8 [ceil(V * D / 2)]; integers have scales [V, groups] or [V] of f32 or f16 and
// perhaps zero points stored like the values. An index outside the table gives zeros.
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
            case DType::u8:
                if (blueprint.integer("bits") != 4)
                    refuse(blueprint, "values are " + describe(values_) + " of " +
                                          std::to_string(blueprint.integer("bits")) + " bits, expected 4");
                stored_ = Stored::int4;
                signed_ = blueprint.integer("signed") != 0;
                break;
            default:
                refuse(blueprint, "values are " + describe(values_) + ", expected f32, f16, bf16, i8 or packed u8");
        }
        if (stored_ == Stored::int8 || stored_ == Stored::int4) {
            check_scales(blueprint);
        } else if (scales_.present || zero_points_.present) {
            refuse(blueprint, "values are " + describe(values_) + " and have scales or zero points");
        }
        if (stored_ == Stored::int4) {
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
    }

    void run(const Worker &worker) const override {
        const std::int64_t tokens = y_.dims[0].at(worker.batch->tokens, worker.batch->rows);
        const auto [begin, end] = shared_units(worker, tokens, tokens * columns_);
        const Rows<float> y(worker.resolve(y_));
        const Tensor indices = worker.resolve(indices_);
        const Table table{worker.resolve(values_).data, worker.resolve(scales_).data,
                          worker.resolve(zero_points_).data};
        for (std::int64_t token = begin; token < end; ++token) {
            std::int64_t index = indices.as<std::int64_t>()[token * indices.strides[0]];
            if (index < 0) index += vocabulary_;  // counted from the end, as ONNX's Gather does
            if (index < 0 || index >= vocabulary_) {
                std::fill_n(y[token], columns_, 0.0F);
            } else {
                read(table, index, y[token]);
            }
        }
    }

    Cost cost(const Batch &batch) const override {
        const auto tokens = static_cast<double>(y_.dims[0].at(batch.tokens, batch.rows));
        const auto columns = static_cast<double>(columns_);
        const bool integers = scales_.present;
        double row = columns * (stored_ == Stored::int4 ? 0.5 : static_cast<double>(size_of(values_.dtype)));
        if (integers) row += static_cast<double>(groups_ * static_cast<std::int64_t>(size_of(scales_.dtype)));
        return {tokens * (row + columns * sizeof(float)), integers ? tokens * columns * 2 : 0};
    }

  private:
    struct Table {
        const std::byte *values, *scales, *zero_points;
    };

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
        const std::int64_t rows = scales_.dims[0].coefficient;
        if (stored_ == Stored::int4) return expect_packed(blueprint, "zero points", zero_points_, rows, groups_);
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

    // Nibbles [rows, columns], flat.
    static void expect_packed(const Blueprint &blueprint, const std::string &role, const Operand &operand,
                              std::int64_t rows, std::int64_t columns) {
        expect_contiguous(blueprint, role, operand, 1);
        std::int64_t count;
        if (__builtin_mul_overflow(rows, columns, &count) || operand.dtype != DType::u8 ||
            operand.dims[0].coefficient != count / 2 + count % 2)
            refuse(blueprint, role + " are " + describe(operand) + ", expected 4-bit integers of [" +
                                  std::to_string(rows) + ", " + std::to_string(columns) + "] packed into u8");
    }

    void read(const Table &table, std::int64_t index, float *y) const {
        const std::int64_t first = index * columns_;
        switch (stored_) {
            case Stored::f32:
                std::copy_n(reinterpret_cast<const float *>(table.values) + first, columns_, y);
                return;
            case Stored::f16:
                return kernels_->from_f16(reinterpret_cast<const std::uint16_t *>(table.values) + first, columns_, y);
            case Stored::bf16:
                return kernels_->from_bf16(reinterpret_cast<const std::uint16_t *>(table.values) + first, columns_, y);
            case Stored::int8:
            case Stored::int4:
                break;
        }
        for (std::int64_t group = 0, column = 0; group < groups_; ++group, column += group_) {
            const std::int64_t n = std::min(group_, columns_ - column);
            const std::int64_t at = index * groups_ + group;
            float scale, zero_point = 0;
            if (scales_.dtype == DType::f32) {
                scale = reinterpret_cast<const float *>(table.scales)[at];
            } else {
                kernels_->from_f16(reinterpret_cast<const std::uint16_t *>(table.scales) + at, 1, &scale);
            }
            if (stored_ == Stored::int8) {
                if (zero_points_.present) zero_point = reinterpret_cast<const std::int8_t *>(table.zero_points)[at];
                kernels_->from_int8(reinterpret_cast<const std::int8_t *>(table.values) + first + column, scale,
                                    zero_point, n, y + column);
            } else {
                if (zero_points_.present)
                    kernels_->from_int4(reinterpret_cast<const std::uint8_t *>(table.zero_points), at, signed_, 1, 0, 1,
                                        &zero_point);
                kernels_->from_int4(reinterpret_cast<const std::uint8_t *>(table.values), first + column, signed_,
                                    scale, zero_point, n, y + column);
            }
        }
    }

    const RowKernels *kernels_;
    Stored stored_ = Stored::f32;
    bool signed_ = true;
    Operand values_, scales_, zero_points_, indices_, y_;
    std::int64_t columns_ = 0, vocabulary_ = 0, group_ = 0, groups_ = 0;
};

}  // namespace

void add_embedding(Registry &registry) {
    registry.add("Embedding", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<Embedding>(blueprint);
    });
}

}  // namespace inferencex::cpu
