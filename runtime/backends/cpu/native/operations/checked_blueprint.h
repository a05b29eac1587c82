// A blueprint as the constructors of operations with many attributes read it: each look is a check.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "blueprint_checks.h"

namespace inferencex::cpu {

// Checks of blueprints, all with the operation's name in front.
class Checked {
  public:
    using Int = std::int64_t;

    explicit Checked(const Blueprint &blueprint) : blueprint_(blueprint) {}

    [[noreturn]] void fail(const std::string &what) const { checks::refuse(blueprint_, what); }
    void require(bool condition, const std::string &what) const {
        if (!condition) fail(what);
    }
    Int integer(const std::string &key, Int least, Int most) const {
        const auto found = blueprint_.attributes.find(key);
        if (found == blueprint_.attributes.end()) fail("attribute " + key + " is missing");
        const auto *value = std::get_if<Int>(&found->second);
        if (value == nullptr) fail("attribute " + key + " is not an integer");
        if (*value < least || *value > most)
            fail(key + " is " + std::to_string(*value) + ", expected " + std::to_string(least) + " to " +
                 std::to_string(most));
        return *value;
    }
    Int integer_or(const std::string &key, Int least, Int most, Int absent) const {
        return blueprint_.has(key) ? integer(key, least, most) : absent;
    }
    float real(const std::string &key) const {
        const auto found = blueprint_.attributes.find(key);
        if (found == blueprint_.attributes.end()) fail("attribute " + key + " is missing");
        double value = 0;
        if (const auto *real = std::get_if<double>(&found->second)) value = *real;
        else if (const auto *whole = std::get_if<Int>(&found->second)) value = static_cast<double>(*whole);
        else fail("attribute " + key + " is not a number");
        if (!std::isfinite(static_cast<float>(value))) fail(key + " is not finite");
        return static_cast<float>(value);
    }
    // An operand of float32 of `rank` dimensions, the last of them contiguous; a dimension of -1 may be anything.
    const Operand &floats(const std::vector<Operand> &operands, std::size_t i, const char *name,
                          std::initializer_list<Int> dims, bool contiguous_last = true) const {
        return operand(operands, i, name, DType::f32, dims, contiguous_last);
    }
    const Operand &operand(const std::vector<Operand> &operands, std::size_t i, const char *name, DType dtype,
                           std::initializer_list<Int> dims, bool contiguous_last) const {
        require(i < operands.size() && operands[i].present, std::string(name) + " is missing");
        const Operand &found = operands[i];
        require(found.dtype == dtype, std::string(name) + " has the wrong type of elements");
        require(found.rank == static_cast<int>(dims.size()), std::string(name) + " has " + std::to_string(found.rank) +
                                                                 " dimensions, expected " +
                                                                 std::to_string(dims.size()));
        int axis = 0;
        for (const Int expected : dims) {
            const Extent &extent = found.dims[axis];
            if (expected >= 0)
                require(extent.symbol == Symbol::none && extent.coefficient == expected,
                        "dimension " + std::to_string(axis) + " of " + name + " is " +
                            std::to_string(extent.coefficient) +
                            (extent.symbol == Symbol::none ? "" : " times a symbol") + ", expected " +
                            std::to_string(expected));
            ++axis;
        }
        const Extent &last = found.strides[found.rank - 1];
        require(!contiguous_last || found.dims[found.rank - 1].coefficient <= 1 ||
                    (last.symbol == Symbol::none && last.coefficient == 1),
                std::string("the last dimension of ") + name + " is not contiguous");
        return found;
    }

  private:
    const Blueprint &blueprint_;
};

}  // namespace inferencex::cpu
