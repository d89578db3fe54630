// Linear 1: a tile of gate and up columns over one L1 block, SwiGLU, requantised into the L2 ring.
#pragma once

#include "cpu/context.hpp"

namespace megamoe::cpu {

// Hand-offs 4 to 7 of protocol.hpp.
template <class C>
bool linear1(C& ctx, uint32_t unit, const Tile& tile) {
    const L1Slot from = l1_slot(ctx.shape, ctx.block_base + tile.block);
    const L2Slot to = l2_slot(ctx.shape, ctx.block_base + tile.block);
    const Wait wait{Role::kMath, Phase::kLinear1, Tag::kL1Full, unit, ctx.rank(), from.slot};
    if (!ctx.sync.wait_reached(ctx.word(Region::kL1Full, from.slot), from.ready_target, wait))
        return false;
    const Wait wait_free{Role::kMath, Phase::kLinear1, Tag::kL2Empty, unit, ctx.rank(), to.slot};
    if (!ctx.sync.wait_reached(ctx.word(Region::kL2Empty, to.slot), to.free_target, wait_free))
        return false;

    {
        const auto traced = ctx.sync.stretch(unit, TraceRole::kMath, TraceKind::kLinear1,
                                             tile.block, tile.n, tile.num_rows);
        ctx.math.linear1(unit, tile, ctx.ring_row(Region::kL1Ring, from.slot),
                         ctx.ring_row(Region::kL1Scale, from.slot),
                         ctx.ring_row(Region::kL2Ring, to.slot),
                         ctx.ring_row(Region::kL2Scale, to.slot));
    }

    const auto traced = ctx.sync.stretch(unit, TraceRole::kPublish, TraceKind::kPublish1,
                                         tile.block, tile.n, tile.num_rows);
    const uint32_t last = ctx.shape.l1_tiles() - 1;
    if (ctx.sync.add(ctx.word(Region::kL1Empty, from.slot), 1) == from.free_target + last)
        ctx.sync.observe_consumed();
    if (ctx.sync.add(ctx.word(Region::kL2Full, to.slot), 1) == to.ready_target - 1)
        ctx.sync.observe_produced();
    return true;
}

}  // namespace megamoe::cpu
