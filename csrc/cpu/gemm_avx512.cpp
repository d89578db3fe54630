// Tile functions for x86-64 with AVX-512 F, BW, DQ and VL.
// GCC 12 warns of its own intrinsics' undefined vectors (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "cpu/gemm_isa.hpp"
#include "cpu/gemm_math.hpp"
#include "cpu/gemm_vec16.hpp"
#include "cpu/gemm_vector_core.hpp"

namespace megamoe::cpu {

const TileFns& avx512_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<VectorCore<Vec16>>(Isa::kAvx512);
    return fns;
}

}  // namespace megamoe::cpu
