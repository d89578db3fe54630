// AVX-512 vectors for gemm_math.hpp and gemm_tile.hpp; unnamed namespace, see there.
#pragma once

#include <immintrin.h>

#include "gemm_math.hpp"

namespace {

struct Vec16 {
    static constexpr int kW = 16;
    typedef float F __attribute__((vector_size(64)));
    typedef int32_t I __attribute__((vector_size(64)));
    typedef uint16_t U16 __attribute__((vector_size(32)));
    typedef uint8_t U8 __attribute__((vector_size(16)));

    // 32 registers: up to 16 sums, four decoded vectors and their temporaries.
    static constexpr int kMaxRows = 8;
    static constexpr int vectors(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }

    MM_INLINE static F splat(float value) { return (F)_mm512_set1_ps(value); }
    MM_INLINE static F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps(a, b, c); }
    MM_INLINE static F mul_add(F a, F b, F c) { return fma(a, b, c); }

    // [2 k pairs][16 columns][2 k] codes to 4 vectors of columns, times 2^-8. NaN codes excepted.
    // As in gemm_avx2.cpp: a code shifted into place is an FP16 number 2^-8 times too small.
    MM_INLINE static void decode_fp8(const uint8_t* from, F (&out)[4]) {
        const __m512i codes = _mm512_loadu_si512(from);
        const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
        const __m512i even =
            _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 1), mask);
        const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(codes, 1), mask);
        out[0] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(even));
        out[1] = (F)_mm512_cvtph_ps(_mm512_castsi512_si256(odd));
        out[2] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
        out[3] = (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    }
};

}  // namespace
