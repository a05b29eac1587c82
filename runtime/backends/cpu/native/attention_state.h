// How much memory a layer's keys and values take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace inferencex::cpu {

// Bytes of one layer's pool. `kv_dtype` is float32, float16, bfloat16 or int8; throws BlueprintError for another or for
// absurd sizes.
std::size_t state_bytes(std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_kv_heads,
                        std::int64_t key_width, std::int64_t value_width, const std::string &kv_dtype);

}  // namespace inferencex::cpu
