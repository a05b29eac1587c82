// What StoreKV and Attention read from their blueprints and batches: pages, the pool, rotations, sequences, scales.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "../attention_state.h"
#include "../kernels.h"
#include "../operation.h"
#include "checked_blueprint.h"

namespace inferencex::cpu::attention {

using Int = std::int64_t;

inline std::optional<PageType> page_type(const std::string &name) {
    static const std::map<std::string, PageType> types = {
        {"float32", PageType::f32}, {"float16", PageType::f16}, {"bfloat16", PageType::bf16}, {"int8", PageType::i8}};
    const auto found = types.find(name);
    return found == types.end() ? std::nullopt : std::optional(found->second);
}

inline PageType page_type(const Checked &checked, const Blueprint &blueprint) {
    const auto attribute = blueprint.attributes.find("kv_dtype");
    const std::string *name =
        attribute == blueprint.attributes.end() ? nullptr : std::get_if<std::string>(&attribute->second);
    if (name == nullptr) checked.fail("attribute kv_dtype is missing or not text");
    const auto type = page_type(*name);
    if (!type) checked.fail("kv_dtype is '" + *name + "', expected float32, float16, bfloat16 or int8");
    return *type;
}

inline constexpr Int kMostHeads = 1 << 12;
inline constexpr Int kMostWidth = 1 << 13;
inline constexpr Int kMostSlots = Int{1} << 30;

inline PageLayout page_layout(const Checked &checked, const Blueprint &blueprint) {
    const Int blocks = checked.integer("num_blocks", 1, kMostSlots),
              size = checked.integer("block_size", 1, kMostSlots);
    auto layout =
        PageLayout::of(page_type(checked, blueprint), blocks, size, checked.integer("num_kv_heads", 1, kMostHeads),
                       checked.integer("key_width", 1, kMostWidth), checked.integer("value_width", 1, kMostWidth));
    if (!layout)
        checked.fail("a pool of " + std::to_string(blocks) + " blocks of " + std::to_string(size) +
                     " tokens is larger than can be addressed");
    if (blueprint.has("block_stride")) {
        const Int stride = checked.integer("block_stride", 1, Int{1} << 48);
        checked.require(layout->spread(static_cast<std::size_t>(stride)),
                        "block_stride is " + std::to_string(stride) + " for blocks of " +
                            std::to_string(layout->block_bytes) + " bytes");
    }
    return *layout;
}

inline const Operand &pool_operand(const Checked &checked, const Blueprint &blueprint, std::size_t input,
                                   const PageLayout &pages) {
    const Operand &state = checked.operand(blueprint.inputs, input, "state", DType::u8, {-1}, true);
    checked.require(state.constant != nullptr, "state is not a constant");
    const Extent &size = state.dims[0];
    checked.require(
        size.symbol == Symbol::none && size.coefficient >= 0 &&
            static_cast<std::size_t>(size.coefficient) >= pages.bytes,
        "state has " + std::to_string(size.coefficient) + " bytes, expected " + std::to_string(pages.bytes));
    return state;
}

// cos, sin and positions, the inputs from `first` on.
struct RotationOperands {
    bool present = false;
    Operand cos, sin, positions;
    Int dim = 0;
    bool interleaved = false;

    RotationOperands(const Checked &checked, const Blueprint &blueprint, std::size_t first, Int width) {
        present = blueprint.has_input(first);
        checked.require(present == blueprint.has_input(first + 1), "cos and sin are not given together");
        if (!present) {
            checked.require(!blueprint.has_input(first + 2), "positions are given without cos and sin");
            return;
        }
        dim = checked.integer_or("dim", 0, width, 0);
        if (dim == 0) dim = width;
        checked.require(dim % 2 == 0, "dim is " + std::to_string(dim) + ", expected an even number");
        interleaved = checked.integer_or("interleaved", 0, 1, 0) != 0;
        cos = checked.floats(blueprint.inputs, first, "cos", {-1, dim / 2});
        sin = checked.floats(blueprint.inputs, first + 1, "sin", {-1, dim / 2});
        const bool same =
            cos.dims[0].coefficient == sin.dims[0].coefficient && cos.dims[0].symbol == sin.dims[0].symbol;
        checked.require(same, "cos and sin have different numbers of rows");
        checked.require(cos.dims[0].coefficient > 0, "cos and sin have no rows");
        if (blueprint.has_input(first + 2))
            positions = checked.operand(blueprint.inputs, first + 2, "positions", DType::i64, {-1}, false);
    }

    Rotation resolve(const Worker &worker, const Kernels &kernels) const {
        Rotation rotation;
        if (!present) return rotation;
        const Tensor c = worker.resolve(cos), s = worker.resolve(sin);
        rotation = {c.as<float>(), s.as<float>(), c.strides[0],       s.strides[0], c.dims[0], nullptr, 0,
                    dim,           interleaved,   kernels.rows.rotate};
        if (positions.present) {
            const Tensor p = worker.resolve(positions);
            rotation.positions = p.as<Int>();
            rotation.position_stride = p.strides[0];
        }
        return rotation;
    }
    // Tokens that positions are given for.
    Int tokens(const Worker &worker, Int most) const {
        if (present && positions.present) return std::min(most, worker.resolve(positions).dims[0]);
        return most;
    }
};

// The new tokens of one sequence: rows `begin` to `end` of the step, at consecutive positions from `position`.
struct Sequence {
    Int begin = 0, end = 0;
    Int position = 0;
    const std::int32_t *blocks = nullptr;

    Int count() const { return end - begin; }
    Int context() const { return position + count(); }
};

// Sequence `s` of the batch; without tokens where the batch contradicts itself, so that nothing else is touched.
inline Sequence sequence_of(const Batch &batch, Int s, Int tokens, const PageLayout &pages) {
    Sequence sequence;
    const Int begin = batch.sequence_offsets[s], end = batch.sequence_offsets[s + 1];
    const Int context = batch.context_lengths[s];
    if (begin < 0 || end <= begin || end > tokens || context < end - begin) return sequence;
    if ((context - 1) / pages.block_size >= batch.table_width) return sequence;
    return {begin, end, context - (end - begin), batch.block_tables + s * batch.table_width};
}

// The scales of a step's heads, or none.
struct HeadScales {
    const float *values = nullptr;
    Int stride = 0;

    float of(Int head) const { return values == nullptr ? 0.0F : values[head * stride]; }
};

// Scales [G] that keys or values are stored with, absent where each is stored with its own.
struct ScaleOperand {
    bool present = false;
    Operand scales;

    ScaleOperand(const Checked &checked, const Blueprint &blueprint, std::size_t input, Int heads) {
        present = blueprint.has_input(input);
        if (present) scales = checked.operand(blueprint.inputs, input, "scales", DType::f32, {heads}, false);
    }

    HeadScales resolve(const Worker &worker) const {
        if (!present) return {};
        const Tensor t = worker.resolve(scales);
        return {t.as<float>(), t.strides[0]};
    }
};

}  // namespace inferencex::cpu::attention
