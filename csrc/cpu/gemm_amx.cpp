// Tile functions for x86-64 with AMX-BF16 and AVX-512 VBMI.
// GCC 12 warns of its own intrinsics' undefined vectors (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "cpu/gemm_amx_core.hpp"
#include "cpu/gemm_isa.hpp"
#include "cpu/gemm_math.hpp"
#include "cpu/gemm_tile.hpp"
#include "cpu/gemm_vec16.hpp"

namespace {

// The high and the low byte of the BF16 number of each non-negative e4m3 code.
struct alignas(64) Bf16Table {
    uint8_t high[128], low[128];
};

constexpr Bf16Table make_table() {
    Bf16Table table{};
    for (int code = 0; code < 128; ++code) {
        int exponent = code >> 3, mantissa = code & 7;
        int bits = 0;
        if (code == 0x7f) {
            bits = 0x7fc0;
        } else if (exponent > 0) {
            bits = (exponent + 120) << 7 | mantissa << 4;
        } else if (mantissa > 0) {  // m * 2^-9 = 1.f * 2^(e - 127)
            exponent = 127 - 6;
            while (mantissa < 8) {
                mantissa *= 2;
                --exponent;
            }
            bits = exponent << 7 | (mantissa & 7) << 4;
        }
        table.high[code] = static_cast<uint8_t>(bits >> 8);
        table.low[code] = static_cast<uint8_t>(bits & 0xff);
    }
    return table;
}

constexpr Bf16Table kTable = make_table();

struct ExpandVbmi {
    // VPERMI2B looks the lower 7 bits up in 128 bytes; the sign is bit 7 of the high byte.
    MM_INLINE static void fp8_to_bf16(const uint8_t* from, uint8_t* to) {
        const __m512i codes = _mm512_loadu_si512(from);
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.low), codes,
                                                     _mm512_load_si512(kTable.low + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kTable.high), codes,
                                                _mm512_load_si512(kTable.high + 64));
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)),
                                         0xf8);  // high | (codes & 0x80)
        _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(to + 64, _mm512_unpackhi_epi8(low, high));
    }
};

}  // namespace

namespace megamoe::cpu {

const TileFns& amx_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<AmxCore<Vec16, ExpandVbmi>>(Isa::kAmx);
    return fns;
}

}  // namespace megamoe::cpu
