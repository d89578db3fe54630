// Math: the eight warps that walk the task stream through tensor cores, then combine.
//
//   rows of the block   path                                  mainloop
//   1..96               weights on the M side of wgmma        mainloop_few.cuh
//   97..128             tokens on the M side                  mainloop_many.cuh
//   129..144            both, where blocks have tails         mainloop_tail.cuh
//
// All give the same bits: the same order of K, of scales and of rounding.
#pragma once

#include "moe/combine.cuh"
#include "moe/linear1.cuh"
#include "moe/linear2.cuh"
#include "moe/phased.cuh"

namespace megamoe::moe {

// The same for all lanes, and known to be.
MEGAMOE_DEVICE uint32_t warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }
MEGAMOE_DEVICE MathState& math_state(SharedStorage& s) { return s.math[ptx::thread_anew() / 32]; }
MEGAMOE_DEVICE uint32_t task_slot(SharedStorage& s) {
    return __shfl_sync(~0u, math_state(s).task.slot, 0);
}
MEGAMOE_DEVICE bool is_linear1(SharedStorage& s) {
    return __shfl_sync(~0u, uint32_t(s.task[task_slot(s)].kind), 0) == uint32_t(TileKind::kLinear1);
}

// False if the rows' targets never come: the CTA gives up, and old targets are there.
MEGAMOE_DEVICE bool wait_targets(SharedStorage& s) {
    const uint32_t phase = math_state(s).rows_phase;
    __syncwarp();
    math_state(s).rows_phase = phase ^ 1;
    const bool ok = wait(s.rows_ready, phase, s.call) && !stopped(s.call);
    return ptx::from_lane_0(ok);
}

// Begin or end of the event of this task's tile, or of its epilogue. One thread's.
template <bool kEnd>
MEGAMOE_DEVICE void trace_tile(SharedStorage& s, TraceKind linear1, TraceKind linear2) {
    if constexpr (kTrace) {
        if (threadIdx.x != 0) return;
        const uint32_t slot = s.math[0].task.slot;
        const Task& task = s.task[slot];
        const TraceKind kind = task.kind == TileKind::kLinear1 ? linear1 : linear2;
        if constexpr (kEnd)
            s.call.trace.end(TraceRole::kMath, kind, s.call.trace.block_of_task(slot), task.n,
                             task.num_rows);
        else
            s.call.trace.begin(kind);
    }
}

template <int N>
MEGAMOE_DEVICE void few_rows(const MoEParams& p, SharedStorage& s) {
    float acc[2][N / 2];
    mainloop_few<N>(acc, s, math_state(s).stage, is_linear1(s), s.w_scale[task_slot(s)],
                    warpgroup());
    trace_tile<false>(s, TraceKind::kActivate, TraceKind::kScatter);
    TraceSpan span(s.call.trace, kTrace && is_linear1(s) ? kTraceEpilogue1 : kTraceEpilogue2,
                   threadIdx.x == 0);
    if (is_linear1(s))
        linear1_few<N>(p, s, s.task[task_slot(s)], acc, 0);
    else if (wait_targets(s))
        linear2_few<N>(s, s.task[task_slot(s)], acc, 0);
    trace_tile<true>(s, TraceKind::kActivate, TraceKind::kScatter);
}

MEGAMOE_DEVICE void many_rows(const MoEParams& p, SharedStorage& s) {
    ManyAccumulators acc;
    MainloopMany(s, is_linear1(s), s.w_scale[task_slot(s)], warpgroup())
        .run(acc, math_state(s).stage);
    trace_tile<false>(s, TraceKind::kActivate, TraceKind::kScatter);
    TraceSpan span(s.call.trace, kTrace && is_linear1(s) ? kTraceEpilogue1 : kTraceEpilogue2,
                   threadIdx.x == 0);
    if (is_linear1(s))
        linear1_many(p, s.task[task_slot(s)], acc);
    else if (wait_targets(s))
        linear2_many(s, s.task[task_slot(s)], acc);
    trace_tile<true>(s, TraceKind::kActivate, TraceKind::kScatter);
}

#if MEGAMOE_TAIL_ROWS
MEGAMOE_DEVICE void many_rows_and_tail(const MoEParams& p, SharedStorage& s) {
    ManyAccumulators acc;
    TailAccumulators tail;
    MainloopTail(is_linear1(s), s.w_scale[task_slot(s)], warpgroup()).run(acc, tail);
    trace_tile<false>(s, TraceKind::kActivate, TraceKind::kScatter);
    TraceSpan span(s.call.trace, kTrace && is_linear1(s) ? kTraceEpilogue1 : kTraceEpilogue2,
                   threadIdx.x == 0);
    if (is_linear1(s)) {
        linear1_many(p, s.task[task_slot(s)], acc);
        linear1_few<kTailRows>(p, s, s.task[task_slot(s)], tail, kManyRows);
    } else if (wait_targets(s)) {
        linear2_many(s, s.task[task_slot(s)], acc);
        linear2_few<kTailRows>(s, s.task[task_slot(s)], tail, kManyRows);
    }
    trace_tile<true>(s, TraceKind::kActivate, TraceKind::kScatter);
}
#endif

// Nothing but accumulators lives in registers across a mainloop: what is needed after it is read
// again from shared memory.
MEGAMOE_DEVICE void math(const MoEParams& p, SharedStorage& s) {
    while (true) {
        const uint32_t phase = math_state(s).task.phase;
        {
            TraceSpan span(s.call.trace, kTraceTask, threadIdx.x == 0);
            while (!ptx::try_wait(s.task_full[task_slot(s)], phase)) {
            }
        }
        const Task& task = s.task[task_slot(s)];
        if (__shfl_sync(~0u, uint32_t(task.kind), 0) == uint32_t(TileKind::kDone)) break;
        trace_tile<false>(s, TraceKind::kLinear1, TraceKind::kLinear2);
        switch (__shfl_sync(~0u, task.box, 0)) {
#define MEGAMOE_FEW(i)               \
    case i:                          \
        few_rows<box_rows(i)>(p, s); \
        break;
            MEGAMOE_FEW(0)
            MEGAMOE_FEW(1)
            MEGAMOE_FEW(2)
            MEGAMOE_FEW(3)
            MEGAMOE_FEW(4)
            MEGAMOE_FEW(5)
            MEGAMOE_FEW(6)
#undef MEGAMOE_FEW
#if MEGAMOE_TAIL_ROWS
            case 8:
                many_rows_and_tail(p, s);
                break;
#endif
            default:
                many_rows(p, s);
        }
        trace_tile<true>(s, TraceKind::kLinear1, TraceKind::kLinear2);
        if (threadIdx.x == 0)
            s.call.trace.add(s.task[s.math[0].task.slot].kind == TileKind::kLinear1 ? kTraceTiles1
                                                                                    : kTraceTiles2,
                             1);
        __syncwarp();
        if (ptx::lane() == 0) {
            ptx::arrive(s.task_empty[math_state(s).task.slot]);
            ptx::arrive(s.tile_written[math_state(s).task.slot]);
            math_state(s).task.advance();
        }
        __syncwarp();
    }
    if (threadIdx.x == 0) s.call.trace.stamp(kTraceTilesDone);
    if constexpr (kPhased) {
        if (threadIdx.x == 0) wait_all_blocks(p, s, Phase::kLinear2);
        ptx::named_barrier<kMathThreads>(kMathBarrier);
    }
    combine(p, s);
    if (threadIdx.x == 0) s.call.trace.stamp(kTraceCombined);
}

}  // namespace megamoe::moe
