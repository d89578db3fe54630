// wgmma whose A operand lies with its 64 rows contiguous: BF16, A[16 of K][64] and B[N, 16 of K].
//
// In shared memory A is groups of 8 rows of K, each row 64 elements (128 bytes, swizzled), as a TMA
// box of 64 columns leaves it; `kStrideA` is from one group of 8 to the next.
#pragma once

#include "device/wgmma.cuh"

namespace megamoe::wgmma {

// One step of 16 of K is two groups: 2048 bytes, in descriptor units.
inline constexpr uint32_t kStepKTransposed = 128;

template <int N>
struct MmaTransposed;

#define MEGAMOE_MMA_TRANSPOSED(N, A, B, HA, HB, P)                                              \
    template <>                                                                                 \
    struct MmaTransposed<N> {                                                                   \
        template <uint32_t kStrideA, uint32_t kStrideB>                                         \
        MEGAMOE_DEVICE static void run(float (&d)[N / 2], uint32_t a, uint32_t b,               \
                                       int accumulate) {                                        \
            asm volatile("{ .reg .pred p; .reg .b64 da, db; setp.ne.b32 p, %" #P                \
                         ", 0;\n"                                                               \
                         "mov.b64 da, {%" #A ", %" #HA "}; mov.b64 db, {%" #B ", %" #HB         \
                         "};\n"                                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                 \
                         "k16.f32.bf16.bf16 {" MEGAMOE_TEXT_##N "}, da, db, p, 1, 1, 1, 0; }\n" \
                         : MEGAMOE_REGS_##N                                                     \
                         : "r"(a), "r"(b), "n"(descriptor_high(kStrideA)),                      \
                           "n"(descriptor_high(kStrideB)), "r"(accumulate));                    \
        }                                                                                       \
    };
MEGAMOE_MMA_TRANSPOSED(8, 4, 5, 6, 7, 8)
MEGAMOE_MMA_TRANSPOSED(16, 8, 9, 10, 11, 12)
MEGAMOE_MMA_TRANSPOSED(32, 16, 17, 18, 19, 20)
MEGAMOE_MMA_TRANSPOSED(64, 32, 33, 34, 35, 36)
MEGAMOE_MMA_TRANSPOSED(128, 64, 65, 66, 67, 68)
#undef MEGAMOE_MMA_TRANSPOSED

}  // namespace megamoe::wgmma
