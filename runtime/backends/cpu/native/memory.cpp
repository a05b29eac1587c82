#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <new>

namespace inferencex::cpu {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSlab = std::size_t{32} << 20;

}  // namespace

Memory::~Memory() {
    for (const Mapping &mapping : mappings_) munmap(mapping.base, mapping.bytes);
}

std::byte *Memory::allocate(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    const std::size_t wanted = (std::max(bytes, std::size_t{1}) + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard lock(mutex_);
    if (wanted > left_) {
        const Room slab = map(std::max(kSlab, wanted));
        if (slab.bytes - wanted < left_) {  // the old slab has more left than this one will: keep filling that
            allocated_ += wanted;
            return slab.begin;
        }
        free_ = slab.begin;
        left_ = slab.bytes;
    }
    std::byte *result = free_;
    free_ += wanted;
    left_ -= wanted;
    allocated_ += wanted;
    return result;
}

std::byte *Memory::allocate_apart(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    const std::lock_guard lock(mutex_);
    const Room room = map(std::max(bytes, std::size_t{1}));
    allocated_ += room.bytes;
    return room.begin;
}

Memory::Room Memory::make_room(std::size_t bytes) {
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    const std::lock_guard lock(mutex_);
    const Room room = map(std::max(bytes, std::size_t{1}));
    free_ = room.begin;
    left_ = room.bytes;
    return room;
}

Memory::Room Memory::take_rest() {
    const std::lock_guard lock(mutex_);
    const Room rest{free_, left_};
    left_ = 0;
    return rest;
}

// Map so many bytes, rounded up to huge pages.
Memory::Room Memory::map(std::size_t bytes) {
    const std::size_t slab = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    const std::size_t mapped = slab + kHugePage;  // room to start on a border of huge pages
    void *base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    mappings_.push_back({base, mapped});
    const auto address = reinterpret_cast<std::uintptr_t>(base);
    std::byte *start = static_cast<std::byte *>(base) + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
#ifdef MADV_HUGEPAGE
    madvise(start, slab, MADV_HUGEPAGE);  // a refusal costs speed only
#endif
    return {start, slab};
}

std::byte *const *Memory::workspace(std::size_t bytes) {
    if (bytes > workspace_bytes_) {  // the smaller region before it was never written to, and so takes no memory
        workspace_ = allocate(bytes);
        workspace_bytes_ = bytes;
    }
    return &workspace_;
}

}  // namespace inferencex::cpu
