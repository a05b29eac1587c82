// A constant of few bits an element that is read here and there: where it is mapped, or from its file if it is large.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../mapped_files.h"
#include "../tensor.h"

namespace inferencex::cpu {

class StoredElements {
  public:
    // Elements in memory: the ones that were asked for begin with element `first`; there are `bytes` of all.
    struct Run {
        const std::byte *data = nullptr;
        std::int64_t first = 0;
        std::int64_t bytes = 0;
    };

    StoredElements() = default;
    // A contiguous constant, or nothing, of elements of `bits`, flat.
    StoredElements(const MappedFiles &files, const Operand &constant, std::int64_t bits) : bits_(bits) {
        if (!constant.present) return;
        data_ = constant.constant + constant.offset;
        bytes_ = static_cast<std::int64_t>(constant.constant_bytes);
        if (bytes_ >= kLarge) file_ = files.part(data_, constant.constant_bytes);
    }

    // Memory that `read` needs for `count` elements.
    std::size_t room(std::int64_t count) const {
        if (file_.descriptor < 0) return 0;
        return static_cast<std::size_t>((bytes_of(count + kEven) + kAlignment - 1) / kAlignment * kAlignment);
    }

    // Elements `at` to `at + count`, in `room` or where they are mapped. A file that does not give them has become
    // shorter; what is mapped then says so with a signal.
    Run read(std::int64_t at, std::int64_t count, std::byte *room) const {
        if (file_.descriptor < 0) return {data_, at, bytes_};
        const std::int64_t before = at % kEven;
        const std::int64_t begin = (at - before) / kEven * bits_;
        const std::int64_t bytes = std::min(bytes_of(before + count), bytes_ - begin);
        if (!file_.read(begin, bytes, room)) return {data_, at, bytes_};
        return {room, before, bytes};
    }

  private:
    static constexpr std::int64_t kEven = 8;  // so many elements end with a byte
    static constexpr std::int64_t kAlignment = 64;
    static constexpr std::int64_t kLarge = std::int64_t{1} << 20;  // worth more than a system call for each row

    std::int64_t bytes_of(std::int64_t count) const { return (count * bits_ + 7) / 8; }

    const std::byte *data_ = nullptr;
    std::int64_t bytes_ = 0, bits_ = 8;
    FilePart file_;
};

}  // namespace inferencex::cpu
