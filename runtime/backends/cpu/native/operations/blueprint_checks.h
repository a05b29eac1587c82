// What the constructors of operations check their blueprints with. Everything here throws BlueprintError, in words that
// name the operation, what was found and what is expected.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "../operation.h"

namespace inferencex::cpu::checks {

[[noreturn]] void refuse(const Blueprint &blueprint, const std::string &complaint);

// "f32", and "f32[2*T, 64]".
const char *name_of(DType dtype);
std::string describe(const Operand &operand);

constexpr bool same(const Extent &a, const Extent &b) {
    return a.coefficient == b.coefficient && (a.symbol == b.symbol || a.coefficient == 0);
}
constexpr bool is_one(const Extent &extent) { return extent.symbol == Symbol::none && extent.coefficient == 1; }

// So many operands, the first `required` inputs and all outputs present; ranks within kMaxRank, no negative dimension.
void require_operands(const Blueprint &blueprint, std::size_t required, std::size_t at_most, std::size_t outputs = 1);
void require_dtype(const Blueprint &blueprint, const char *role, const Operand &operand,
                   std::initializer_list<DType> allowed);
void require_same_dtype(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &other);
void require_same_shape(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &other);
// Every dimension of `operand`, counted from the last, is the target's or 1.
void require_broadcast(const Blueprint &blueprint, const char *role, const Operand &operand, const Operand &target);
void require_scalar(const Blueprint &blueprint, const char *role, const Operand &operand);

std::int64_t integer_or(const Blueprint &blueprint, const char *key, std::int64_t otherwise);
double real_or(const Blueprint &blueprint, const char *key, double otherwise);
std::string text_or(const Blueprint &blueprint, const char *key, const std::string &otherwise);
std::vector<std::int64_t> required_integers(const Blueprint &blueprint, const char *key);
// An attribute that names a dimension of a tensor of that rank, from 0.
int axis_of(const Blueprint &blueprint, const char *key, int rank);

}  // namespace inferencex::cpu::checks
