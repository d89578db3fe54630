// Tile functions for x86-64 with AVX2, FMA and F16C.
#include <immintrin.h>

#include "gemm_isa.hpp"
#include "gemm_math.hpp"
#include "gemm_tile.hpp"

namespace {

struct Vec8 {
    static constexpr int kW = 8;
    typedef float F __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef uint16_t U16 __attribute__((vector_size(16)));
    typedef uint8_t U8 __attribute__((vector_size(8)));

    static constexpr int kMaxRows = 8;
    static constexpr int vectors(int rows) {
        return rows == 1 ? 8 : rows <= 3 ? 4 : rows == 4 ? 2 : 1;
    }

    MM_INLINE static F splat(float value) { return (F)_mm256_set1_ps(value); }
    MM_INLINE static F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps(a, b, c); }
    MM_INLINE static F mul_add(F a, F b, F c) { return fma(a, b, c); }

    // [2 k pairs][8 columns][2 k] codes to 4 vectors of columns, times 2^-8. NaN codes excepted.
    // A code shifted to the sign and to bit 7 of a half is an FP16 number 2^-8 times too small;
    // VCVTPH2PS normalises its denormals without a penalty.
    MM_INLINE static void decode_fp8(const uint8_t* from, F (&out)[4]) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
        const __m256i even =
            _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 1), mask);
        const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(codes, 1), mask);
        out[0] = (F)_mm256_cvtph_ps(_mm256_castsi256_si128(even));
        out[1] = (F)_mm256_cvtph_ps(_mm256_castsi256_si128(odd));
        out[2] = (F)_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1));
        out[3] = (F)_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1));
    }
};

}  // namespace

namespace megamoe::cpu {

const TileFns& avx2_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<VectorCore<Vec8>>(Isa::kAvx2);
    return fns;
}

}  // namespace megamoe::cpu
