// Four lanes, for any 64-bit machine: SSE2 on x86-64, NEON on aarch64. Unnamed namespace, see
// gemm_math.hpp.
#pragma once

#include "gemm_math.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct Vec4 {
    static constexpr int kW = 4;
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef uint16_t U16 __attribute__((vector_size(8)));
    typedef uint8_t U8 __attribute__((vector_size(4)));

    // Rows of a micro kernel, and its columns in vectors: at most 12 sums in 16 registers.
    static constexpr int kMaxRows = 4;
    static constexpr int vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

    MM_INLINE static F splat(float value) { return F{value, value, value, value}; }

    MM_INLINE static F fma(F a, F b, F c) {
#if defined(__aarch64__)
        return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
        for (int i = 0; i < kW; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
        return c;
#endif
    }

    MM_INLINE static F mul_add(F a, F b, F c) {
#if defined(__aarch64__)
        return fma(a, b, c);
#else
        return a * b + c;
#endif
    }

    // [2 k pairs][4 columns][2 k] codes to 4 vectors of columns, times 2^-8. NaN codes excepted.
    MM_INLINE static void decode_fp8(const uint8_t* from, F (&out)[4]) {
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair) {
            const I codes = __builtin_convertvector(load<U16>(from + pair * 8), I);
            constexpr int32_t kMask = static_cast<int32_t>(0x87f00000);
            out[2 * pair] = (F)(codes << 24 >> 4 & kMask) * 0x1p112f;
            out[2 * pair + 1] = (F)(codes << 16 >> 4 & kMask) * 0x1p112f;
        }
    }
};

}  // namespace
