// Choice of the tile functions, and what does not depend on the instruction set.
#include "cpu/gemm.hpp"

#include <stdexcept>
#include <string>

#include "cpu/gemm_isa.hpp"

namespace megamoe::cpu {

const TileFns& tile_fns(Isa isa) {
    if (!isa_available(isa)) {
        throw std::runtime_error(std::string("instruction set ") + isa_name(isa) +
                                 " is not available in this build or on this machine");
    }
    switch (isa) {
#ifdef MEGAMOE_HAVE_AVX2
        case Isa::kAvx2:
            return avx2_tile_fns();
#endif
#ifdef MEGAMOE_HAVE_AVX512
        case Isa::kAvx512:
            return avx512_tile_fns();
#endif
#ifdef MEGAMOE_HAVE_AMX
        case Isa::kAmx:
            return amx_tile_fns();
#endif
        default:
            return portable_tile_fns();
    }
}

size_t scratch_bytes(const GemmShape&, int max_rows) {
    // The regions of struct Scratch in gemm_tile.hpp; 16 rows are an AMX tile.
    const size_t rows = (static_cast<size_t>(max_rows) + 15) / 16 * 16;
    return rows * (3 * kGroup + 1) * sizeof(float) + kScratchBlocks;
}

}  // namespace megamoe::cpu
