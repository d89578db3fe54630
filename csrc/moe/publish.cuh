// Publish: one warp tells the world what the math warps of this CTA have finished, so that they
// never wait for their stores to land.
#pragma once

#include "moe/dispatch.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kRowsPerLane = ceil_div(kMaxBlockM, 32);

// Where this lane's rows of a Linear 2 task go: into the table for the math warps, and as the words
// that count a row's arrival.
MEGAMOE_DEVICE void find_targets(const MoEParams& p, SharedStorage& s, const Task& task,
                                 uint32_t* (&arrived)[kRowsPerLane]) {
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        const uint32_t row = ptx::lane() + i * 32;
        if (row >= task.num_rows) continue;
        const RowSource to = row_source(p, s, task.expert, task.first_row + row);
        s.row_target[row] = reinterpret_cast<uint64_t>(
            p.at(to.rank, Region::kCombine, uint64_t(to.slot) * p.shape.max_tokens + to.token));
        arrived[i] = p.ptr<uint32_t>(to.rank, Region::kTokenArrived, to.token);
    }
}

// The math warps' stores are ordered before these additions by the tile_written barrier and by the
// release. What lane 0 acquires with the last one is all lanes' (from_lane_0), so each may tell it
// to a peer: causality order is transitive over scopes.
MEGAMOE_DEVICE void announce(const MoEParams& p, const Task& task,
                             uint32_t* const (&arrived)[kRowsPerLane]) {
    if (task.kind == TileKind::kLinear1) {  // hand-offs 5 and 6
        if (ptx::lane() == 0) {
            ptx::add_release_gpu(p.word(Region::kL2Full, task.l2.slot), 1);
            ptx::add_release_gpu(p.word(Region::kL1Empty, task.l1.slot), 1);
        }
        return;
    }
    uint32_t last = 0;  // hand-offs 7 and 8
    if (ptx::lane() == 0)
        last = ptx::fetch_add_acq_rel_gpu(p.word(Region::kL2Empty, task.l2.slot), 1) + 1 ==
               task.l2.done_target;
    if (!ptx::from_lane_0(last)) return;
    ptx::fence_sys();
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerLane; ++i) {
        if (ptx::lane() + i * 32 < task.num_rows) ptx::add_relaxed_sys(arrived[i], 1);
    }
}

// The task's slot is given back only when the task has been announced, and each slot has a barrier
// of its own: a barrier that all tasks shared could complete twice before this warp, held up by a
// fence across NVLink, looked at it, and the parity would then read as not complete.
MEGAMOE_DEVICE void publish_tiles(const MoEParams& p, SharedStorage& s) {
    Cursor<kTaskSlots> slot;
    while (true) {
        while (!ptx::try_wait(s.task_full[slot.slot], slot.phase)) {
        }
        const Task& task = s.task[slot.slot];
        if (task.kind == TileKind::kDone) break;
        uint32_t* arrived[kRowsPerLane] = {};
        if (task.kind == TileKind::kLinear2) {
            find_targets(p, s, task, arrived);
            __syncwarp();
            if (ptx::lane() == 0) ptx::arrive(s.rows_ready);
        }
        // Comes for every task: the math warps finish what they have, stopped or not.
        while (!ptx::try_wait(s.tile_written[slot.slot], slot.phase)) {
        }
        const bool linear1 = task.kind == TileKind::kLinear1;
        const TraceKind kind = linear1 ? TraceKind::kPublish1 : TraceKind::kPublish2;
        if (ptx::lane() == 0) s.call.trace.begin(kind);
        if (!stopped(s.call)) announce(p, task, arrived);
        if (ptx::lane() == 0)
            s.call.trace.end(TraceRole::kPublish, kind, s.call.trace.block_of_task(slot.slot),
                             task.n, task.num_rows);
        __syncwarp();
        if (ptx::lane() == 0) ptx::arrive(s.task_empty[slot.slot]);
        slot.advance();
    }
}

}  // namespace megamoe::moe
