#include "limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "kernels.h"
#include "memory.h"
#include "thread_pool.h"

namespace inferencex::cpu {
namespace {

using Clock = std::chrono::steady_clock;

template <class F>
double seconds_of(F f) {
    const auto began = Clock::now();
    f();
    return std::chrono::duration<double>(Clock::now() - began).count();
}

}  // namespace

double measure_integer_peak(int threads) {
    struct Context {
        const Kernels &kernels;
        std::atomic<double> operations{0};
    } context{choose_kernels()};
    constexpr std::int64_t kIterations = 1 << 20;
    ThreadPool pool(threads, {});
    double best = 0;
    for (int round = 0; round < 5; ++round) {
        context.operations = 0;
        const double seconds = seconds_of([&] {
            pool.run(
                [](void *c, int) {
                    auto &shared = *static_cast<Context *>(c);
                    shared.operations.fetch_add(shared.kernels.limits.dot_products(kIterations));
                },
                &context);
        });
        best = std::max(best, context.operations / seconds);
    }
    return best;
}

double measure_bandwidth(int threads, std::size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    Memory memory;
    struct Context {
        const Kernels &kernels;
        std::byte *data;
        std::size_t bytes;
        std::atomic<std::int32_t> sum{0};
    } context{choose_kernels(), nullptr, bytes};
    ThreadPool pool(threads, {});
    context.data = memory.allocate(bytes * static_cast<std::size_t>(pool.size()));
    const auto fill = [](void *c, int thread) {
        auto &shared = *static_cast<Context *>(c);
        std::memset(shared.data + shared.bytes * static_cast<std::size_t>(thread), 1, shared.bytes);
    };
    pool.run(fill, &context);
    double best = 0;
    for (int round = 0; round < 5; ++round) {
        const double seconds = seconds_of([&] {
            pool.run(
                [](void *c, int thread) {
                    auto &shared = *static_cast<Context *>(c);
                    shared.sum ^= shared.kernels.limits.read(
                        shared.data + shared.bytes * static_cast<std::size_t>(thread), shared.bytes);
                },
                &context);
        });
        best = std::max(best, static_cast<double>(bytes) * pool.size() / seconds);
    }
    return best;
}

}  // namespace inferencex::cpu
