// Tile functions for any 64-bit machine.
#include "gemm_isa.hpp"
#include "gemm_math.hpp"
#include "gemm_vec4.hpp"
#include "gemm_vector_core.hpp"

namespace megamoe::cpu {

const TileFns& portable_tile_fns() {
    static constexpr TileFns fns = make_tile_fns<VectorCore<Vec4>>(Isa::kPortable);
    return fns;
}

}  // namespace megamoe::cpu
