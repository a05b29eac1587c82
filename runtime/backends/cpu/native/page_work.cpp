#include "page_work.h"

#include <sys/mman.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <utility>

#if defined(__linux__) && !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22  // since Linux 5.14; headers may be older than the system
#endif

namespace inferencex::cpu {
namespace {

// Small, for a thread that changes the process's mappings, as each growth of the heap does, may wait for a call to end.
constexpr std::size_t kPiece = std::size_t{512} << 10;

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
}

// Do what is wished for the first `bytes`, whole pages; false if this system does not do it.
bool fulfil(const Pages &pages, std::size_t bytes) {
    switch (pages.wish) {
        case Pages::Wish::writable:
            // Writing holds up nobody but those who write to the same mapping; Linux's MADV_POPULATE_WRITE does.
            for (std::size_t i = 0; i < bytes; i += page_size())
                *static_cast<volatile std::byte *>(pages.begin + i) = std::byte{0};
            return true;
        case Pages::Wish::readable:
#ifdef MADV_POPULATE_READ  // a file that became shorter gives an error here, and no signal
            return madvise(pages.begin, bytes, MADV_POPULATE_READ) == 0;
#else
            return false;
#endif
        case Pages::Wish::given_back:
            return madvise(pages.begin, bytes, MADV_DONTNEED) == 0;
    }
    return false;
}

// The whole pages inside of a range.
Pages whole_pages(const Pages &pages) {
    const auto begin = reinterpret_cast<std::uintptr_t>(pages.begin);
    const std::uintptr_t first = (begin + page_size() - 1) / page_size() * page_size();
    const std::uintptr_t end = (begin + pages.bytes) / page_size() * page_size();
    return {pages.begin + (first - begin), end > first ? end - first : 0, pages.wish};
}

// Return free pages of the heap to the system, those between others too. C libraries other than glibc keep few.
void trim_heap() {
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

}  // namespace

void give_back(std::byte *begin, std::size_t bytes) {
    const Pages pages = whole_pages({begin, bytes, Pages::Wish::given_back});
    if (pages.bytes != 0) fulfil(pages, pages.bytes);
}

void PageWork::start(std::vector<Pages> pages, AtEnd at_end) {
    stop();
    stops_.store(false);
    pages_ = std::move(pages);
    for (Pages &all : pages_) all = whole_pages(all);
    try {
        thread_ = std::thread([this, at_end] { run(at_end); });
    } catch (const std::system_error &) {  // no thread is left: the pages come, or stay, as they would without this
    }
}

void PageWork::stop() {
    stops_.store(true);
    if (thread_.joinable()) thread_.join();
}

void PageWork::run(AtEnd at_end) {
    for (bool busy = true; busy;) {
        busy = false;
        for (Pages &rest : pages_) {
            if (rest.bytes == 0) continue;
            if (stops_.load(std::memory_order_relaxed)) return;
            const std::size_t piece = std::min(rest.bytes, kPiece);
            const bool done = fulfil(rest, piece);
            if (done) rest.begin += piece;
            rest.bytes = done ? rest.bytes - piece : 0;
            busy = true;
        }
    }
    if (at_end == AtEnd::trim_heap && !stops_.load(std::memory_order_relaxed)) trim_heap();
}

}  // namespace inferencex::cpu
