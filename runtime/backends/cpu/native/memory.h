// Memory that lives as long as a program: packed weights, the arena, layer state. Zeroed, 64-byte aligned, in huge
// pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace inferencex::cpu {

class Memory {
  public:
    struct Room {
        std::byte *begin;
        std::size_t bytes;
    };

    Memory() = default;
    ~Memory();
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;

    // Reserve `bytes`; pages are committed when first written. Throws std::bad_alloc. Safe from several threads.
    std::byte *allocate(std::size_t bytes);
    // The same in a mapping of its own, which takes nothing of the room that was made.
    std::byte *allocate_apart(std::size_t bytes);
    // Make room that the next allocations come from, and return it. Throws std::bad_alloc.
    Room make_room(std::size_t bytes);
    // Return what is left of the room that allocations come from, and let none of them have it any more.
    Room take_rest();
    std::size_t allocated() const { return allocated_; }

    // A region that everyone who asks shares, as large as the largest request; nothing in it lasts beyond an operation.
    // It moves while requests grow: read the pointer when the operation runs. Not to be called by several threads.
    std::byte *const *workspace(std::size_t bytes);

  private:
    struct Mapping {
        void *base;
        std::size_t bytes;
    };
    Room map(std::size_t bytes);

    std::mutex mutex_;
    std::vector<Mapping> mappings_;
    std::byte *free_ = nullptr;  // rest of the current slab
    std::size_t left_ = 0;
    std::size_t allocated_ = 0;
    std::byte *workspace_ = nullptr;
    std::size_t workspace_bytes_ = 0;
};

}  // namespace inferencex::cpu
