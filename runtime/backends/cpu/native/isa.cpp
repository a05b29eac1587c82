// Which tables of kernels this machine can run, and which one is used.
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace inferencex::cpu {

#if defined(__x86_64__)
namespace avx512_bf16 {
extern const Kernels kernels;
}
namespace avx512_vnni {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kernels;
}
#endif
namespace baseline {
extern const Kernels kernels;
}

namespace {

#if defined(__aarch64__)
bool has_dot_product() {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true;  // every aarch64 machine that runs macOS has it
#endif
}
#endif

struct Available {
    std::array<const Kernels *, 4> tables{};
    std::size_t count = 0;

    Available() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
        if (avx512 && __builtin_cpu_supports("avx512bf16")) tables[count++] = &avx512_bf16::kernels;
        if (avx512) tables[count++] = &avx512_vnni::kernels;
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
            tables[count++] = &avx2::kernels;
#elif defined(__aarch64__)
        if (has_dot_product()) tables[count++] = &neon::kernels;
#endif
        tables[count++] = &baseline::kernels;
    }
};

const Available &available() {
    static const Available found;
    return found;
}

}  // namespace

const Kernels *const *available_kernels(std::size_t &count) {
    count = available().count;
    return available().tables.data();
}

const Kernels &choose_kernels() {
    const Available &found = available();
    const char *wanted = std::getenv("INFERENCEX_ISA");
    if (wanted == nullptr || *wanted == '\0') return *found.tables[0];
    std::string names;
    for (std::size_t i = 0; i < found.count; ++i) {
        if (std::string(found.tables[i]->isa) == wanted) return *found.tables[i];
        names += std::string(i ? ", " : "") + found.tables[i]->isa;
    }
    throw std::invalid_argument("INFERENCEX_ISA=" + std::string(wanted) +
                                " is not among what this machine runs: " + names);
}

}  // namespace inferencex::cpu
