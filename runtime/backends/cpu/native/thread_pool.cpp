#include "thread_pool.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inferencex::cpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLookForCalls = std::chrono::microseconds(200);
constexpr auto kYieldInBarrier = std::chrono::microseconds(500);
constexpr int kSpinsPerLook = 64;

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void pin_this_thread(int cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a processor that went away: run anywhere
#else
    (void)cpu;
#endif
}

// Wait until `value` is no longer `seen`: by looking, then (with `yields`) letting others run, at last asleep.
void await_change(const std::atomic<int> &value, int seen, Clock::duration look, bool yields) {
    for (int i = 0; i < kSpinsPerLook; ++i) {
        if (value.load(std::memory_order_acquire) != seen) return;
        pause();
    }
    const auto began = Clock::now();
    while (Clock::now() - began < look) {
        for (int i = 0; i < kSpinsPerLook; ++i) {
            if (value.load(std::memory_order_acquire) != seen) return;
            pause();
        }
        if (yields) std::this_thread::yield();
    }
    while (value.load(std::memory_order_acquire) == seen) value.wait(seen, std::memory_order_acquire);
}

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<int> &cpus) : size_(threads < 1 ? 1 : threads) {
    try {
        for (int i = 1; i < size_; ++i) {
            const int cpu = i < static_cast<int>(cpus.size()) ? cpus[i] : -1;
            threads_.emplace_back([this, i, cpu] {
                if (cpu >= 0) pin_this_thread(cpu);
                serve(i);
            });
        }
    } catch (...) {  // the system gives no more threads: end those there are, then say so
        stop();
        throw;
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    stops_.store(true, std::memory_order_release);
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
    for (std::thread &thread : threads_) thread.join();
    threads_.clear();
}

void ThreadPool::run(Function function, void *context) {
    if (size_ == 1) {
        function(context, 0);
        return;
    }
    function_ = function;
    context_ = context;
    call_.fetch_add(1, std::memory_order_release);
    call_.notify_all();
    function(context, 0);
    barrier();
}

void ThreadPool::barrier() {
    if (size_ == 1) return;
    const int generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
        return;
    }
    await_change(generation_, generation, kYieldInBarrier, true);
}

void ThreadPool::serve(int thread) {
    int seen = 0;
    for (;;) {
        await_change(call_, seen, kLookForCalls, false);
        ++seen;
        if (stops_.load(std::memory_order_acquire)) return;
        function_(context_, thread);
        barrier();
    }
}

}  // namespace inferencex::cpu
