// Tile functions for any 64-bit machine.
#include "cpu/gemm_isa.hpp"
#include "cpu/gemm_math.hpp"
#include "cpu/gemm_vec4.hpp"
#include "cpu/gemm_vector_core.hpp"

namespace megamoe::cpu {

const TileFns& portable_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<VectorCore<Vec4>>(Isa::kPortable);
    return fns;
}

}  // namespace megamoe::cpu
