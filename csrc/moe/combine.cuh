// Combine: the source rank sums a token's slots once all of them have arrived.
//
// The math warps do it after their last tile: they then hold no ticket, so waiting here stops no
// tile. With many tokens each warp has tokens of its own (combine_many.cuh); with few, the warps of
// a CTA share the columns of one. Hand-offs 8 and 9.
#pragma once

#include "moe/combine_many.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kSlotsAhead = 8;

// Adds slots to 8 columns in ascending order. A bit of `valid` says that a slot counts.
MEGAMOE_DEVICE void add_slots(float (&sum)[8], const uint8_t* first, uint64_t slot_stride,
                              uint32_t num_slots, uint32_t valid, const float* weight) {
    for (uint32_t j0 = 0; j0 < num_slots; j0 += kSlotsAhead) {
        uint4 v[kSlotsAhead];
#pragma unroll
        for (uint32_t i = 0; i < kSlotsAhead; ++i)
            if (j0 + i < num_slots && (valid >> (j0 + i) & 1))
                v[i] = ptx::load_streaming(first + (j0 + i) * slot_stride);
#pragma unroll
        for (uint32_t i = 0; i < kSlotsAhead; ++i)
            if (j0 + i < num_slots && (valid >> (j0 + i) & 1))
                add_slot(sum, v[i], weight ? __ldg(weight + j0 + i) : 1.f);
    }
}

// 8 columns of a token from `column` on.
MEGAMOE_DEVICE void reduce(const MoEParams& p, uint32_t token, uint32_t routes, uint32_t column) {
    const uint32_t topk = p.shape.topk;
    const uint64_t slot_stride = uint64_t(p.shape.max_tokens) * kHidden * 2;
    const uint8_t* slots = p.at(p.rank, Region::kCombine, token) + column * 2;
    float sum[8] = {};
    add_slots(sum, slots, slot_stride, topk, routes, p.topk_weight + uint64_t(token) * topk);
    if (p.shape.num_shared)
        add_slots(sum, slots + topk * slot_stride, slot_stride, p.shape.num_shared, ~0u, nullptr);
    store_sum(p, token, column, sum);
}

MEGAMOE_DEVICE void combine_few(const MoEParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane(), warp = threadIdx.x / 32;
    for (uint32_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        const bool routed =
            lane < p.shape.topk && __ldg(p.topk_idx + uint64_t(token) * p.shape.topk + lane) >= 0;
        const uint32_t routes = __ballot_sync(~0u, routed);
        if (lane == 0) ptx::prefetch_l2(p.topk_weight + uint64_t(token) * p.shape.topk);
        uint32_t* arrived = p.word(Region::kTokenArrived, token);
        uint32_t ok = 0;
        if (lane == 0)
            ok = wait_word<Compare::kEqual, Scope::kSystem>(
                p, s.call, arrived, __popc(routes) + p.shape.num_shared,
                {Role::kCombine, Phase::kReduce, Tag::kTokenArrived, blockIdx.x, p.rank, token});
        ok = ptx::from_lane_0(ok);
        if (ok)
            for (uint32_t column = warp * kWarpColumns + lane * 8; column < kHidden;
                 column += kMathWarps * kWarpColumns)
                reduce(p, token, routes, column);
        // Once every warp has seen the count: it starts at zero in the next call.
        ptx::named_barrier<kMathThreads>(kMathBarrier);
        if (ok && threadIdx.x == 0) *arrived = 0;
    }
}

MEGAMOE_DEVICE void combine(const MoEParams& p, SharedStorage& s) {
    if (threadIdx.x == 0) s.call.trace.begin(TraceKind::kCombine);
    if (p.num_tokens > 2 * gridDim.x)
        combine_many(p, s);
    else
        combine_few(p, s);
    if (threadIdx.x == 0) {
        const uint32_t cta = blockIdx.x, tokens = p.num_tokens > cta ? p.num_tokens - cta : 0;
        s.call.trace.end(TraceRole::kCombine, TraceKind::kCombine, cta,
                         ceil_div(tokens, gridDim.x));
    }
}

}  // namespace megamoe::moe
