// Run-time detection of instruction sets.
#include "cpu/isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace megamoe::cpu {
namespace {

#if defined(__x86_64__)

// __builtin_cpu_supports also asks whether the operating system saves the registers.
[[maybe_unused]] bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

[[maybe_unused]] bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// AMX-TILE and AMX-BF16, with the AVX-512 VBMI byte permutes that decode for it, and the
// permission to use the tile registers, which Linux grants to a process that asks.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
    if (!has_avx512() || !__builtin_cpu_supports("avx512vbmi")) return false;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    constexpr int kArchReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;  // asm/prctl.h
    return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtiledata) == 0;
#else
    return false;
#endif
}

#endif

bool detect(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return true;
#ifdef MEGAMOE_HAVE_AVX2
        case Isa::kAvx2:
            return has_avx2();
#endif
#ifdef MEGAMOE_HAVE_AVX512
        case Isa::kAvx512:
            return has_avx512();
#endif
#ifdef MEGAMOE_HAVE_AMX
        case Isa::kAmx:
            return has_amx();
#endif
        default:
            return false;
    }
}

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kPortable:
            return "portable";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAmx:
            return "amx";
    }
    return "unknown";
}

bool isa_available(Isa isa) {
    static const bool available[] = {detect(Isa::kPortable), detect(Isa::kAvx2),
                                     detect(Isa::kAvx512), detect(Isa::kAmx)};
    return available[static_cast<int>(isa)];
}

Isa best_isa() {
    const char* forced = std::getenv("MEGAMOE_ISA");
    const std::string name = forced == nullptr ? "" : forced;
    Isa best = Isa::kPortable;
    std::string names;
    for (Isa isa : kAllIsas) {
        if (!isa_available(isa)) continue;
        if (name == isa_name(isa)) return isa;
        names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
        best = isa;
    }
    if (!name.empty()) {
        throw std::runtime_error("MEGAMOE_ISA = \"" + name + "\": this machine and build have " +
                                 names + "; unset it for the fastest");
    }
    return best;
}

}  // namespace megamoe::cpu
