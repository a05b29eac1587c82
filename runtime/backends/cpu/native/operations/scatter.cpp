// ScatterElements (x, indices, updates; axis, reduction?) -> y: x with elements replaced or combined with others.
//
// Of any type, with a reduction f32, i64 or i32. An index out of range changes nothing. y may be x.
#include <string>

#include "../operation.h"
#include "arrangement.h"
#include "blueprint_checks.h"
#include "indices.h"
#include "numbers.h"
#include "strided.h"

namespace inferencex::cpu {
namespace {

using namespace checks;

// Threads take whole lines along the axis, and within a line updates come in the order of their indices.
class ScatterElements final : public StridedOperation {
  public:
    explicit ScatterElements(const Blueprint &blueprint) : StridedOperation(blueprint) {
        require_operands(blueprint, 3, 3);
        const Operand &x = inputs_[0];
        const Operand &indices = inputs_[1];
        const Operand &updates = inputs_[2];
        require_indices(blueprint, indices);
        require_same_shape(blueprint, "the updates", updates, indices);
        require_same_dtype(blueprint, "the updates", updates, x);
        require_same_dtype(blueprint, "the output", outputs_[0], x);
        require_same_shape(blueprint, "the output", outputs_[0], x);
        axis_ = axis_of(blueprint, "axis", x.rank);
        bool fits = x.rank == indices.rank;
        for (int d = 0; fits && d < x.rank; ++d) fits = d == axis_ || within(indices.dims[d], x.dims[d]);
        if (!fits) refuse(blueprint, "the indices " + describe(indices) + " exceed the input " + describe(x));
        const std::string reduction = text_or(blueprint, "reduction", "none");
        if (reduction != "none") require_dtype(blueprint, "the input", x, {DType::f32, DType::i64, DType::i32});
        update_ = reduction == "none" ? copy_loop(size_of(x.dtype)) : update(reduction, x.dtype);
        if (!update_)
            refuse(blueprint, "the attribute 'reduction' is '" + reduction + "', expected none, add, mul, max or min");
        copy_ = copy_loop(size_of(x.dtype));
    }

    void run(const Worker &worker) const override {
        const Tensor x = worker.resolve(inputs_[0]);
        const Tensor indices = worker.resolve(inputs_[1]);
        const Tensor updates = worker.resolve(inputs_[2]);
        const Tensor y = worker.resolve(outputs_[0]);
        const auto size = static_cast<std::int64_t>(size_of(x.dtype));
        const std::int64_t length = y.dims[axis_];
        const auto part = line_portion(worker, length ? y.size() / length : 0, length);
        for (std::int64_t number = part.begin; number < part.end; ++number) {
            std::int64_t rest = number;
            std::int64_t x_at = 0;
            std::int64_t y_at = 0;
            std::int64_t indices_at = 0;
            std::int64_t updates_at = 0;
            bool updated = true;
            for (int d = y.rank - 1; d >= 0; --d) {
                if (d == axis_) continue;
                const std::int64_t index = rest % y.dims[d];
                rest /= y.dims[d];
                updated = updated && index < indices.dims[d];
                x_at += index * x.strides[d];
                y_at += index * y.strides[d];
                indices_at += index * indices.strides[d];
                updates_at += index * updates.strides[d];
            }
            std::byte *line = y.data + y_at * size;
            copy_(x.data + x_at * size, x.strides[axis_], line, y.strides[axis_], length);
            if (!updated) continue;
            for (std::int64_t i = 0; i < indices.dims[axis_]; ++i) {
                const std::int64_t index = index_at(indices, indices_at + i * indices.strides[axis_], length);
                if (index < 0) continue;
                update_(updates.data + (updates_at + i * updates.strides[axis_]) * size, 0,
                        line + index * y.strides[axis_] * size, 1, 1);
            }
        }
    }

  private:
    template <class T, T (*Combine)(T, T)>
    static void combine(const std::byte *update, std::int64_t, std::byte *target, std::int64_t, std::int64_t) {
        T *value = reinterpret_cast<T *>(target);
        *value = Combine(*value, *reinterpret_cast<const T *>(update));
    }
    template <class T>
    static CopyLoop update_of(const std::string &reduction) {
        if (reduction == "add") return combine<T, numbers::add<T>>;
        if (reduction == "mul") return combine<T, numbers::multiply<T>>;
        if (reduction == "max") return combine<T, numbers::maximum<T>>;
        if (reduction == "min") return combine<T, numbers::minimum<T>>;
        return nullptr;
    }
    static CopyLoop update(const std::string &reduction, DType dtype) {
        switch (dtype) {
            case DType::f32:
                return update_of<float>(reduction);
            case DType::i64:
                return update_of<std::int64_t>(reduction);
            default:
                return update_of<std::int32_t>(reduction);
        }
    }

    int axis_ = 0;
    CopyLoop copy_;
    CopyLoop update_ = nullptr;
};

}  // namespace

void add_scatter(Registry &registry) {
    registry.add("ScatterElements", [](const Blueprint &blueprint) -> std::unique_ptr<Operation> {
        return std::make_unique<ScatterElements>(blueprint);
    });
}

}  // namespace inferencex::cpu
