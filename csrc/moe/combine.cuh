// Combine: the source rank sums a token's slots once all of them have arrived.
//
// The math warps do it after their last tile: they then hold no ticket, so waiting here stops no
// tile. With many tokens each warp has tokens of its own; with few, the warps of a CTA share the
// columns of one. Hand-offs 8 and 9.
#pragma once

#include "moe/shared.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kWarpColumns = 32 * 8;  // a lane takes 8 columns at a time
inline constexpr uint32_t kSlotsAhead = 8;

// Adds slots to 8 columns of each of kChunks chunks, kWarpColumns apart, in ascending order: the
// contract's fma chain. A bit of `valid` says that a slot counts.
template <uint32_t kChunks>
MEGAMOE_DEVICE void add_slots(float (&sum)[kChunks][8], const uint8_t* first, uint64_t slot_stride,
                              uint32_t num_slots, uint32_t valid, const float* weight) {
    for (uint32_t j0 = 0; j0 < num_slots; j0 += kSlotsAhead) {
        uint4 v[kSlotsAhead][kChunks];
#pragma unroll
        for (uint32_t i = 0; i < kSlotsAhead; ++i)
            if (j0 + i < num_slots && (valid >> (j0 + i) & 1))
#pragma unroll
                for (uint32_t c = 0; c < kChunks; ++c)
                    v[i][c] =
                        ptx::load_streaming(first + (j0 + i) * slot_stride + c * kWarpColumns * 2);
#pragma unroll
        for (uint32_t i = 0; i < kSlotsAhead; ++i) {
            if (j0 + i >= num_slots || !(valid >> (j0 + i) & 1)) continue;
            const float w = weight ? __ldg(weight + j0 + i) : 1.f;
#pragma unroll
            for (uint32_t c = 0; c < kChunks; ++c) {
                const uint32_t word[4] = {v[i][c].x, v[i][c].y, v[i][c].z, v[i][c].w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    sum[c][2 * k] = fmaf(w, __uint_as_float(word[k] << 16), sum[c][2 * k]);
                    sum[c][2 * k + 1] =
                        fmaf(w, __uint_as_float(word[k] & 0xffff0000u), sum[c][2 * k + 1]);
                }
            }
        }
    }
}

// kChunks chunks of a token from `column` on, which is this lane's first.
template <uint32_t kChunks>
MEGAMOE_DEVICE void reduce(const MoEParams& p, uint32_t token, uint32_t routes, uint32_t column) {
    const uint32_t topk = p.shape.topk;
    const uint64_t slot_stride = uint64_t(p.shape.max_tokens) * kHidden * 2;
    const uint8_t* slots = p.at(p.rank, Region::kCombine, token) + column * 2;
    float sum[kChunks][8] = {};
    add_slots<kChunks>(sum, slots, slot_stride, topk, routes,
                       p.topk_weight + uint64_t(token) * topk);
    if (p.shape.num_shared)
        add_slots<kChunks>(sum, slots + topk * slot_stride, slot_stride, p.shape.num_shared, ~0u,
                           nullptr);
#pragma unroll
    for (uint32_t c = 0; c < kChunks; ++c) {
        const uint32_t out[4] = {
            ptx::pack_bf16(sum[c][0], sum[c][1]), ptx::pack_bf16(sum[c][2], sum[c][3]),
            ptx::pack_bf16(sum[c][4], sum[c][5]), ptx::pack_bf16(sum[c][6], sum[c][7])};
        ptx::store_u128(p.y + (uint64_t(token) * kHidden + column + c * kWarpColumns) * 2, out);
    }
}

MEGAMOE_DEVICE void combine(const MoEParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane(), warp = threadIdx.x / 32;
    const bool own = p.num_tokens > 2 * gridDim.x;  // a warp has tokens of its own
    const uint32_t first = own ? warp * gridDim.x + blockIdx.x : blockIdx.x;
    const uint32_t step = own ? kMathWarps * gridDim.x : gridDim.x;
    if (threadIdx.x == 0) s.call.trace.begin(TraceKind::kCombine);
    const uint32_t column_step = own ? kWarpColumns : kMathWarps * kWarpColumns;
    for (uint32_t token = first; token < p.num_tokens; token += step) {
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
        uint32_t column = (own ? 0 : warp * kWarpColumns) + lane * 8;
        if (ok && own)
            for (; column + kWarpColumns < kHidden; column += 2 * kWarpColumns)
                reduce<2>(p, token, routes, column);
        if (ok)
            for (; column < kHidden; column += column_step) reduce<1>(p, token, routes, column);
        // Once every warp has seen the count: it starts at zero in the next call.
        if (!own) ptx::named_barrier<kMathThreads>(kMathBarrier);
        if (ok && lane == 0 && (own || warp == 0)) *arrived = 0;
    }
    if (threadIdx.x == 0) {
        const uint32_t cta = blockIdx.x, tokens = p.num_tokens > cta ? p.num_tokens - cta : 0;
        s.call.trace.end(TraceRole::kCombine, TraceKind::kCombine, cta,
                         ceil_div(tokens, gridDim.x));
    }
}

}  // namespace megamoe::moe
