// Feed: the two roles that fill stages. One takes tickets, posts tasks and loads weights, which
// wait for nothing; the other loads activations once the rings have them. So weights are on their
// way before any wait.
#pragma once

#include "moe/phased.cuh"
#include "moe/tickets.cuh"
#include "moe/weights.cuh"

namespace megamoe::moe {

// Stages before a task's last one at which the next ticket is asked for: 2 to 3 us.
inline constexpr uint32_t kTicketAhead = 3;

MEGAMOE_DEVICE uint32_t box_for(uint32_t rows) {
    // Above kFewRows the many-row path takes over, with a box of 128, and above those one with a
    // tail.
    return rows <= 8 ? 0 : rows <= kFewRows ? ceil_div(rows, 16) : rows <= kManyRows ? 7 : 8;
}

MEGAMOE_DEVICE bool wait_stage(SharedStorage& s, const Cursor<kStages>& at, TraceSlot slot) {
    TraceSpan span(s.call.trace, slot);
    return wait(s.stage_empty[at.slot], at.phase, s.call) && !stopped(s.call);
}

// Makes a tile the next task; false if the stream of tasks ends instead: there is none, or the call
// has been given up. One thread.
MEGAMOE_DEVICE bool post(const MoEParams& p, SharedStorage& s, const Tile& tile,
                         const Cursor<kTaskSlots>& slot) {
    // Always comes: whatever happens, the roles finish the tasks they have.
    while (!ptx::try_wait(s.task_empty[slot.slot], slot.phase)) {
    }
    Task& task = s.task[slot.slot];
    uint64_t& full = s.task_full[slot.slot];
    if (tile.kind == TileKind::kDone || stopped(s.call)) {
        task.kind = TileKind::kDone;
        ptx::arrive(full);
        return false;
    }
    task.kind = tile.kind;
    task.expert = tile.expert;
    task.first_row = tile.first_row;
    task.num_rows = tile.num_rows;
    task.n = tile.n;
    task.box = box_for(tile.num_rows);
    task.l1 = l1_slot_of(p, s.call, tile.block);
    task.l2 = l2_slot_of(p, s.call, tile.block);
    task.l2_is_free = tile.block < p.shape.ring_l2;
    s.call.trace.note_task(slot.slot, tile.block);
    ptx::arrive(full);
    return true;
}

// One thread.
MEGAMOE_DEVICE void feed_weights(const MoEParams& p, SharedStorage& s) {
    prefetch_weight_maps(p);
    Tickets tickets(p, s);
    Cursor<kStages> at;
    Cursor<kTaskSlots> slot;
    at.phase = slot.phase = 1;  // free at first
    uint32_t fills = 0;
    while (true) {
        const Tile tile = tickets.next();
        if (!post(p, s, tile, slot)) break;
        const bool linear1 = tile.kind == TileKind::kLinear1;
        const uint64_t index = uint64_t(tile.expert) * (linear1 ? kL1Tiles : kL2Tiles) + tile.n;
        const uint32_t num_blocks = k_blocks(tile.kind);
        WeightTile weights(p, tile.kind, index);
        // The next ticket is taken late, just early enough for it to arrive: neighbouring tickets
        // then start together wherever they are taken, and tiles that share weights find them in
        // L2. To make a task of it earlier, too, would hold up this one's last stages.
        const uint32_t take_at = num_blocks > kTicketAhead ? num_blocks - kTicketAhead : 0;
#pragma unroll 1
        for (uint32_t kb = 0; kb < num_blocks; ++kb) {
            if (!wait_stage(s, at, kTraceStageW)) break;
            if (kb == take_at) tickets.draw();
            // The scales of the whole tile come with its first stage: a task that brought them
            // would keep activations waiting.
            uint64_t& full = s.stage_full[at.slot];
            const uint32_t floats = linear1 ? scale_floats(kHidden) : scale_floats(kInter);
            const uint32_t scale_bytes = kFp8 && kb == 0 ? floats * 4 : 0;
            ptx::arrive_expect(full, kTileN * kBlockBytes + scale_bytes);
            weights.load(kb, s.w[at.slot], full);
            if (scale_bytes)
                ptx::bulk_load(s.w_scale[slot.slot],
                               (linear1 ? p.w1_scale : p.w2_scale) + index * floats, scale_bytes,
                               full);
            ++fills;
            at.advance();
        }
        slot.advance();
    }
    s.fills[0] = fills;
}

// One thread.
MEGAMOE_DEVICE void feed_activations(const MoEParams& p, SharedStorage& s) {
    Cursor<kStages> at;
    Cursor<kTaskSlots> slot;
    at.phase = 1;
    uint32_t fills = 0;
    bool ok = true;
    Phase begun = Phase::kExchange;
    while (true) {
        while (!ptx::try_wait(s.task_full[slot.slot], slot.phase)) {
        }
        const Task task = s.task[slot.slot];
        ptx::arrive(s.task_empty[slot.slot]);
        slot.advance();
        if (task.kind == TileKind::kDone) break;
        const bool linear1 = task.kind == TileKind::kLinear1;
        const Phase phase = linear1 ? Phase::kLinear1 : Phase::kLinear2;
        if (kPhased && phase != begun) {
            begun = phase;
            ok = ok && wait_all_blocks(p, s, linear1 ? Phase::kPull : Phase::kLinear1);
        }
        if (linear1) {  // hand-offs 4 and 7
            ok = ok && wait_word<Compare::kReached, Scope::kGpu>(
                           p, s.call, p.word(Region::kL1Full, task.l1.slot), task.l1.ready_target,
                           {Role::kMath, phase, Tag::kL1Full, blockIdx.x, p.rank, task.l1.slot});
            if (!task.l2_is_free)
                ok = ok &&
                     wait_word<Compare::kReached, Scope::kGpu>(
                         p, s.call, p.word(Region::kL2Empty, task.l2.slot), task.l2.free_target,
                         {Role::kMath, phase, Tag::kL2Empty, blockIdx.x, p.rank, task.l2.slot});
        } else {  // hand-off 6
            ok = ok && wait_word<Compare::kReached, Scope::kGpu>(
                           p, s.call, p.word(Region::kL2Full, task.l2.slot), task.l2.ready_target,
                           {Role::kMath, phase, Tag::kL2Full, blockIdx.x, p.rank, task.l2.slot});
        }
        if (!ok) continue;  // keep consuming tasks: their stream must end for every role
        if (fills == 0) s.call.trace.stamp(kTraceFirstStage);
        ptx::fence_proxy_async();
        const uint32_t rows = box_rows(task.box), block_m = p.shape.block_m;
        const uint32_t ring_slot = linear1 ? task.l1.slot : task.l2.slot;
        const TensorMap& map = linear1 ? p.x[task.box] : p.h[task.box];
        const uint32_t num_blocks = k_blocks(task.kind), groups = num_blocks / (kFp8 ? 1 : 2);
        const float* scale = p.ptr<float>(p.rank, linear1 ? Region::kL1Scale : Region::kL2Scale) +
                             uint64_t(ring_slot) * groups * block_m;
#pragma unroll 1
        for (uint32_t kb = 0; kb < num_blocks; ++kb) {
            if (!wait_stage(s, at, kTraceStageX)) {
                ok = false;
                break;
            }
            ptx::arrive_expect(s.stage_full[at.slot], rows * (kBlockBytes + (kFp8 ? 4 : 0)));
            ptx::tma_load(s.x[at.slot], map, int32_t(kb * kBlockK), int32_t(ring_slot * block_m),
                          s.stage_full[at.slot], ptx::kEvictLast);
            if constexpr (kFp8)
                ptx::bulk_load(s.x_scale[at.slot], scale + kb * block_m, rows * 4,
                               s.stage_full[at.slot]);
            ++fills;
            at.advance();
        }
    }
    s.fills[1] = fills;
}

// After a give-up, when all roles have left: waits for copies that are still on their way into this
// CTA's shared memory. The role that filled fewer stages makes up for its missing arrivals.
MEGAMOE_DEVICE void drain_stages(SharedStorage& s) {
    const uint32_t few = min(s.fills[0], s.fills[1]), many = max(s.fills[0], s.fills[1]);
    for (uint32_t i = few; i < many; ++i) ptx::arrive(s.stage_full[i % kStages]);
    for (uint32_t i = many > kStages ? many - kStages : 0; i < many; ++i) {
        while (!ptx::try_wait(s.stage_full[i % kStages], i / kStages & 1)) {
        }
    }
}

}  // namespace megamoe::moe
