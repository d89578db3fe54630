// Dispatch: count routes, tell each owner what it will get, and pull rows into the L1 ring.
#pragma once

#include "cpu/context.hpp"

namespace megamoe::cpu {

// All units of the rank meet. `index` is 0 or 1 in a call.
template <class C>
bool grid_barrier(C& ctx, uint32_t unit, uint32_t index) {
    uint32_t* barrier = &ctx.control().barrier.value;
    const uint32_t target = barrier_target(ctx.epoch, index, ctx.shape.num_units);
    ctx.sync.add(barrier, 1);
    return ctx.sync.wait_reached(
        barrier, target, {Role::kMath, Phase::kCount, Tag::kGridBarrier, unit, ctx.rank(), index});
}

struct TokenRange {
    uint32_t first, last;
};
inline TokenRange unit_tokens(uint32_t num_tokens, uint32_t num_units, uint32_t unit) {
    const uint64_t n = num_tokens;
    return {uint32_t(n * unit / num_units), uint32_t(n * (unit + 1) / num_units)};
}

// Each unit counts the routes of its slice of tokens. After the barrier every unit knows where its
// routes go in the owners' lists: behind those of earlier units, so lists are in (token, slot)
// order whatever the order of arrival. Hand-offs 1 and 2 of protocol.hpp.
template <class C>
bool count_routes(C& ctx, uint32_t unit) {
    const MoEShape& s = ctx.shape;
    const uint32_t per_rank = s.local_experts();
    const TokenRange mine = unit_tokens(ctx.call.num_tokens, s.num_units, unit);
    uint32_t* unit_count = ctx.word(Region::kUnitCount, 0);
    uint32_t* own = unit_count + uint64_t(unit) * s.num_experts;

    for (uint32_t e = 0; e < s.num_experts; ++e) own[e] = 0;
    for (uint32_t i = mine.first * s.topk; i < mine.last * s.topk; ++i) {
        if (ctx.call.topk_idx[i] >= 0) ++own[ctx.call.topk_idx[i]];
    }
    if (!grid_barrier(ctx, unit, 0)) return false;

    // next[e]: where this unit's next route to expert e goes. It reuses the owner's begin array.
    uint32_t* next = ctx.math.expert_scratch(unit);
    for (uint32_t owner = 0; owner < s.num_ranks; ++owner) {
        uint32_t begin = 0;
        for (uint32_t e = owner * per_rank; e < (owner + 1) * per_rank; ++e) {
            next[e] = begin;
            for (uint32_t u = 0; u < s.num_units; ++u) {
                const uint32_t n = unit_count[uint64_t(u) * s.num_experts + e];
                if (u < unit) next[e] += n;
                begin += n;
            }
        }
    }
    for (uint32_t i = mine.first * s.topk; i < mine.last * s.topk; ++i) {
        const int32_t expert = ctx.call.topk_idx[i];
        if (expert < 0) continue;
        uint32_t* list = ctx.windows.route(s, expert / per_rank, ctx.parity, ctx.rank());
        list[next[expert]++] = i;
    }
    return grid_barrier(ctx, unit, 1);
}

// Units share the peers: counts first, then the flag that says counts, routes and x are there.
template <class C>
void publish_counts(C& ctx, uint32_t unit) {
    const MoEShape& s = ctx.shape;
    const uint32_t per_rank = s.local_experts();
    const uint32_t* unit_count = ctx.word(Region::kUnitCount, 0);
    for (uint32_t i = unit; i < s.num_ranks; i += s.num_units) {
        const uint32_t peer = (ctx.rank() + i) % s.num_ranks;
        uint32_t* counts = ctx.windows.recv_count(s, peer, ctx.parity, ctx.rank());
        for (uint32_t e = 0; e < per_rank; ++e) {
            uint32_t sum = 0;
            for (uint32_t u = 0; u < s.num_units; ++u)
                sum += unit_count[uint64_t(u) * s.num_experts + peer * per_rank + e];
            counts[e] = sum;
        }
        ctx.sync.store(ctx.windows.template ptr<uint32_t>(peer, Region::kCountsFlag, ctx.rank()),
                       ctx.epoch);
    }
}

// Every role of the rank waits for every peer's counts of this call. A late role may find a flag
// that is one call ahead: a peer finishes when it has what it needs, whatever this role does.
template <class C>
bool wait_counts(C& ctx, Role role, uint32_t unit) {
    for (uint32_t peer = 0; peer < ctx.shape.num_ranks; ++peer) {
        if (!ctx.sync.wait_reached(ctx.word(Region::kCountsFlag, peer), ctx.epoch,
                                   {role, Phase::kExchange, Tag::kCountsFlag, unit, peer, peer}))
            return false;
    }
    return true;
}

// Pulls the blocks first, first + num_pullers, … in ticket order. Hand-offs 3, 4, 5.
template <class C>
bool pull_rows(C& ctx, const RouteTable& table, uint32_t puller) {
    const MoEShape& s = ctx.shape;
    WaveWalk walk(s, TableRows{&table});
    Wave wave;
    while (walk.next(wave)) {
        const ExpertBlocks blocks(s, table.rows(wave.expert));
        for (uint32_t m = 0; m < wave.num_blocks; ++m) {
            const uint32_t block = wave.first_block + m;
            if (block % s.num_pullers != puller) continue;
            const L1Slot slot = l1_slot(s, ctx.block_base + block);
            const uint32_t first = blocks.begin(wave.first_of_expert + m);
            const uint32_t end = first + blocks.size(wave.first_of_expert + m);
            const auto traced =
                ctx.sync.stretch(puller, TraceRole::kPull, TraceKind::kPull, block, end - first);
            if (!ctx.sync.wait_reached(
                    ctx.word(Region::kL1Empty, slot.slot), slot.free_target,
                    {Role::kDispatch, Phase::kPull, Tag::kL1Empty, puller, ctx.rank(), slot.slot}))
                return false;
            ctx.sync.observe_pulled();
            const uint64_t ring_row = uint64_t(slot.slot) * s.block_m;
            for (uint32_t row = first; row < end; ++row) {
                const RowSource from = ctx.source(table, wave.expert, row);
                const uint64_t to = ring_row + row - first;
                ctx.math.pull(ctx.windows.at(from.rank, Region::kInput, from.token),
                              ctx.windows.at(from.rank, Region::kInputScale, from.token),
                              ctx.windows.at(ctx.rank(), Region::kL1Ring, to),
                              ctx.windows.at(ctx.rank(), Region::kL1Scale, to));
                // The last row brings the block's padding.
                const uint32_t rows = row + 1 < end ? 1 : s.block_m - (row - first);
                ctx.sync.stretch(puller, TraceRole::kPull, TraceKind::kRows, block, rows,
                                 from.rank);
            }
            ctx.sync.add(ctx.word(Region::kL1Full, slot.slot), s.block_m);
        }
    }
    return true;
}

}  // namespace megamoe::cpu
