// Entry points of the per-instruction-set files; those of an absent file are never called.
#pragma once

#include "cpu/gemm.hpp"

namespace megamoe::cpu {

const TileFns& portable_tile_fns();
const TileFns& avx2_tile_fns();
const TileFns& avx512_tile_fns();
const TileFns& amx_tile_fns();

}  // namespace megamoe::cpu
