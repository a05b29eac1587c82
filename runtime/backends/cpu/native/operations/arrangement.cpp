// Operators that place elements without computing with them; of any type unless noted.
//
//   Copy, Identity (x) -> y       x broadcasts to y
//   Concat (inputs, ...; axis) -> y
//   Fill (; value) -> y           f32, i64, i32, i8, u8, boolean
//   Pad (x; pads, value?) -> y    the types of Fill; constant mode, `pads` as ONNX has them, none negative
//   Tile (x) -> y                 as often as the shapes say
//   Trilu (x; k?, upper?) -> y    the types of Fill
#include "arrangement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "../operation.h"
#include "blueprint_checks.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

template <class Bits>
void copy(const std::byte *x_bytes, std::int64_t x_step, std::byte *y_bytes, std::int64_t y_step, std::int64_t n) {
    if (x_step == 1 && y_step == 1) {
        std::memmove(y_bytes, x_bytes,
                     static_cast<std::size_t>(n) * sizeof(Bits));  // y may be x
        return;
    }
    const Bits *x = reinterpret_cast<const Bits *>(x_bytes);
    Bits *y = reinterpret_cast<Bits *>(y_bytes);
    if (x_step == 0 && y_step == 1) std::fill_n(y, n, *x);
    else
        for (std::int64_t i = 0; i < n; ++i) y[i * y_step] = x[i * x_step];
}

// One element's bytes.
struct Element {
    alignas(8) std::byte bytes[8] = {};
};

// A number as an element of that type: integers take the nearest that there is.
Element element_of(const Blueprint &blueprint, const char *key, DType dtype) {
    Element element;
    const auto found = blueprint.attributes.find(key);
    const auto *whole = found == blueprint.attributes.end() ? nullptr : std::get_if<std::int64_t>(&found->second);
    const double number = real_or(blueprint, key, 0.0);
    const auto store = [&](auto value) { std::memcpy(element.bytes, &value, sizeof value); };
    switch (dtype) {
        case DType::f32:
            store(static_cast<float>(number));
            break;
        case DType::i64:
            store(whole ? *whole : numbers::to_integer<std::int64_t>(number));
            break;
        case DType::i32:
            store(numbers::to_integer<std::int32_t>(number));
            break;
        case DType::i8:
            store(numbers::to_integer<std::int8_t>(number));
            break;
        case DType::u8:
            store(numbers::to_integer<std::uint8_t>(number));
            break;
        case DType::boolean:
            store(static_cast<std::uint8_t>(number != 0.0));
            break;
        default:
            refuse(blueprint, std::string("there is no filling with the type ") + name_of(dtype));
    }
    return element;
}

class Copy final : public StridedOperation {
  public:
    explicit Copy(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        require_same_dtype(blueprint, "the output", outputs_[0], inputs_[0]);
        require_broadcast(blueprint, "the input", inputs_[0], outputs_[0]);
        loop_ = copy_loop(size_of(inputs_[0].dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y, x);
        const auto part = element_portion(worker, walk.size());
        copy_run(walk, part, x, y, loop_);
    }

  private:
    CopyLoop loop_;
};

class Concat final : public StridedOperation {
  public:
    explicit Concat(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, std::max<std::size_t>(blueprint.inputs.size(), 1), blueprint.inputs.size());
        const Operand &y = outputs_[0];
        axis_ = axis_of(blueprint, "axis", y.rank);
        Extent total{0, Symbol::none};
        for (const Operand &input : inputs_) {
            require_same_dtype(blueprint, "an input", input, y);
            Operand expected = y;
            if (input.rank == y.rank) expected.dims[axis_] = input.dims[axis_];
            require_same_shape(blueprint, "an input", input, expected);
            const Extent &extent = input.dims[axis_];
            if (extent.coefficient == 0) continue;
            if (total.coefficient != 0 && total.symbol != extent.symbol)
                refuse(blueprint,
                       "inputs of fixed and of varying size are joined "
                       "along the dimension " +
                           std::to_string(axis_) + ": " + describe(input));
            total = {total.coefficient + extent.coefficient, extent.symbol};
        }
        if (!same(total, y.dims[axis_]))
            refuse(blueprint, "the inputs' sizes along the dimension " + std::to_string(axis_) + " do not add up to " +
                                  describe(y));
        loop_ = copy_loop(size_of(y.dtype));
    }

