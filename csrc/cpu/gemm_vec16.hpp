// AVX-512 vectors for gemm_math.hpp and gemm_tile.hpp; unnamed namespace, see there.
#pragma once

#include <immintrin.h>

#include "cpu/gemm_math.hpp"

namespace {

struct Vec16 {
    static constexpr int kW = 16;
    typedef float F __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef int16_t I16 __attribute__((vector_size(64)));

    // 32 registers: 24 sums and their operands.
    static constexpr int kMaxRows = 12, kVectors = 2;
    static constexpr int kFewRows = 6, kFewVectors = 4;
    static constexpr int kSums = 8;

    MM_INLINE static F splat(float value) { return (F)_mm512_set1_ps(value); }
    MM_INLINE static F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps(a, b, c); }
    MM_INLINE static F mul_add(F a, F b, F c) { return fma(a, b, c); }

    MM_INLINE static I load_u8(const uint8_t* from) {
        return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    MM_INLINE static I load_u16(const uint16_t* from) {
        return (I)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    MM_INLINE static void store_u8(uint8_t* to, I value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)value));
    }
    MM_INLINE static void store_u16(uint16_t* to, I value) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)value));
    }
};

}  // namespace
