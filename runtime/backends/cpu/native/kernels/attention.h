// Attention over pages of keys and values, and the pages themselves.
//
// A block of `block_size` tokens is cut into tiles of 16 slots, the last of which may be partly used. Blocks hold their
// heads one after the other, a head its tiles, and a tile its keys with tokens across lanes and its values in rows:
//   f32, f16:  keys [Dk][16],        values [16][Dv]
//   bf16, i8:  keys [Dk / 2][16][2], values [8][Dv][2]   (pairs of columns, pairs of tokens: what vdpbf16ps multiplies)
// with Dk made even for pairs, Dv a multiple of 16, and before them, for i8, a float scale a token: keys [16], values
// [16]; it is found when the token is stored unless the caller has one. Slots that hold no token are zero up to the
// next tile: they may be multiplied by zero.
//
// A sequence's keys are taken in strips of 4 tiles and those in chunks of 8 strips, counted from its first token. A
// query's softmax and sums are kept for each chunk and the chunks merged in order, however the work is split: the
// result depends on nothing but the query and its keys.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

// Included by translation units with different instruction sets: nothing that they share may be emitted by one of them
// for all.
#define INFERENCEX_ALWAYS_INLINE __attribute__((always_inline))

namespace inferencex::cpu {

enum class PageType : std::uint8_t { f32, f16, bf16, i8 };

inline constexpr std::int64_t kTileSlots = 16;
inline constexpr std::int64_t kStripTiles = 4;
inline constexpr std::int64_t kChunkTiles = 32;

// Where the keys and values of one layer lie in its pool.
struct PageLayout {
    PageType type = PageType::f32;
    std::int64_t num_blocks = 0;
    std::int64_t block_size = 0;
    std::int64_t heads = 0;
    std::int64_t key_width = 0;
    std::int64_t value_width = 0;
    std::int64_t tiles = 0;          // of a block and head
    std::int64_t padded_keys = 0;    // columns of a stored key
    std::int64_t padded_values = 0;  // columns of a stored value
    std::size_t key_offset = 0;      // bytes from a tile's start
    std::size_t value_offset = 0;
    std::size_t tile_bytes = 0;
    std::size_t block_bytes = 0;
    std::size_t block_stride = 0;  // bytes from one block to the next; other layers' may lie between
    std::size_t bytes = 0;         // from the first block's start to the last one's end

    // Nothing when a size is not positive or the pool's bytes exceed what can be addressed.
    static std::optional<PageLayout> of(PageType type, std::int64_t num_blocks, std::int64_t block_size,
                                        std::int64_t heads, std::int64_t key_width, std::int64_t value_width) {
        constexpr std::int64_t kLimit = std::int64_t{1} << 31;  // of each size, so that none below overflows unseen
        for (const std::int64_t size : {num_blocks, block_size, heads, key_width, value_width})
            if (size < 1 || size >= kLimit) return std::nullopt;
        PageLayout p{type, num_blocks, block_size, heads, key_width, value_width};
        const bool pairs = type == PageType::bf16 || type == PageType::i8;
        const std::int64_t width = type == PageType::f32 ? 4 : type == PageType::i8 ? 1 : 2;
        p.tiles = (block_size + kTileSlots - 1) / kTileSlots;
        p.padded_keys = pairs ? (key_width + 1) / 2 * 2 : key_width;
        p.padded_values = (value_width + 15) / 16 * 16;
        p.key_offset = type == PageType::i8 ? 2 * kTileSlots * sizeof(float) : 0;
        const auto rounded = [](std::int64_t n) { return static_cast<std::size_t>((n + 63) / 64 * 64); };
        p.value_offset = p.key_offset + rounded(p.padded_keys * kTileSlots * width);
        p.tile_bytes = p.value_offset + rounded(p.padded_values * kTileSlots * width);
        std::size_t head_bytes = 0;
        if (__builtin_mul_overflow(p.tile_bytes, static_cast<std::size_t>(p.tiles), &head_bytes) ||
            __builtin_mul_overflow(head_bytes, static_cast<std::size_t>(heads), &p.block_bytes) ||
            __builtin_mul_overflow(p.block_bytes, static_cast<std::size_t>(num_blocks), &p.bytes) ||
            p.bytes > (std::size_t{1} << 62))
            return std::nullopt;
        p.block_stride = p.block_bytes;
        return p;
    }
    // The same pages with `stride` bytes from block to block; false when blocks overlap or the pool is absurdly large.
    bool spread(std::size_t stride) {
        std::size_t before = 0;
        if (stride < block_bytes || stride % 64 != 0 ||
            __builtin_mul_overflow(stride, static_cast<std::size_t>(num_blocks - 1), &before) ||
            before > (std::size_t{1} << 62))
            return false;
        block_stride = stride;
        bytes = before + block_bytes;
        return true;
    }

