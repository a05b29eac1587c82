// Measures what no kernel can exceed on this machine: int8 multiply-adds and memory reads, with all threads.
// Usage: limits THREADS. Prints one JSON object.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int kRepeats = 9;
constexpr std::size_t kBufferBytes = std::size_t{1} << 29;  // far beyond any cache
constexpr int kMultiplyIterations = 20'000'000;

using Clock = std::chrono::steady_clock;

// Seconds that `threads` threads take for `work(thread)`, from the moment all of them are there.
double timed(int threads, const std::function<void(int)> &work) {
    std::atomic<int> waiting{threads};
    std::vector<std::thread> pool;
    std::vector<Clock::time_point> begun(threads), ended(threads);
    for (int thread = 0; thread < threads; ++thread) {
        pool.emplace_back([&, thread] {
            waiting.fetch_sub(1);
            while (waiting.load() > 0) {
            }
            begun[thread] = Clock::now();
            work(thread);
            ended[thread] = Clock::now();
        });
    }
    for (auto &one : pool) one.join();
    const auto span = *std::max_element(ended.begin(), ended.end()) - *std::min_element(begun.begin(), begun.end());
    return std::chrono::duration<double>(span).count();
}

#if defined(__x86_64__)

// Twelve independent accumulators keep every multiplier busy whatever its latency. Assembly, because a compiler that is
// told not to drop the unused products also moves the accumulators through memory.
__attribute__((target("avx512f,avx512bw,avx512vnni"))) void multiply_vnni(int iterations) {
    for (int i = 0; i < iterations; ++i) {
        asm volatile(
            "vpdpbusd %%zmm0, %%zmm1, %%zmm4\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm5\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm6\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm7\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm8\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm9\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm10\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm11\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm12\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm13\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm14\n"
            "vpdpbusd %%zmm0, %%zmm1, %%zmm15\n" ::
                : "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    }
}

// What AVX2 has instead: three instructions for the same product.
__attribute__((target("avx2"))) void multiply_avx2(int iterations) {
    for (int i = 0; i < iterations; ++i) {
        asm volatile(
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm4\n vpmaddwd %%ymm2, %%ymm4, %%ymm4\n vpaddd %%ymm4, %%ymm10, %%ymm10\n"
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm5\n vpmaddwd %%ymm2, %%ymm5, %%ymm5\n vpaddd %%ymm5, %%ymm11, %%ymm11\n"
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm6\n vpmaddwd %%ymm2, %%ymm6, %%ymm6\n vpaddd %%ymm6, %%ymm12, %%ymm12\n"
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm7\n vpmaddwd %%ymm2, %%ymm7, %%ymm7\n vpaddd %%ymm7, %%ymm13, %%ymm13\n"
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm8\n vpmaddwd %%ymm2, %%ymm8, %%ymm8\n vpaddd %%ymm8, %%ymm14, %%ymm14\n"
            "vpmaddubsw %%ymm0, %%ymm1, %%ymm9\n vpmaddwd %%ymm2, %%ymm9, %%ymm9\n vpaddd %%ymm9, %%ymm15, %%ymm15\n" ::
                : "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    }
}

#endif

struct Peak {
    const char *instructions;
    double operations_per_second;  // a multiply-add is two
};

Peak measure_multiply(int threads) {
#if defined(__x86_64__)
    const bool vnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
    if (!vnni && !__builtin_cpu_supports("avx2")) return {"none", 0};
    const double operations = (vnni ? 12.0 * 64 : 6.0 * 32) * 2;
    const auto multiply = vnni ? multiply_vnni : multiply_avx2;
    double best = 1e30;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        best = std::min(best, timed(threads, [&](int) { multiply(kMultiplyIterations); }));
    }
    return {vnni ? "AVX-512 VNNI" : "AVX2", operations * kMultiplyIterations * threads / best};
#else
    (void)threads;
    return {"none", 0};
#endif
}

double measure_read(int threads) {
    const std::size_t words = kBufferBytes / sizeof(std::uint64_t);
    auto *buffer = static_cast<std::uint64_t *>(std::aligned_alloc(std::size_t{1} << 21, kBufferBytes));
    if (buffer == nullptr) return 0;
    const std::size_t share = words / threads;
    timed(threads, [&](int thread) {
        std::fill(buffer + thread * share, buffer + (thread + 1) * share, static_cast<std::uint64_t>(thread) + 1);
    });
    std::atomic<std::uint64_t> sink{0};
    double best = 1e30;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        best = std::min(best, timed(threads, [&](int thread) {
                            const std::uint64_t *data = buffer + thread * share;
                            std::uint64_t sums[32] = {};
                            for (std::size_t i = 0; i + 32 <= share; i += 32) {
                                for (int lane = 0; lane < 32; ++lane) sums[lane] ^= data[i + lane];
                            }
                            std::uint64_t total = 0;
                            for (auto sum : sums) total ^= sum;
                            sink ^= total;
                        }));
    }
    std::free(buffer);
    return static_cast<double>(share) * threads * sizeof(std::uint64_t) / best;
}

}  // namespace

int main(int argc, char **argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
    if (threads < 1) {
        std::fprintf(stderr, "usage: limits THREADS\n");
        return 2;
    }
    const Peak peak = measure_multiply(threads);
    std::printf("{\"instructions\": \"%s\", \"int8_operations_per_second\": %.6e, \"bytes_per_second\": %.6e}\n",
                peak.instructions, peak.operations_per_second, measure_read(threads));
    return 0;
}
