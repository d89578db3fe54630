// One stage of the attention-pre graph, or half of one, as a kernel of its own: a CTA per task, and
// the same task bodies as the megakernel.
//
//   warps   role                       waits for the producers
//   0-7     math                       before what it loads itself
//   8       weights, scales, old keys  no
//   9       inputs and their scales    at once
//
// Kernels whose bodies load nothing through pages have the math warps alone.
//
// With programmatic edges this kernel may begin while its producers run. `launch_dependents` lets
// consumers in and says nothing about data; `wait_producers` returns when all direct producers have
// ended and their stores are visible. Each kernel waits before it ends, so that whoever waits for
// it has waited for its producers, too. What producers store is read past L1 by loads that the
// compiler cannot move (device/load.cuh) or by the copy engine, never through const __restrict__.
#pragma once

#include "attention_pre/ops/index_score.cuh"
#include "attention_pre/ops/norm_quant.cuh"
#include "attention_pre/ops/projections.cuh"
#include "cmp/loaders.cuh"
#include "cmp/warm.cuh"

namespace megamoe::attention {

using Body = Spec<0>;
inline constexpr bool kFinal = MEGAMOE_CMP_PART == MEGAMOE_CMP_FINAL;
inline constexpr bool kHasLoaders = Body::kLoads != Loads::kNone && !kFinal;
inline constexpr uint32_t kCmpThreads = kMathThreads + (kHasLoaders ? 64 : 0);
inline constexpr uint32_t kWeights = kMathWarps, kInputs = kMathWarps + 1;

// Split-K sums lie in the same slot of every FP8 opcode that has them.
inline constexpr uint32_t kPartials = operand::qkv_a::partials;
static_assert(kPartials == operand::index_key::partials &&
              kPartials == operand::index_query::partials &&
              kPartials == operand::gemm_store::partials);

// A main loop waits for as many pages as it has blocks in flight before it releases one.
MEGAMOE_HD constexpr bool pages_suffice() {
    constexpr int kWidth = Body::kBand * Body::kTiles;
    if (!kHasLoaders || Body::kLoads != Loads::kFp8) return true;  // BF16 asserts it itself
    const int most = most_at_once(kWidth, Body::kTiles);
    const int held = most < Body::kBlocks ? most : Body::kBlocks;
    return held * Body::kTiles <= int(kWeightPages);
}
static_assert(pages_suffice(), "too few weight pages for the main loop");

template <class S>
MEGAMOE_DEVICE void partial(const Task& t) {
    Tiles<S> acc;
    gemm_fp8<S>(t, acc);
    store_partial<S::kBand>(t, acc[0], t.operand<float>(kPartials), S::kN);
}

template <class S, class Finisher>
MEGAMOE_DEVICE void finish(const Task& t) {
    Finisher finisher(t);
    finish_parts<S>(t, t.operand<float>(kPartials), finisher);
}

template <class S>
MEGAMOE_DEVICE void run_part(const Task& t) {
    if constexpr (MEGAMOE_CMP_PART == MEGAMOE_CMP_PARTIAL) {
        partial<S>(t);
    } else if constexpr (kFinal) {
        if constexpr (S::kOpcode == Opcode::kIndexKey) finish<S, IndexKeyRow<S>>(t);
        if constexpr (S::kOpcode == Opcode::kIndexQuery) finish<S, IndexQueryRow<S>>(t);
        if constexpr (S::kOpcode == Opcode::kGemmStore) finish<S, SumRow<S>>(t);
    } else {
        if constexpr (S::kOpcode == Opcode::kNormQuant) norm_quant<S>(t);
        if constexpr (S::kOpcode == Opcode::kQkvAFinal) qkv_a_final<S>(t);
        if constexpr (S::kOpcode == Opcode::kHeadGate) head_gate<S>(t);
        if constexpr (S::kOpcode == Opcode::kIndexKey) index_key<S>(t);
        // Unsplit, these read a producer's sums beside their pages.
        if constexpr (S::kOpcode == Opcode::kIndexQuery || S::kOpcode == Opcode::kGemmStore)
            t.wait_inputs();
        if constexpr (S::kOpcode == Opcode::kIndexQuery) index_query<S>(t);
        if constexpr (S::kOpcode == Opcode::kMainQuery) main_query<S>(t);
        if constexpr (S::kOpcode == Opcode::kAbsorbQuery) absorb_query<S>(t);
        if constexpr (S::kOpcode == Opcode::kIndexScore) index_score<S>(t);
        if constexpr (S::kOpcode == Opcode::kGemmSwiglu) gemm_swiglu<S>(t);
        if constexpr (S::kOpcode == Opcode::kGemmStore) gemm_store<S>(t);
    }
}

// Stamps of a traced build; the bodies note `kLoaded` and `kSummed` themselves.
MEGAMOE_DEVICE void stamp(const CmpParams& p, Stamp what) {
#ifdef MEGAMOE_ATTENTION_TRACE
    p.stamps[cta_number() * uint32_t(Stamp::kCount) + uint32_t(what)] =
        what == Stamp::kPublished ? ptx::sm_id() : ptx::now_ns();
#endif
}

// A wait for the producers that comes before what does not need them, for comparison.
MEGAMOE_DEVICE void wait_after_prologue() {
    if constexpr (MEGAMOE_CMP_WAIT == MEGAMOE_CMP_WAIT_PROLOGUE) ptx::grid_wait();
}

MEGAMOE_DEVICE void run_weights(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    if (ptx::lane() == 0) ptx::prefetch_map(p.maps.weights);
    make_weight_pages(s);
    wait_after_prologue();
    if constexpr (Body::kLoads == Loads::kKeys)
        load_keys(p, inst, s);
    else
        load_weights<Body>(p, inst, s);
}

MEGAMOE_DEVICE void run_inputs(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    if (ptx::lane() == 0) ptx::prefetch_map(p.maps.inputs);
    make_input_pages(s);
    wait_producers();
    if (ptx::lane() == 0) {
        if (p.trigger == Trigger::kInputs) ptx::launch_dependents();
        stamp(p, Stamp::kInputsReady);
    }
    if constexpr (Body::kLoads == Loads::kKeys)
        load_queries<Body>(p, inst, s);
    else
        load_inputs<Body>(p, inst, s);
}

MEGAMOE_DEVICE void run_math(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    AttentionParams none{};
#ifdef MEGAMOE_ATTENTION_TRACE
    none.trace = p.stamps;
#endif
    const Task t{none, s, s.slot[0], 0, 0, inst, p.operands};
    if constexpr (kHasLoaders) wait_pages_made();
    wait_after_prologue();
    if constexpr (!kHasLoaders) warm_finisher<Body>(p, inst);
#ifdef MEGAMOE_ATTENTION_TRACE
    if (!kHasLoaders) {  // the loader of inputs notes it where there is one
        t.wait_inputs();
        if (threadIdx.x == 0) stamp(p, Stamp::kInputsReady);
    }
#endif
    if (p.delay_ns) {
        t.wait_inputs();
        const uint64_t start = ptx::now_ns();
        while (ptx::now_ns() - start < p.delay_ns) {
        }
    }
    run_part<Body>(t);
}

}  // namespace megamoe::attention

