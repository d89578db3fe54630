// One call on one rank: the roles, each run by a thread of its own.
//
//   role       threads       does
//   math       num_units     count, publish, then tiles by ticket: Linear 1 and Linear 2
//   dispatch   num_pullers   pulls rows into the L1 ring, in ticket order
//   combine    1             sums slots of this rank's tokens
//
// A role that returns false met an expired wait, here or on a peer. It leaves without a trace: the
// session then refuses calls until reset().
#pragma once

#include "cpu/combine.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/linear1.hpp"
#include "cpu/linear2.hpp"

namespace megamoe::cpu {

// The last role out closes the call: everybody has read epoch, block_base and ticket.
template <class C>
void leave(C& ctx, const RouteTable& table) {
    const uint32_t roles = ctx.shape.num_units + ctx.shape.num_pullers + 1;
    Control& control = ctx.control();
    if (ctx.sync.add(&control.exits.value, 1) + 1 != roles) return;
    control.block_base.value = ctx.block_base + count_blocks(ctx.shape, TableRows{&table});
    ctx.sync.store(&control.ticket[0].value, 0);
    ctx.sync.store(&control.exits.value, 0);
    ctx.sync.store(&control.epoch.value, ctx.epoch);
}

// `begin` is scratch of [R * E_l] words, one per thread, in all three roles.
template <class C>
bool run_math(C ctx, uint32_t unit, uint32_t* begin) {
    ctx.begin();
    {
        const auto traced = ctx.sync.stretch(unit, TraceRole::kDispatch, TraceKind::kList);
        if (!count_routes(ctx, unit)) return false;
        publish_counts(ctx, unit);
    }
    {
        const auto traced = ctx.sync.stretch(unit, TraceRole::kDispatch, TraceKind::kExchange);
        if (!wait_counts(ctx, Role::kMath, unit)) return false;
    }
    const RouteTable table = ctx.route_table(begin);
    auto walk = ctx.tile_walk(table);
    while (true) {
        const Tile tile = walk.seek(ctx.sync.add(&ctx.control().ticket[0].value, 1));
        if (tile.kind == TileKind::kDone) break;
        const bool ok = tile.kind == TileKind::kLinear1 ? linear1(ctx, unit, tile)
                                                        : linear2(ctx, table, unit, tile);
        if (!ok) return false;
    }
    leave(ctx, table);
    return true;
}

template <class C>
bool run_dispatch(C ctx, uint32_t puller, uint32_t* begin) {
    ctx.begin();
    if (!wait_counts(ctx, Role::kDispatch, puller)) return false;
    const RouteTable table = ctx.route_table(begin);
    if (!pull_rows(ctx, table, puller)) return false;
    leave(ctx, table);
    return true;
}

template <class C>
bool run_combine(C ctx, uint32_t* begin) {
    ctx.begin();
    if (!wait_counts(ctx, Role::kCombine, 0)) return false;
    const RouteTable table = ctx.route_table(begin);
    if (!combine(ctx)) return false;
    leave(ctx, table);
    return true;
}

}  // namespace megamoe::cpu
