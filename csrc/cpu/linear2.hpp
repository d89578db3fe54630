// Linear 2: a tile of output columns over one L2 block, written to the source ranks' combine slots.
#pragma once

#include <cstring>

#include "cpu/context.hpp"

namespace megamoe::cpu {

// Hand-offs 6 to 8 of protocol.hpp.
template <class C>
bool linear2(C& ctx, const RouteTable& table, uint32_t unit, const Tile& tile) {
    const MoEShape& s = ctx.shape;
    const L2Slot from = l2_slot(s, ctx.block_base + tile.block);
    const Wait wait{Role::kMath, Phase::kLinear2, Tag::kL2Full, unit, ctx.rank(), from.slot};
    if (!ctx.sync.wait_reached(ctx.word(Region::kL2Full, from.slot), from.ready_target, wait))
        return false;

    {
        const auto whole = ctx.sync.stretch(unit, TraceRole::kMath, TraceKind::kLinear2, tile.block,
                                            tile.n, tile.num_rows);
        // [num_rows, l2_tile_n] BF16
        const uint8_t* out = ctx.math.linear2(unit, tile, ctx.ring_row(Region::kL2Ring, from.slot),
                                              ctx.ring_row(Region::kL2Scale, from.slot));
        const auto scatter = ctx.sync.stretch(unit, TraceRole::kMath, TraceKind::kScatter,
                                              tile.block, tile.n, tile.num_rows);
        const uint32_t segment = s.l2_tile_n * 2;
        for (uint32_t row = 0; row < tile.num_rows; ++row) {
            const RowSource to = ctx.source(table, tile.expert, tile.first_row + row);
            uint8_t* slot = ctx.windows.combine_row(s, to.rank, to.slot, to.token);
            std::memcpy(slot + uint64_t(tile.n) * segment, out + uint64_t(row) * segment, segment);
        }
    }

    const auto traced = ctx.sync.stretch(unit, TraceRole::kPublish, TraceKind::kPublish2,
                                         tile.block, tile.n, tile.num_rows);
    // The tile that completes the block has seen all of it written: it tells the tokens' owners.
    if (ctx.sync.add(ctx.word(Region::kL2Empty, from.slot), 1) + 1 != from.done_target) return true;
    ctx.sync.observe_retired();
    for (uint32_t row = 0; row < tile.num_rows; ++row) {
        const RowSource to = ctx.source(table, tile.expert, tile.first_row + row);
        ctx.sync.add(ctx.windows.template ptr<uint32_t>(to.rank, Region::kTokenArrived, to.token),
                     1);
    }
    return true;
}

}  // namespace megamoe::cpu