#ifdef MEGAMOE_CMP_REGISTERS
#define MEGAMOE_CMP_BOUNDS __maxnreg__(MEGAMOE_CMP_REGISTERS)
#else
#define MEGAMOE_CMP_BOUNDS __launch_bounds__(megamoe::attention::kCmpThreads, MEGAMOE_CMP_CTAS)
#endif
extern "C" __global__ void MEGAMOE_CMP_BOUNDS
megamoe_cmp(const __grid_constant__ megamoe::attention::CmpParams p) {
    using namespace megamoe;
    using namespace megamoe::attention;
    extern __shared__ __align__(1024) uint8_t raw[];
    auto& s = *reinterpret_cast<SharedStorage*>(raw);
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if constexpr (MEGAMOE_CMP_WAIT == MEGAMOE_CMP_WAIT_ENTRY) ptx::grid_wait();
    if (threadIdx.x == 0) {
        if (p.trigger == Trigger::kEntry) ptx::launch_dependents();
        stamp(p, Stamp::kVisible);
        stamp(p, Stamp::kPublished);
    }
    const Instruction inst = task_of<Body>(p);
    if (warp < kMathWarps)
        run_math(p, inst, s);
    else if constexpr (kHasLoaders) {
        if (warp == kWeights)
            run_weights(p, inst, s);
        else
            run_inputs(p, inst, s);
    }
#ifdef MEGAMOE_ATTENTION_TRACE
    constexpr bool kTraced = true;
#else
    constexpr bool kTraced = false;
#endif
    if (kTraced || p.trigger == Trigger::kStored) {
        __syncthreads();
        if (threadIdx.x == 0) {
            if (p.trigger == Trigger::kStored) ptx::launch_dependents();
            stamp(p, Stamp::kStored);
        }
    }
}
