// The MoE kernel: one persistent launch per rank and call, one CTA per SM.
//
//   warps   role                                            file
//   all     list routes, publish and receive counts         dispatch.cuh
//   0-7     math: Linear 1, SwiGLU, Linear 2, combine       mainloop_*.cuh linear1.cuh linear2.cuh
//   combine.cuh 8       tickets, tasks, weights                         feed.cuh 9 activations
//   feed.cuh 10      announces finished tiles                        publish.cuh 11      pulls rows
//   from peers                           pull.cuh
//
// Roles walk one stream of tasks (shared.cuh) in step with stages of weights and activations.
#pragma once

#include "moe/combine.cuh"
#include "moe/feed.cuh"
#include "moe/linear1.cuh"
#include "moe/linear2.cuh"
#include "moe/publish.cuh"
#include "moe/pull.cuh"

namespace megamoe::moe {

MEGAMOE_DEVICE void init(const MoEParams& p, SharedStorage& s) {
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < kStages; ++i) {
            ptx::barrier_init(s.stage_full[i], 2);  // weights, activations
            ptx::barrier_init(s.stage_empty[i], kMathWarps);
        }
        for (uint32_t i = 0; i < kTaskSlots; ++i) {
            ptx::barrier_init(s.task_full[i], 1);
            ptx::barrier_init(s.task_empty[i], kMathWarps + 2);  // activations, publish
        }
        for (uint32_t i = 0; i < kPullBuffers; ++i) ptx::barrier_init(s.pull_full[i], 1);
        ptx::barrier_init(s.rows_ready, 1);
        ptx::barrier_init(s.tile_written, kMathWarps);
        ptx::barrier_init_fence();
        const Control& control = p.control(p.rank);
        s.call.stop = ptx::load_relaxed_sys(&control.abort.value) != 0 ? kStopPeer : 0;
        s.call.epoch = control.epoch.value + 1;
        s.call.block_base = control.block_base.value;
        s.fills[0] = s.fills[1] = 0;
    }
    for (uint32_t i = threadIdx.x; i < 3 * kMaxBlockM; i += kThreads) (&s.amax[0][0])[i] = 0;
    if (threadIdx.x < kMathWarps) s.math[threadIdx.x] = MathState{};
    __syncthreads();
}

// The same for all lanes, and known to be.
MEGAMOE_DEVICE uint32_t warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
MEGAMOE_DEVICE MathState& math_state(SharedStorage& s) {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));  // anew each time, not kept
    return s.math[thread / 32];
}
MEGAMOE_DEVICE uint32_t task_slot(SharedStorage& s) {
    return __shfl_sync(~0u, math_state(s).task.slot, 0);
}
MEGAMOE_DEVICE bool is_linear1(SharedStorage& s) {
    return __shfl_sync(~0u, uint32_t(s.task[task_slot(s)].kind), 0) == uint32_t(TileKind::kLinear1);
}

// False if the rows' targets never come: the CTA gives up.
MEGAMOE_DEVICE bool wait_targets(SharedStorage& s) {
    const uint32_t phase = math_state(s).rows_phase;
    __syncwarp();
    math_state(s).rows_phase = phase ^ 1;
    return wait(s.rows_ready, phase, s.call);
}

template <int N>
MEGAMOE_DEVICE void few_rows(const MoEParams& p, SharedStorage& s) {
    float acc[2][N / 2];
    mainloop_few<N>(acc, s, math_state(s).stage, is_linear1(s), s.w_scale[task_slot(s)],
                    warpgroup());
    if (is_linear1(s))
        linear1_few<N>(p, s, s.task[task_slot(s)], acc);
    else if (wait_targets(s))
        linear2_few<N>(s, s.task[task_slot(s)], acc);
}

MEGAMOE_DEVICE void many_rows(const MoEParams& p, SharedStorage& s) {
    ManyAccumulators acc;
    MainloopMany(s, is_linear1(s), s.w_scale[task_slot(s)], warpgroup())
        .run(acc, math_state(s).stage);
    if (is_linear1(s))
        linear1_many(p, s.task[task_slot(s)], acc);
    else if (wait_targets(s))
        linear2_many(s, s.task[task_slot(s)], acc);
}

// Nothing but accumulators lives in registers across a mainloop: what is needed after it is read
// again from shared memory.
MEGAMOE_DEVICE void math(const MoEParams& p, SharedStorage& s) {
    while (true) {
        const uint32_t phase = math_state(s).task.phase;
        while (!ptx::try_wait(s.task_full[task_slot(s)], phase)) {
        }
        const Task& task = s.task[task_slot(s)];
        if (__shfl_sync(~0u, uint32_t(task.kind), 0) == uint32_t(TileKind::kDone)) break;
        switch (__shfl_sync(~0u, task.box, 0)) {
#define MEGAMOE_FEW(i)               \
    case i:                          \
        few_rows<box_rows(i)>(p, s); \
        break;
            MEGAMOE_FEW(0)
            MEGAMOE_FEW(1) MEGAMOE_FEW(2) MEGAMOE_FEW(3) MEGAMOE_FEW(4) MEGAMOE_FEW(5)
                MEGAMOE_FEW(6)
#undef MEGAMOE_FEW
                    default : many_rows(p, s);
        }
        __syncwarp();
        if (ptx::lane() == 0) {
            ptx::arrive(s.task_empty[math_state(s).task.slot]);
            ptx::arrive(s.tile_written);
            math_state(s).task.advance();
        }
        __syncwarp();
    }
    combine(p, s);
}

// The last CTA to leave closes the call: every CTA has read epoch, block_base and its tickets.
MEGAMOE_DEVICE void leave(const MoEParams& p, SharedStorage& s) {
    Control& control = p.control(p.rank);
    if (ptx::fetch_add_acq_rel_gpu(&control.exits.value, 1) + 1 != gridDim.x) return;
    control.block_base.value = s.call.block_base + s.call.num_blocks;
    control.ticket.value = 0;
    control.exits.value = 0;
    control.epoch.value = s.call.epoch;
}

}  // namespace megamoe::moe

extern "C" __global__ void __launch_bounds__(megamoe::moe::kThreads, 1)
    megamoe_moe(const __grid_constant__ megamoe::moe::MoEParams p) {
    using namespace megamoe;
    using namespace megamoe::moe;
    extern __shared__ __align__(1024) uint8_t raw[];  // a constant address: no register holds it
    auto& s = *reinterpret_cast<SharedStorage*>(raw);
    // Facts of the compiler, not of a run.
    if (ptx::shared_address(s.w) != kWAddress || ptx::shared_address(s.x) != kXAddress) __trap();
    init(p, s);
    if (stopped(s.call)) return;  // given up before: only reset() mends that
    RouteLister(p, s).run();
    publish_counts(p, s);
    const bool go = receive_counts(p, s);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= kMathWarps) {
        ptx::shrink_registers<kOtherRegisters>();
        if (go) {
            if (warp == 8 && ptx::lane() == 0) feed_weights(p, s);
            if (warp == 9 && ptx::lane() == 0) feed_activations(p, s);
            if (warp == 10) publish_tiles(p, s);
            if (warp == 11) Puller(p, s).run();
        }
    } else {
        ptx::grow_registers<kMathRegisters>();
        if (go) math(p, s);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (s.call.stop == kStopHere) give_up(p, s.call);
    if (s.call.stop)
        drain_stages(s);
    else
        leave(p, s);
}
