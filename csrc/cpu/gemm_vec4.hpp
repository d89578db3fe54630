// Four lanes, for any 64-bit machine: SSE2 on x86-64, NEON on aarch64. Unnamed namespace, see
// gemm_math.hpp.
#pragma once

#include "cpu/gemm_math.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct Vec4 {
    static constexpr int kW = 4;
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    typedef int16_t I16 __attribute__((vector_size(16)));

    // 16 registers on x86-64: 12 sums, 2 to 4 operands.
    static constexpr int kMaxRows = 6, kVectors = 2;
    static constexpr int kFewRows = 3, kFewVectors = 4;
    static constexpr int kSums = 8;

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

    template <class T>
    MM_INLINE static I widen(const T* from) {
        return I{from[0], from[1], from[2], from[3]};
    }
    MM_INLINE static I load_u8(const uint8_t* from) { return widen(from); }
    MM_INLINE static I load_u16(const uint16_t* from) { return widen(from); }
    MM_INLINE static void store_u8(uint8_t* to, I value) {
        for (int i = 0; i < kW; ++i) to[i] = static_cast<uint8_t>(value[i]);
    }
    MM_INLINE static void store_u16(uint16_t* to, I value) {
        for (int i = 0; i < kW; ++i) to[i] = static_cast<uint16_t>(value[i]);
    }
};

}  // namespace
