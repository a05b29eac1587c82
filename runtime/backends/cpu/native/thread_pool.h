// A fixed set of threads that run one function together, and a barrier between its phases.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

namespace inferencex::cpu {

// The thread that calls `run` is number 0; the others wait for the next call. They look for it for a moment (a decode
// loop calls again soon), then sleep, so that an idle program takes no processor time. Within `run` a barrier is a few
// hundred nanoseconds; a thread that waits longer than that gives its processor away, in case there are fewer
// processors than threads.
class ThreadPool {
  public:
    using Function = void (*)(void *context, int thread);

    // `cpus`: processor of each thread, or empty: the system decides. Thread 0 is the caller's and is not pinned.
    ThreadPool(int threads, const std::vector<int> &cpus);
    ~ThreadPool();
    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    int size() const { return size_; }
    // Call `function(context, i)` on every thread i and return when all are done. One call at a time.
    void run(Function function, void *context);
    // To be called by every thread of a `run`, equally often.
    void barrier();

  private:
    void serve(int thread);
    void stop();

    static constexpr std::size_t kCacheLine = 64;

    const int size_;
    Function function_ = nullptr;
    void *context_ = nullptr;
    alignas(kCacheLine) std::atomic<int> call_{0};        // counts calls of `run`
    alignas(kCacheLine) std::atomic<int> arrived_{0};     // threads at the barrier
    alignas(kCacheLine) std::atomic<int> generation_{0};  // counts barriers
    std::atomic<bool> stops_{false};
    std::vector<std::thread> threads_;
};

}  // namespace inferencex::cpu