    void run(const Worker &worker) const override {
        Tensor part_of_y = worker.resolve(outputs_[0]);
        const auto y_size = static_cast<std::int64_t>(size_of(part_of_y.dtype));
        for (const Operand &input : inputs_) {
            const Tensor x = worker.resolve(input);
            part_of_y.dims[axis_] = x.dims[axis_];
            const auto walk = broadcast(part_of_y, x);
            const auto part = element_portion(worker, walk.size());
            copy_run(walk, part, x, part_of_y, loop_);
            part_of_y.data += x.dims[axis_] * part_of_y.strides[axis_] * y_size;
        }
    }

  private:
    int axis_ = 0;
    CopyLoop loop_;
};

class Fill final : public StridedOperation {
  public:
    explicit Fill(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 0, 0);
        value_ = element_of(blueprint, "value", outputs_[0].dtype);
        loop_ = copy_loop(size_of(outputs_[0].dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor y = worker.resolve(outputs_[0]);
        const auto walk = broadcast(y);
        const auto part = element_portion(worker, walk.size());
        const auto size = static_cast<std::int64_t>(size_of(y.dtype));
        walk.over(part.begin, part.end, [&](const auto &at, std::int64_t n) {
            loop_(value_.bytes, 0, y.data + at[0] * size, walk.step(0), n);
        });
    }

  private:
    Element value_;
    CopyLoop loop_;
};

class Tile final : public StridedOperation {
  public:
    explicit Tile(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        const Operand &x = inputs_[0];
        const Operand &y = outputs_[0];
        require_same_dtype(blueprint, "the output", y, x);
        bool fits = x.rank == y.rank;
        for (int d = 0; fits && d < x.rank; ++d) {
            const Extent &from = x.dims[d];
            const Extent &to = y.dims[d];
            // n * c fit into m * c tokens, and constants into anything that they divide.
            fits = to.coefficient == 0 || (from.coefficient != 0 && to.coefficient % from.coefficient == 0 &&
                                           (from.symbol == Symbol::none || from.symbol == to.symbol));
        }
        if (!fits) refuse(blueprint, "the output is " + describe(y) + ", not a multiple of " + describe(x));
        loop_ = copy_loop(size_of(x.dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        Walk<2> walk;
        for (int d = 0; d < y.rank; ++d) {
            if (y.dims[d] == 0) return;
            walk.extend(y.dims[d] / x.dims[d], {y.strides[d] * x.dims[d], 0});
            walk.extend(x.dims[d], {y.strides[d], x.strides[d]});
        }
        const auto part = element_portion(worker, walk.size());
        copy_run(walk, part, x, y, loop_);
    }

  private:
    CopyLoop loop_;
};

// Shared by Pad and Trilu: every line along the last dimension of y is a run of x between two fills.
class Framed : public StridedOperation {
  protected:
    explicit Framed(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 1, 1);
        require_same_dtype(blueprint, "the output", outputs_[0], inputs_[0]);
        fill_ = element_of(blueprint, "value", outputs_[0].dtype);
        loop_ = copy_loop(size_of(outputs_[0].dtype));
    }

    // Elements [begin, end) of a line of n come from x, the others are filled.
    void line(const std::byte *x, std::int64_t x_step, std::byte *y, std::int64_t y_step, std::int64_t begin,
              std::int64_t end, std::int64_t n, std::int64_t size) const {
        begin = std::clamp<std::int64_t>(begin, 0, n);
        end = std::clamp(end, begin, n);
        loop_(fill_.bytes, 0, y, y_step, begin);
        if (end > begin) loop_(x, x_step, y + begin * y_step * size, y_step, end - begin);
        loop_(fill_.bytes, 0, y + end * y_step * size, y_step, n - end);
    }

    Element fill_;
    CopyLoop loop_;
};

class Pad final : public Framed {
  public:
    explicit Pad(const Blueprint &blueprint) : Framed(blueprint) {
        const Operand &x = inputs_[0];
        const Operand &y = outputs_[0];
        if (text_or(blueprint, "mode", "constant") != "constant")
            refuse(blueprint, "the attribute 'mode' is '" + text_or(blueprint, "mode", "") + "', expected 'constant'");
        pads_ = required_integers(blueprint, "pads");
        if (x.rank == 0 || pads_.size() != 2 * static_cast<std::size_t>(x.rank))
            refuse(blueprint, "the attribute 'pads' has " + std::to_string(pads_.size()) + " entries for " +
                                  describe(x) + ", expected two a dimension");
        Operand expected = x;
        for (int d = 0; d < x.rank; ++d) {
            const std::int64_t before = pads_[d];
            const std::int64_t after = pads_[d + x.rank];
            constexpr std::int64_t kMost = std::int64_t{1} << 40;
            if (before < 0 || after < 0 || before > kMost || after > kMost)
                refuse(blueprint,
                       "the attribute 'pads' has an entry that is negative "
                       "or absurdly large");
            if (before + after == 0) continue;
            if (x.dims[d].symbol != Symbol::none)
                refuse(blueprint, "a dimension of varying size would be padded: " + describe(x));
            expected.dims[d].coefficient += before + after;
        }
        require_same_shape(blueprint, "the output", y, expected);
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const int last = y.rank - 1;
        const auto size = static_cast<std::int64_t>(size_of(y.dtype));
        const std::int64_t width = y.dims[last];
        const auto part = line_portion(worker, width ? y.size() / width : 0, width);
        for (std::int64_t number = part.begin; number < part.end; ++number) {
            std::int64_t rest = number;
            std::int64_t x_at = 0;
            std::int64_t y_at = 0;
            bool inside = true;
            for (int d = last - 1; d >= 0; --d) {
                const std::int64_t index = rest % y.dims[d];
                rest /= y.dims[d];
                inside = inside && index >= pads_[d] && index < pads_[d] + x.dims[d];
                x_at += (index - pads_[d]) * x.strides[d];
                y_at += index * y.strides[d];
            }
            const std::int64_t begin = inside ? pads_[last] : 0;
            const std::int64_t end = inside ? begin + x.dims[last] : 0;
            line(x.data + (inside ? x_at * size : 0), x.strides[last], y.data + y_at * size, y.strides[last], begin,
                 end, width, size);
        }
    }

