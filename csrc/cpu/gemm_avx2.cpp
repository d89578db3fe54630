// Tile functions for x86-64 with AVX2, FMA and F16C.
#include <immintrin.h>

#include "cpu/gemm_isa.hpp"
#include "cpu/gemm_math.hpp"
#include "cpu/gemm_vector_core.hpp"

namespace {

struct Vec8 {
    static constexpr int kW = 8;
    typedef float F __attribute__((vector_size(32)));
    typedef int32_t I __attribute__((vector_size(32)));
    typedef int16_t I16 __attribute__((vector_size(32)));

    // 16 registers: 12 sums, 2 to 4 operands.
    static constexpr int kMaxRows = 6, kVectors = 2;
    static constexpr int kFewRows = 3, kFewVectors = 4;
    static constexpr int kSums = 8;

    MM_INLINE static F splat(float value) { return (F)_mm256_set1_ps(value); }
    MM_INLINE static F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps(a, b, c); }
    MM_INLINE static F mul_add(F a, F b, F c) { return fma(a, b, c); }

    MM_INLINE static I load_u8(const uint8_t* from) {
        return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    MM_INLINE static I load_u16(const uint16_t* from) {
        return (I)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    MM_INLINE static __m128i pack_u16(I value) {
        return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)value),
                                _mm256_extracti128_si256((__m256i)value, 1));
    }
    MM_INLINE static void store_u8(uint8_t* to, I value) {
        const __m128i words = pack_u16(value);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
    }
    MM_INLINE static void store_u16(uint16_t* to, I value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), pack_u16(value));
    }
};

}  // namespace

namespace megamoe::cpu {

const TileFns& avx2_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<VectorCore<Vec8>>(Isa::kAvx2);
    return fns;
}

}  // namespace megamoe::cpu
