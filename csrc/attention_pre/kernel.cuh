// The attention-pre kernel: one persistent launch, one CTA per SM, each the worker of one queue.
//
//   warps   role                                       file
//   0-7     math: main loops, finishers                ops/*.cuh
//   8       controller: records into slots             roles.cuh
//   9       weights, keys                              weights.cuh
//   10      event waits, inputs                        inputs.cuh
//   11      publishes finished units                   roles.cuh
#pragma once

#include "attention_pre/inputs.cuh"
#include "attention_pre/ops/index_score.cuh"
#include "attention_pre/ops/norm_quant.cuh"
#include "attention_pre/ops/projections.cuh"
#include "attention_pre/roles.cuh"
#include "attention_pre/weights.cuh"

namespace megamoe::attention {

template <class S>
MEGAMOE_DEVICE void run_body(const Task& t) {
    if constexpr (S::kOpcode == Opcode::kNormQuant) norm_quant<S>(t);
    if constexpr (S::kOpcode == Opcode::kQkvA && !S::kPartial) qkv_a<S>(t);
    if constexpr (S::kOpcode == Opcode::kQkvAFinal) qkv_a_final<S>(t);
    if constexpr (S::kOpcode == Opcode::kHeadGate) head_gate<S>(t);
    if constexpr (S::kOpcode == Opcode::kIndexKey && !S::kPartial) index_key<S>(t);
    if constexpr (S::kOpcode == Opcode::kIndexKeyFinal) index_key_final<S>(t);
    if constexpr (S::kOpcode == Opcode::kIndexQuery && !S::kPartial) index_query<S>(t);
    if constexpr (S::kOpcode == Opcode::kIndexQueryFinal) index_query_final<S>(t);
    if constexpr (S::kOpcode == Opcode::kMainQuery) main_query<S>(t);
    if constexpr (S::kOpcode == Opcode::kAbsorbQuery) absorb_query<S>(t);
    if constexpr (S::kOpcode == Opcode::kIndexScore) index_score<S>(t);
    if constexpr (S::kOpcode == Opcode::kGemmSwiglu) gemm_swiglu<S>(t);
    if constexpr (S::kOpcode == Opcode::kGemmStore) gemm_store<S>(t);
}

template <int N>
MEGAMOE_HD constexpr bool has_partial() {
    bool any = false;
#define X(id, ...) any = any || (Spec<id>::kPartial && Spec<id>::kBand == N);
    MEGAMOE_ATTENTION_SPECS
#undef X
    return any;
}
// One body for all opcodes and shapes.
template <int... kBands>
MEGAMOE_DEVICE void run_partial(const Task& t, const SpecRow& spec) {
    (
        [&] {
            if constexpr (has_partial<kBands>())
                if (spec.rows == kBands) partial_gemm<kBands>(t, spec.n, spec.blocks);
        }(),
        ...);
}

MEGAMOE_DEVICE void run_math(const AttentionParams& p, SharedStorage& s) {
    wait_always(s.operands_ready, 0);
    for (Cursor at;; at.advance()) {
        wait_always(s.instruction_arrived[at.slot], at.phase);
        const Task t{p, s, s.slot[at.slot], at.slot, at.phase};
        const uint32_t opcode = __shfl_sync(~0u, t.inst().opcode, 0);
        if (opcode == kExit) return;
        t.stamp(Stamp::kBegun);
        if (opcode == uint32_t(Opcode::kNoOp)) {
            t.wait_inputs();
        } else {
            const uint32_t spec_id = __shfl_sync(~0u, t.inst().spec_id, 0);
            if (kSpecRows[spec_id].partial)
                run_partial<8, 16, 32, 64, 128>(t, kSpecRows[spec_id]);
            else
                switch (spec_id) {
#define X(id, ...)             \
    case id:                   \
        run_body<Spec<id>>(t); \
        break;
                    MEGAMOE_ATTENTION_SPECS
#undef X
                    default:
                        __trap();
                }
        }
        t.stamp(Stamp::kStored);
        arrive_warp(s.tile_done[at.slot]);
    }
}

MEGAMOE_DEVICE void init(SharedStorage& s) {
    for (uint32_t i = 0; i < kSlots; ++i) {
        ptx::barrier_init(s.instruction_arrived[i], 1);
        ptx::barrier_init(s.instruction_finished[i], 3);  // loaders, publisher
        ptx::barrier_init(s.scales_ready[i], 1);
        ptx::barrier_init(s.inputs_ready[i], 1);
        ptx::barrier_init(s.tile_done[i], kMathWarps);
    }
    init_pages(s);
    ptx::barrier_init(s.operands_ready, 1);
    ptx::barrier_init_fence();
    s.stop = 0;
}

}  // namespace megamoe::attention

extern "C" __global__ void __launch_bounds__(megamoe::attention::kThreads, 1)
    megamoe_attention_pre(const __grid_constant__ megamoe::attention::AttentionParams p) {
    using namespace megamoe;
    using namespace megamoe::attention;
    extern __shared__ __align__(1024) uint8_t raw[];  // a constant address: no register holds it
    auto& s = *reinterpret_cast<SharedStorage*>(raw);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    Queue queue(p);
    if (threadIdx.x == 0) init(s);
    __syncthreads();
    if (warp >= kMathWarps) {
        ptx::shrink_registers<kOtherRegisters>();
        if (warp == kControllerWarp) run_controller(p, s, queue);
        if (warp == kWeightWarp) run_weight_loader(p, s);
        if (warp == kInputWarp) run_input_loader(p, s);
        if (warp == kPublisherWarp) run_publisher(p, s);
    } else {
        ptx::grow_registers<kMathRegisters>();
        run_math(p, s);
    }
    __syncthreads();
    if (threadIdx.x == 0) p.epochs[blockIdx.x] = s.epoch;
}
