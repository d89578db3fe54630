// Publish: one warp tells the world what the math warps of this CTA have finished, so that they
// never wait for their stores to land.
#pragma once

#include "moe/dispatch.cuh"

namespace megamoe::moe {

MEGAMOE_DEVICE void publish_tiles(const MoEParams& p, SharedStorage& s) {
    constexpr uint32_t kRowsPerLane = kMaxBlockM / 32;
    const uint32_t lane = ptx::lane();
    Cursor<kTaskSlots> slot;
    uint32_t tile_phase = 0;
    while (true) {
        while (!ptx::try_wait(s.task_full[slot.slot], slot.phase)) {
        }
        const Task task = s.task[slot.slot];
        __syncwarp();
        if (lane == 0) ptx::arrive(s.task_empty[slot.slot]);
        slot.advance();
        if (task.kind == TileKind::kDone) break;

        uint32_t* arrived[kRowsPerLane] = {};
        if (task.kind == TileKind::kLinear2) {
#pragma unroll
            for (uint32_t i = 0; i < kRowsPerLane; ++i) {
                const uint32_t row = lane + i * 32;
                if (row >= task.num_rows) continue;
                const RowSource to = row_source(p, s, task.expert, task.first_row + row);
                s.row_target[row] = reinterpret_cast<uint64_t>(p.at(
                    to.rank, Region::kCombine, uint64_t(to.slot) * p.shape.max_tokens + to.token));
                arrived[i] = p.ptr<uint32_t>(to.rank, Region::kTokenArrived, to.token);
            }
            __syncwarp();
            if (lane == 0) ptx::arrive(s.rows_ready);
        }
        // Comes for every task: the math warps finish what they have, stopped or not.
        while (!ptx::try_wait(s.tile_written, tile_phase)) {
        }
        tile_phase ^= 1;
        if (stopped(s.call)) continue;
        // The math warps' stores are ordered before the additions below by the barrier and by the
        // release: causality order is transitive over scopes.
        if (task.kind == TileKind::kLinear1) {  // hand-offs 5 and 6
            if (lane == 0) {
                ptx::add_release_gpu(p.word(Region::kL2Full, task.l2.slot), 1);
                ptx::add_release_gpu(p.word(Region::kL1Empty, task.l1.slot), 1);
            }
            continue;
        }
        uint32_t last = 0;  // hand-offs 7 and 8
        if (lane == 0) {
            ptx::fence_sys();
            last = ptx::fetch_add_acq_rel_gpu(p.word(Region::kL2Empty, task.l2.slot), 1) + 1 ==
                   task.l2.done_target;
        }
        if (!__shfl_sync(~0u, last, 0)) continue;
        ptx::fence_sys();
#pragma unroll
        for (uint32_t i = 0; i < kRowsPerLane; ++i) {
            if (lane + i * 32 < task.num_rows) ptx::add_relaxed_sys(arrived[i], 1);
        }
    }
}

}  // namespace megamoe::moe
