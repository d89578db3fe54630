// Combine: the source rank sums a token's slots once all of them have arrived.
//
// The math warps do it after their last tile: they then hold no ticket, so waiting here stops no
// tile. CTA u takes tokens u, u + U, …; its warps share the columns. Hand-offs 8 and 9.
#pragma once

#include "moe/shared.cuh"

namespace megamoe::moe {

// 8 columns of one token: fma chain over routed slots, then shared slots with weight 1.
template <uint32_t kBatch>
MEGAMOE_DEVICE void add_slots(float (&sum)[8], const uint8_t* first, uint64_t slot_stride,
                              uint32_t valid, const float* weight, uint32_t num_slots,
                              uint32_t topk) {
    for (uint32_t j0 = 0; j0 < num_slots; j0 += kBatch) {
        uint4 v[kBatch];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i)
            if (j0 + i < num_slots && (valid >> (j0 + i) & 1))
                v[i] = ptx::load_streaming(first + (j0 + i) * slot_stride);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
            if (j0 + i >= num_slots || !(valid >> (j0 + i) & 1)) continue;
            const float w = j0 + i < topk ? __ldg(weight + j0 + i) : 1.f;
            const uint32_t word[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sum[2 * k] = fmaf(w, __uint_as_float(word[k] << 16), sum[2 * k]);
                sum[2 * k + 1] = fmaf(w, __uint_as_float(word[k] & 0xffff0000u), sum[2 * k + 1]);
            }
        }
    }
}

MEGAMOE_DEVICE void combine(const MoEParams& p, SharedStorage& s) {
    const uint32_t topk = p.shape.topk, num_slots = p.shape.num_slots();
    const uint64_t slot_stride = uint64_t(p.shape.max_tokens) * kHidden * 2;
    const uint32_t lane = ptx::lane();
    for (uint32_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        // Bit j: slot j counts. K + S can exceed 32 only by shared slots, which always count.
        const bool routed = lane < topk && __ldg(p.topk_idx + uint64_t(token) * topk + lane) >= 0;
        const uint32_t routes = __ballot_sync(~0u, routed);
        uint32_t* arrived = p.word(Region::kTokenArrived, token);
        uint32_t ok = 0;
        if (lane == 0)
            ok = wait_word<Compare::kEqual, Scope::kSystem>(
                p, s.call, arrived, __popc(routes) + p.shape.num_shared,
                {Role::kCombine, Phase::kReduce, Tag::kTokenArrived, blockIdx.x, p.rank, token});
        ok = __shfl_sync(~0u, ok, 0);
        if (ok) {
            const float* weight = p.topk_weight + uint64_t(token) * topk;
            const uint8_t* slots = p.at(p.rank, Region::kCombine, token);
            for (uint32_t column = threadIdx.x * 8; column < kHidden; column += kMathThreads * 8) {
                float sum[8] = {};
                add_slots<8>(sum, slots + column * 2, slot_stride, routes, weight, topk, topk);
                add_slots<2>(sum, slots + topk * slot_stride + column * 2, slot_stride, ~0u, weight,
                             num_slots - topk, 0);
                const uint32_t out[4] = {
                    ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
                    ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
                ptx::store_u128(p.y + (uint64_t(token) * kHidden + column) * 2, out);
            }
        }
        ptx::named_barrier<kMathThreads>(kMathBarrier);  // every warp has seen the count
        if (ok && threadIdx.x == 0) *arrived = 0;
    }
}

}  // namespace megamoe::moe
