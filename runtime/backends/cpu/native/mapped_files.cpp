#include "mapped_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>

namespace inferencex::cpu {

bool FilePart::read(std::int64_t at, std::int64_t bytes, std::byte *to) const {
    while (bytes > 0) {  // a file system may give less at a time than was asked for
        const ssize_t got = pread(descriptor, to, static_cast<std::size_t>(bytes), static_cast<off_t>(offset + at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        bytes -= got;
        to += got;
    }
    return true;
}

MappedFiles::~MappedFiles() {
    for (const int descriptor : descriptors_)
        if (descriptor >= 0) close(descriptor);
}

void MappedFiles::add(Memory::Room memory, int descriptor) {
    memory_.reserve(memory_.size() + 1);
    ready_.reserve(memory_.size() + 1);
    descriptors_.reserve(memory_.size() + 1);                                     // nothing throws from here on
    const int own = descriptor < 0 ? -1 : fcntl(descriptor, F_DUPFD_CLOEXEC, 3);  // none left: read in memory
    memory_.push_back(memory);
    descriptors_.push_back(own);
    ready_.push_back(memory.begin);
}

void MappedFiles::set_ready(const std::vector<Pages> &left) {
    for (std::size_t i = 1; i < left.size() && i <= ready_.size(); ++i) ready_[i - 1] = left[i].begin;
}

std::size_t MappedFiles::bytes() const {
    std::size_t sum = 0;
    for (const Memory::Room &room : memory_) sum += room.bytes;
    return sum;
}

FilePart MappedFiles::part(const std::byte *begin, std::size_t bytes) const {
    const std::size_t index = index_of(begin, bytes);
    if (index == memory_.size()) return {};
    return {descriptors_[index], begin - memory_[index].begin, std::max<std::int64_t>(ready_[index] - begin, 0)};
}

std::size_t MappedFiles::index_of(const std::byte *begin, std::size_t bytes) const {
    const std::less_equal<const std::byte *> before;  // in an order that unrelated pointers have too
    std::size_t index = 0;
    for (; index < memory_.size(); ++index) {
        const Memory::Room &room = memory_[index];
        if (bytes <= room.bytes && before(room.begin, begin) && before(begin, room.begin + (room.bytes - bytes))) break;
    }
    return index;
}

}  // namespace inferencex::cpu
