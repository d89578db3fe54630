// The MoE kernel: one persistent launch per rank and call, one CTA per SM.
//
//   warps   role                                            file
//   all     stage rows                                      stage.cuh
//   all     list routes, publish and receive counts         dispatch.cuh
//   0-7     a small call's rows                             pull.cuh
//   0-7     math: Linear 1, SwiGLU, Linear 2, combine       math.cuh and what it includes
//   8       tickets, tasks, weights                         feed.cuh, weights.cuh
//   9       activations                                     feed.cuh
//   10      announces finished tiles                        publish.cuh
//   11      pulls rows from peers                           pull.cuh
//
// Roles walk one stream of tasks (shared.cuh) in step with stages of weights and activations.
#pragma once

#include "moe/feed.cuh"
#include "moe/math.cuh"
#include "moe/publish.cuh"
#include "moe/pull.cuh"
#include "moe/stage.cuh"

namespace megamoe::moe {

// What a call begins with, from memory: asked for before tokens are staged.
struct Opening {
    uint32_t abort = 0, epoch = 0;
    uint64_t block_base = 0;
    MEGAMOE_DEVICE explicit Opening(const MoEParams& p) {
        // Routes and the protocol's words: weights have driven them out of L2.
        const uint64_t byte = thread_of_call() * kLineBytes;
        const uint64_t routes = uint64_t(p.num_tokens) * p.shape.topk * 4;
        if (byte < routes) ptx::prefetch_l2(reinterpret_cast<const uint8_t*>(p.topk_idx) + byte);
        if (byte < p.layout.clear_end() - p.layout.clear_begin())
            ptx::prefetch_l2(p.bases[p.rank] + p.layout.clear_begin() + byte);
        if (threadIdx.x != 0) return;
        const volatile Control& control = p.control(p.rank);  // loaded here, not where it is used
        abort = control.abort.value;
        epoch = control.epoch.value;
        block_base = control.block_base.value;
    }
};

MEGAMOE_DEVICE void init(const MoEParams& p, SharedStorage& s, const Opening& opening) {
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < kStages; ++i) {
            ptx::barrier_init(s.stage_full[i], 2);  // weights, activations
            ptx::barrier_init(s.stage_empty[i], kMathWarps);
        }
        for (uint32_t i = 0; i < kTaskSlots; ++i) {
            ptx::barrier_init(s.task_full[i], 1);
            ptx::barrier_init(s.task_empty[i], kMathWarps + 2);  // activations, publish
            ptx::barrier_init(s.tile_written[i], kMathWarps);
        }
        for (uint32_t i = 0; i < kPullBuffers; ++i) ptx::barrier_init(s.pull_full[i], 1);
        ptx::barrier_init(s.rows_ready, 1);
        ptx::barrier_init_fence();
        s.call.stop = opening.abort != 0 ? kStopPeer : 0;
        s.call.epoch = opening.epoch + 1;
        s.call.block_base = opening.block_base;
        s.fills[0] = s.fills[1] = 0;
        s.call.trace = Trace{};
        s.call.trace.open(p.trace);
    }
    for (uint32_t i = threadIdx.x; i < 3 * kFewRows; i += kThreads) (&s.amax[0][0])[i] = 0;
    if (threadIdx.x < kMathWarps) s.math[threadIdx.x] = MathState{};
    __syncthreads();
}

// The last CTA to leave closes the call: every CTA has read epoch, block_base and its last ticket.
// Its tiles and its combine may go on; whoever reads these words next is the next kernel.
MEGAMOE_DEVICE void leave(const MoEParams& p, SharedStorage& s) {
    Control& control = p.control(p.rank);
    if (ptx::fetch_add_acq_rel_gpu(&control.exits.value, 1) + 1 != gridDim.x) return;
    control.block_base.value = s.call.block_base + s.call.num_blocks;
    control.ticket[0].value = control.ticket[1].value = 0;
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
    const TraceArrival arrival = TraceArrival::now();
    const Opening opening(p);
    stage_call(p);
    init(p, s, opening);
    if (threadIdx.x == 0) s.call.trace.begin_call(arrival, p.stage_x != nullptr, p.num_tokens);
    if (stopped(s.call)) return;  // given up before: only reset() mends that
    if (threadIdx.x / 32 == 8) prefetch_first_weights(p);
    RouteLister(p, s).run();
    publish_counts(p, s);
    if (threadIdx.x == 0) {
        s.call.trace.stamp(kTraceListed);
        s.call.trace.end(TraceRole::kDispatch, TraceKind::kList);
        s.call.trace.begin(TraceKind::kExchange);
    }
    const bool go = receive_counts(p, s);
    if (threadIdx.x == 0) {
        s.call.trace.stamp(kTraceCounts);
        s.call.trace.end(TraceRole::kDispatch, TraceKind::kExchange);
    }
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp >= kMathWarps) {
        ptx::shrink_registers<kOtherRegisters>();
        if (go) {
            if (warp == 8 && ptx::elect()) {
                feed_weights(p, s);
                if (!stopped(s.call)) leave(p, s);
            }
            if (warp == 9 && ptx::elect()) feed_activations(p, s);
            if (warp == 10) publish_tiles(p, s);
            if (warp == 11) Puller(p, s).run();
        }
    } else {
        ptx::grow_registers<kMathRegisters>();
        if (go) {
            FirstRows(p, s).run();
            math(p, s);
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (s.call.stop == kStopHere) give_up(p, s.call);
    if (s.call.stop) drain_stages(s);
    if (kTrace && p.trace) {
        s.call.trace.stamp(kTraceEnd);
        s.call.trace.add(kTraceCycles, clock64());
        for (uint32_t i = 0; i < kNumTraceSlots; ++i)
            p.trace->slots[blockIdx.x * kNumTraceSlots + i] = s.call.trace.value[kTrace ? i : 0];
        s.call.trace.close(p.trace);
    }
}