    INFERENCEX_ALWAYS_INLINE std::size_t offset(std::int64_t block, std::int64_t head, std::int64_t tile) const {
        return static_cast<std::size_t>(block) * block_stride +
               static_cast<std::size_t>(head * tiles + tile) * tile_bytes;
    }
    // The tile, counted along a sequence, that holds a position.
    INFERENCEX_ALWAYS_INLINE std::int64_t tile_of(std::int64_t position) const {
        return position / block_size * tiles + position % block_size / kTileSlots;
    }
    INFERENCEX_ALWAYS_INLINE std::int64_t chunk_of(std::int64_t position) const {
        return tile_of(position) / kChunkTiles;
    }
};

// Rotary embedding of heads while they are read: rows of cos and sin by token, or by position in a table.
struct Rotation {
    const float *cos = nullptr;  // null: heads are not rotated
    const float *sin = nullptr;
    std::int64_t cos_stride = 0, sin_stride = 0;
    std::int64_t rows = 0;
    const std::int64_t *positions = nullptr;  // [T]; null: row t is token t's
    std::int64_t position_stride = 0;
    std::int64_t dim = 0;
    bool interleaved = false;
    void (*rotate)(const float *x, const float *cos, const float *sin, std::int64_t width, std::int64_t dim,
                   bool interleaved, float *y) = nullptr;

    INFERENCEX_ALWAYS_INLINE const float *apply(const float *x, std::int64_t token, std::int64_t width,
                                                float *y) const {
        if (cos == nullptr) return x;
        std::int64_t row = positions ? positions[token * position_stride] : token;
        row = std::clamp<std::int64_t>(row, 0, rows - 1);  // what no step of ours asks must not read elsewhere
        rotate(x, cos + row * cos_stride, sin + row * sin_stride, width, dim, interleaved, y);
        return y;
    }
};

// What is the same for all of a node's queries.
struct AttentionShape {
    PageLayout pages;
    std::int64_t heads = 0;
    std::int64_t group = 0;  // query heads of a key-value head
    float scale = 1;
    std::int64_t window = 0;
    std::int64_t chunk = 0;
    float softcap = 0;

    // The first position that a query at `position` sees.
    INFERENCEX_ALWAYS_INLINE std::int64_t first_visible(std::int64_t position) const {
        const std::int64_t by_window = window > 0 ? position - window + 1 : 0;
        const std::int64_t by_chunk = chunk > 0 ? position / chunk * chunk : 0;
        return std::max<std::int64_t>({by_window, by_chunk, 0});
    }
    // Floats of one row's sums over one chunk: maximum, sum of weights, and from the 16th on the weighted values.
    INFERENCEX_ALWAYS_INLINE std::int64_t partial_size() const { return 16 + pages.padded_values; }
    // Rows (queries times heads of a group) of one call of `attend`, by what the second cache level holds.
    INFERENCEX_ALWAYS_INLINE std::int64_t most_rows() const {
        const std::int64_t row_bytes = 2 * pages.padded_keys + 8 * pages.padded_values;
        return std::clamp<std::int64_t>((std::int64_t{384} << 10) / row_bytes, 48, 256);
    }
};

// Consecutive queries of one sequence, the heads of one group.
struct AttentionTask {
    const float *q = nullptr;  // of the first query and the group's first head
    std::int64_t q_token_stride = 0, q_head_stride = 0;
    Rotation rotation;
    std::int64_t token = 0;  // the first query's row of the step
    std::int64_t position = 0;
    std::int64_t queries = 0;
    std::int64_t kv_head = 0;
    const std::byte *state = nullptr;
    const std::int32_t *blocks = nullptr;  // the sequence's, as many as its positions need
    const float *sinks = nullptr;          // of the group's heads; null: none
    const float *slopes = nullptr;
    std::int64_t sink_stride = 0, slope_stride = 0;
    // Either all chunks are merged into y, or those of first_chunk <= c < last_chunk are stored as partial results.
    float *y = nullptr;  // of the first query and the group's first head
    std::int64_t y_token_stride = 0;
    float *partials = nullptr;  // of the first query, the group's first head, and first_chunk
    std::int64_t partial_token_stride = 0, partial_head_stride = 0, partial_chunk_stride = 0;
    std::int64_t first_chunk = 0, last_chunk = 0;
};

// What a head's keys and values are divided by before they are rounded to i8; 0: each by a scale of its own.
struct FixedScales {
    float key = 0;
    float value = 0;
};

struct AttentionKernels {
    // Write one token's key [Dk] and value [Dv] of one head into slot `lane` of its tile; lane 0 clears the tile first.
    void (*store)(const PageLayout &pages, std::byte *tile, std::int64_t lane, const float *key, const float *value,
                  const FixedScales &fixed);
    void (*attend)(const AttentionShape &shape, const AttentionTask &task, std::byte *scratch);
    // Merge a row's partial results of `chunks` chunks, `stride` floats apart, and its sink (null: none) into y [Dv].
    void (*merge)(const AttentionShape &shape, const float *partials, std::int64_t stride, std::int64_t chunks,
                  const float *sink, std::byte *scratch, float *y);
    std::size_t (*scratch_bytes)(const AttentionShape &shape);
};

}  // namespace inferencex::cpu
