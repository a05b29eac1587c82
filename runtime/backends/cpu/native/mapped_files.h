// The files that a program's weights are mapped from: which memory is theirs, and what of them can be read without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "page_work.h"

namespace inferencex::cpu {

// A part of an open file; `descriptor` is -1 where it can only be read in memory.
struct FilePart {
    int descriptor = -1;
    std::int64_t offset = 0;
    std::int64_t ready = 0;  // bytes from its start on whose pages are mapped already

    // Read `bytes` that begin `at` bytes into the part; false if the file does not give them.
    bool read(std::int64_t at, std::int64_t bytes, std::byte *to) const;
};

class MappedFiles {
  public:
    MappedFiles() = default;
    ~MappedFiles();
    MappedFiles(const MappedFiles &) = delete;
    MappedFiles &operator=(const MappedFiles &) = delete;

    // Pages were made ready, of other memory and then of the files in their order: all but those that are left.
    void set_ready(const std::vector<Pages> &left);
    // A file is mapped to this memory, from its start. A descriptor that is not -1 is duplicated.
    void add(Memory::Room memory, int descriptor);
    const std::vector<Memory::Room> &memory() const { return memory_; }
    std::size_t bytes() const;
    bool empty() const { return memory_.empty(); }
    // Whether all of this memory is that of one file.
    bool hold(const std::byte *begin, std::size_t bytes) const { return index_of(begin, bytes) < memory_.size(); }
    // What of a file lies in this memory.
    FilePart part(const std::byte *begin, std::size_t bytes) const;

  private:
    std::size_t index_of(const std::byte *begin, std::size_t bytes) const;  // or that after the last one

    std::vector<Memory::Room> memory_;
    std::vector<int> descriptors_;
    std::vector<const std::byte *> ready_;  // where what is mapped ends
};

}  // namespace inferencex::cpu
