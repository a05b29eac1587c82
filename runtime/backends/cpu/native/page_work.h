// What the kernel does with pages while nobody waits for it: a thread that has them ready before they are used, or
// gives them back once they were.
#pragma once

#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace inferencex::cpu {

struct Pages {
    enum class Wish {
        writable,   // zeroed memory that nobody writes to before `stop`: have it there
        readable,   // a mapped file that is about to be read: have it mapped
        given_back  // a mapped file that was read, or memory that holds nothing: the system may have it
    };
    std::byte *begin;
    std::size_t bytes;
    Wish wish;
};

// Give back whole pages at once, on this thread.
void give_back(std::byte *begin, std::size_t bytes);

class PageWork {
  public:
    PageWork() = default;
    ~PageWork() { stop(); }
    PageWork(const PageWork &) = delete;
    PageWork &operator=(const PageWork &) = delete;

    enum class AtEnd { nothing, trim_heap };  // give back what the C library holds and nobody uses

    // Begin with these, a piece of each in turn; what the kernel cannot do, or no thread is left for, stays undone,
    // which costs time or memory only. What was begun before is stopped.
    void start(std::vector<Pages> pages, AtEnd at_end = AtEnd::nothing);
    // End at the next piece of half a megabyte, and leave the rest undone.
    void stop();
    // What was left undone of each of the pages that were begun with, when it has stopped.
    const std::vector<Pages> &left() const { return pages_; }

  private:
    void run(AtEnd at_end);

    std::vector<Pages> pages_;
    std::atomic<bool> stops_{false};
    std::thread thread_;
};

}  // namespace inferencex::cpu
