// wgmma: D[64, N] (+)= A[64, 32 bytes of K] * B[N, 32 bytes of K]^T, both operands from shared
// memory.
#pragma once

#include "device/ptx.cuh"

namespace megamoe::wgmma {

MEGAMOE_DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MEGAMOE_DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
MEGAMOE_DEVICE void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses of an accumulator across this point.
template <int N>
MEGAMOE_DEVICE void pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A shared-memory operand: K-major rows of 128 bytes, 128-byte swizzle. This is the low word of its
// descriptor, with the address; the high word is a constant of `stride`, the bytes from one group
// of 8 rows to the next.
MEGAMOE_HD constexpr uint32_t operand(uint32_t shared_address) {
    return ((shared_address & 0x3FFFF) >> 4) | (1u << 16);
}
MEGAMOE_HD constexpr uint32_t descriptor_high(uint32_t stride) {
    return (stride >> 4) | (1u << 30);
}
// One step of 32 bytes of K, in descriptor units.
inline constexpr uint32_t kStepK = 2;

// Operands %0 … of 4 accumulators each, as text and as constraints.
#define MEGAMOE_T0 "%0, %1, %2, %3"
#define MEGAMOE_T1 ", %4, %5, %6, %7"
#define MEGAMOE_T2 ", %8, %9, %10, %11"
#define MEGAMOE_T3 ", %12, %13, %14, %15"
#define MEGAMOE_T4 ", %16, %17, %18, %19"
#define MEGAMOE_T5 ", %20, %21, %22, %23"
#define MEGAMOE_T6 ", %24, %25, %26, %27"
#define MEGAMOE_T7 ", %28, %29, %30, %31"
#define MEGAMOE_T8 ", %32, %33, %34, %35"
#define MEGAMOE_T9 ", %36, %37, %38, %39"
#define MEGAMOE_T10 ", %40, %41, %42, %43"
#define MEGAMOE_T11 ", %44, %45, %46, %47"
#define MEGAMOE_T12 ", %48, %49, %50, %51"
#define MEGAMOE_T13 ", %52, %53, %54, %55"
#define MEGAMOE_T14 ", %56, %57, %58, %59"
#define MEGAMOE_T15 ", %60, %61, %62, %63"
#define MEGAMOE_D(g) "+f"(d[4 * g]), "+f"(d[4 * g + 1]), "+f"(d[4 * g + 2]), "+f"(d[4 * g + 3])
#define MEGAMOE_TEXT_8 MEGAMOE_T0
#define MEGAMOE_REGS_8 MEGAMOE_D(0)
#define MEGAMOE_TEXT_16 MEGAMOE_TEXT_8 MEGAMOE_T1
#define MEGAMOE_REGS_16 MEGAMOE_REGS_8, MEGAMOE_D(1)
#define MEGAMOE_TEXT_32 MEGAMOE_TEXT_16 MEGAMOE_T2 MEGAMOE_T3
#define MEGAMOE_REGS_32 MEGAMOE_REGS_16, MEGAMOE_D(2), MEGAMOE_D(3)
#define MEGAMOE_TEXT_48 MEGAMOE_TEXT_32 MEGAMOE_T4 MEGAMOE_T5
#define MEGAMOE_REGS_48 MEGAMOE_REGS_32, MEGAMOE_D(4), MEGAMOE_D(5)
#define MEGAMOE_TEXT_64 MEGAMOE_TEXT_48 MEGAMOE_T6 MEGAMOE_T7
#define MEGAMOE_REGS_64 MEGAMOE_REGS_48, MEGAMOE_D(6), MEGAMOE_D(7)
#define MEGAMOE_TEXT_80 MEGAMOE_TEXT_64 MEGAMOE_T8 MEGAMOE_T9
#define MEGAMOE_REGS_80 MEGAMOE_REGS_64, MEGAMOE_D(8), MEGAMOE_D(9)
#define MEGAMOE_TEXT_96 MEGAMOE_TEXT_80 MEGAMOE_T10 MEGAMOE_T11
#define MEGAMOE_REGS_96 MEGAMOE_REGS_80, MEGAMOE_D(10), MEGAMOE_D(11)
#define MEGAMOE_TEXT_128 MEGAMOE_TEXT_96 MEGAMOE_T12 MEGAMOE_T13 MEGAMOE_T14 MEGAMOE_T15
#define MEGAMOE_REGS_128 MEGAMOE_REGS_96, MEGAMOE_D(12), MEGAMOE_D(13), MEGAMOE_D(14), MEGAMOE_D(15)

// accumulate 0 overwrites d. kFp8: e4m3 operands, else BF16 (16 elements of K a step). Descriptors
// are put together inside, so that the compiler keeps no register pairs for them.
template <int N, bool kFp8>
struct Mma;

#define MEGAMOE_MMA(N, FP8, TYPES, TAIL, A, B, HA, HB, P)                                   \
    template <>                                                                             \
    struct Mma<N, FP8> {                                                                    \
        template <uint32_t kStrideA, uint32_t kStrideB>                                     \
        MEGAMOE_DEVICE static void run(float (&d)[N / 2], uint32_t a, uint32_t b,           \
                                       int accumulate) {                                    \
            asm volatile("{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %" #P            \
                         ", 0;\n"                                                           \
                         "mov.b64 da, {%" #A ", %" #HA "}; mov.b64 db, {%" #B ", %" #HB     \
                         "};\n"                                                             \
                         "wgmma.mma_async.sync.aligned.m64n" #N TYPES " {" MEGAMOE_TEXT_##N \
                         "}, da, db, p, " TAIL "; }\n"                                      \
                         : MEGAMOE_REGS_##N                                                 \
                         : "r"(a), "r"(b), "n"(descriptor_high(kStrideA)),                  \
                           "n"(descriptor_high(kStrideB)), "r"(accumulate));                \
        }                                                                                   \
    };
#define MEGAMOE_MMA_BOTH(N, A, B, HA, HB, P)                           \
    MEGAMOE_MMA(N, true, "k32.f32.e4m3.e4m3", "1, 1", A, B, HA, HB, P) \
    MEGAMOE_MMA(N, false, "k16.f32.bf16.bf16", "1, 1, 0, 0", A, B, HA, HB, P)
MEGAMOE_MMA_BOTH(8, 4, 5, 6, 7, 8)
MEGAMOE_MMA_BOTH(16, 8, 9, 10, 11, 12)
MEGAMOE_MMA_BOTH(32, 16, 17, 18, 19, 20)
MEGAMOE_MMA_BOTH(48, 24, 25, 26, 27, 28)
MEGAMOE_MMA_BOTH(64, 32, 33, 34, 35, 36)
MEGAMOE_MMA_BOTH(80, 40, 41, 42, 43, 44)
MEGAMOE_MMA_BOTH(96, 48, 49, 50, 51, 52)
MEGAMOE_MMA_BOTH(128, 64, 65, 66, 67, 68)
#undef MEGAMOE_MMA_BOTH
#undef MEGAMOE_MMA

// FP8, 16 tokens, with A in registers: for a step of 32 bytes of K, rows lane / 4 and 8 more of the
// warp's 16, each with 4 bytes at lane % 4 * 4, then both at 16 more.
template <uint32_t kStrideB>
MEGAMOE_DEVICE void mma_from_registers(float (&d)[8], const uint32_t (&a)[4], uint32_t b,
                                       int accumulate) {
    asm volatile(
        "{ .reg .pred p; .reg .b64 db; setp.ne.b32 p, %14, 0;\n"
        "mov.b64 db, {%12, %13};\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" MEGAMOE_TEXT_16
        "}, {%8, %9, %10, %11}, db, p, 1, 1; }\n"
        : MEGAMOE_REGS_16
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(descriptor_high(kStrideB)),
          "r"(accumulate));
}

}  // namespace megamoe::wgmma
