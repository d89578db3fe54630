// MoEShape: every number that layout, schedule and kernels derive from. Equal on all ranks.
#pragma once

#include "megamoe/config.hpp"

namespace megamoe {

// X(type-less field name): the order is the order of the struct and of native.MoEShape.
#define MEGAMOE_SHAPE_FIELDS(X)                                                               \
    X(num_ranks)   /* R */                                                                    \
    X(num_experts) /* E, routed, over all ranks */                                            \
    X(topk)        /* K */                                                                    \
    X(num_shared)  /* S, shared experts, replicated on every rank */                          \
    X(hidden)      /* H */                                                                    \
    X(inter)       /* I */                                                                    \
    X(is_fp8)      /* 1: e4m3 rows with FP32 scales per 128 columns; 0: BF16 rows */          \
    X(max_tokens)  /* T_max, tokens that one rank may bring */                                \
    X(block_m)     /* rows that a ring block has room for */                                  \
    X(tail_rows)   /* of them, rows taken only where that saves an expert a block */          \
    X(ring_l1)     /* B1, blocks of the ring of pulled tokens */                              \
    X(ring_l2)     /* B2, blocks of the ring of intermediates */                              \
    X(wave_blocks) /* blocks of one expert that share a pass over its weights */              \
    X(l2_lag)      /* blocks by which Linear 2 trails Linear 1 */                             \
    X(l2_tile_n)   /* output columns of a Linear 2 tile; a Linear 1 tile has 128 of I */      \
    X(num_units)   /* U: CTAs on a GPU, math workers on a CPU; they count and take tickets */ \
    X(num_pullers) /* dispatch warps on a GPU, dispatch threads on a CPU */

struct MoEShape {
#define X(name) uint32_t name;
    MEGAMOE_SHAPE_FIELDS(X)
#undef X

    // A GPU kernel is compiled for blocks with or without tails.
    MEGAMOE_HD constexpr uint32_t tail() const {
#ifdef MEGAMOE_TAIL_ROWS
        return MEGAMOE_TAIL_ROWS;
#else
        return tail_rows;
#endif
    }
    MEGAMOE_HD constexpr uint32_t local_experts() const { return num_experts / num_ranks; }
    // Routed experts of this rank, then the shared ones.
    MEGAMOE_HD constexpr uint32_t total_experts() const { return local_experts() + num_shared; }
    MEGAMOE_HD constexpr uint32_t num_slots() const { return topk + num_shared; }
    MEGAMOE_HD constexpr uint32_t l1_tiles() const { return inter / kGroup; }
    MEGAMOE_HD constexpr uint32_t l2_tiles() const { return ceil_div(hidden, l2_tile_n); }
    MEGAMOE_HD constexpr uint32_t x_row_bytes() const { return hidden * (is_fp8 ? 1 : 2); }
    MEGAMOE_HD constexpr uint32_t h_row_bytes() const { return inter * (is_fp8 ? 1 : 2); }
    MEGAMOE_HD constexpr uint32_t y_row_bytes() const { return hidden * 2; }
    MEGAMOE_HD constexpr uint32_t x_groups() const { return is_fp8 ? hidden / kGroup : 0; }
    MEGAMOE_HD constexpr uint32_t h_groups() const { return is_fp8 ? inter / kGroup : 0; }
    // Routes that one rank can send to one rank.
    MEGAMOE_HD constexpr uint64_t max_routes() const { return uint64_t(max_tokens) * topk; }
    // The smallest rings that the schedule can run with.
    MEGAMOE_HD constexpr bool rings_fit() const {
        const uint32_t smaller = ring_l1 < ring_l2 ? ring_l1 : ring_l2;
        return wave_blocks >= 1 && wave_blocks <= smaller;
    }
};

}  // namespace megamoe
