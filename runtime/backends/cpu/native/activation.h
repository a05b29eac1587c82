// Activations of a gated feed-forward layer, by the names that the IR gives them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace inferencex::cpu {

enum class Activation : std::uint8_t { silu, gelu, gelu_tanh, relu, relu2, sigmoid, swiglu_clamped };

inline std::optional<Activation> activation_named(std::string_view name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    if (name == "relu2") return Activation::relu2;
    if (name == "sigmoid") return Activation::sigmoid;
    if (name == "swiglu_clamped") return Activation::swiglu_clamped;
    return std::nullopt;
}

}  // namespace inferencex::cpu