  private:
    std::vector<std::int64_t> pads_;
};

class Trilu final : public Framed {
  public:
    explicit Trilu(const Blueprint &blueprint) : Framed(blueprint) {
        require_same_shape(blueprint, "the output", outputs_[0], inputs_[0]);
        if (inputs_[0].rank < 2) refuse(blueprint, "the input is " + describe(inputs_[0]) + ", expected matrices");
        upper_ = integer_or(blueprint, "upper", 1) != 0;
        constexpr std::int64_t kMost = std::int64_t{1} << 40;
        diagonal_ = std::clamp(integer_or(blueprint, "k", 0), -kMost, kMost);
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor y = worker.resolve(outputs_[0]);
        const int last = y.rank - 1;
        const auto size = static_cast<std::int64_t>(size_of(y.dtype));
        const std::int64_t width = y.dims[last];
        const auto part = line_portion(worker, width ? y.size() / width : 0, width);
        for (std::int64_t number = part.begin; number < part.end; ++number) {
            std::int64_t rest = number;
            std::int64_t x_at = 0;
            std::int64_t y_at = 0;
            for (int d = last - 1; d >= 0; --d) {
                const std::int64_t index = rest % y.dims[d];
                rest /= y.dims[d];
                x_at += index * x.strides[d];
                y_at += index * y.strides[d];
            }
            const std::int64_t row = number % y.dims[last - 1];
            const std::int64_t begin = upper_ ? std::clamp<std::int64_t>(row + diagonal_, 0, width) : 0;
            const std::int64_t end = upper_ ? width : row + diagonal_ + 1;
            line(x.data + (x_at + begin * x.strides[last]) * size, x.strides[last], y.data + y_at * size,
                 y.strides[last], begin, end, width, size);
        }
    }

  private:
    bool upper_ = true;
    std::int64_t diagonal_ = 0;
};

template <class T>
std::unique_ptr<Operation> make(const Blueprint &blueprint) {
    return std::make_unique<T>(blueprint);
}

}  // namespace

CopyLoop copy_loop(std::size_t element_bytes) {
    switch (element_bytes) {
        case 8:
            return copy<std::uint64_t>;
        case 4:
            return copy<std::uint32_t>;
        case 2:
            return copy<std::uint16_t>;
        default:
            return copy<std::uint8_t>;
    }
}

void add_arrangement(Registry &registry) {
    registry.add("Copy", make<Copy>);
    registry.add("Identity", make<Copy>);
    registry.add("Concat", make<Concat>);
    registry.add("Fill", make<Fill>);
    registry.add("Pad", make<Pad>);
    registry.add("Tile", make<Tile>);
    registry.add("Trilu", make<Trilu>);
}

}  // namespace inferencex::cpu
