// Combine: the source rank sums a token's slots once all of them have arrived.
//
// The math warps do it after their last tile: they then hold no ticket, so waiting here stops no
// tile. With many tokens each warp has tokens of its own (combine_many.cuh); with few, the warps of
// a CTA share the columns of one. Hand-offs 8 and 9.
#pragma once

#include "moe/combine_many.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kSlotsAhead = 8;
// Of a token's columns a warp sums several chunks at once, so that all their slots are on their way
// together.
inline constexpr uint32_t kChunkStep = kMathWarps * kWarpColumns;
inline constexpr uint32_t kWarpChunks = ceil_div(kHidden, kChunkStep);
inline constexpr uint32_t kChunksAtOnce = kWarpChunks < 4 ? kWarpChunks : 4;

// What a warp sums of a token: 8 columns a lane from `column` on, and those kChunkStep further, ….
class Sums {
  public:
    MEGAMOE_DEVICE Sums(const MoEParams& p, uint32_t token, uint32_t column)
        : slot_stride_(uint64_t(p.shape.max_tokens) * kHidden * 2),
          slots_(p.at(p.rank, Region::kCombine, token) + column * 2),
          chunks_(column < kHidden ? ceil_div(kHidden - column, kChunkStep) : 0) {}

    // Adds `num` slots from `first` on in ascending order. A bit of `valid` says that a slot
    // counts, and lane j has the weight of slot first + j.
    MEGAMOE_DEVICE void add(uint32_t first, uint32_t num, uint32_t valid, float weight) {
        for (uint32_t j0 = 0; j0 < num; j0 += kSlotsAhead) {
            uint4 v[kSlotsAhead][kChunksAtOnce];
            const uint8_t* slots = slots_ + (first + j0) * slot_stride_;
#pragma unroll
            for (uint32_t i = 0; i < kSlotsAhead; ++i) {
                if (j0 + i >= num || !(valid >> (j0 + i) & 1)) continue;
#pragma unroll
                for (uint32_t c = 0; c < kChunksAtOnce; ++c)
                    if (c < chunks_)
                        v[i][c] =
                            ptx::load_streaming(slots + i * slot_stride_ + c * kChunkStep * 2);
            }
#pragma unroll
            for (uint32_t i = 0; i < kSlotsAhead; ++i) {
                if (j0 + i >= num || !(valid >> (j0 + i) & 1)) continue;
                const float of_slot = __shfl_sync(~0u, weight, j0 + i);
#pragma unroll
                for (uint32_t c = 0; c < kChunksAtOnce; ++c) add_slot(sum_[c], v[i][c], of_slot);
            }
        }
    }
    MEGAMOE_DEVICE void store(const MoEParams& p, uint32_t token, uint32_t column) const {
#pragma unroll
        for (uint32_t c = 0; c < kChunksAtOnce; ++c)
            if (c < chunks_) store_sum(p, token, column + c * kChunkStep, sum_[c]);
    }

  private:
    uint64_t slot_stride_;
    const uint8_t* slots_;
    uint32_t chunks_;  // that are left
    float sum_[kChunksAtOnce][8] = {};
};

MEGAMOE_DEVICE void combine_few(const MoEParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane(), warp = threadIdx.x / 32;
    for (uint32_t token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        const uint32_t topk = p.shape.topk;
        const uint64_t route = uint64_t(token) * topk + lane;
        const bool routed = lane < topk && __ldg(p.topk_idx + route) >= 0;
        const uint32_t routes = __ballot_sync(~0u, routed);
        const float weight = lane < topk ? __ldg(p.topk_weight + route) : 0.f;
        uint32_t* arrived = p.word(Region::kTokenArrived, token);
        uint32_t ok = 0;
        if (lane == 0)
            ok = wait_word<Compare::kEqual, Scope::kSystem>(
                p, s.call, arrived, __popc(routes) + p.shape.num_shared,
                {Role::kCombine, Phase::kReduce, Tag::kTokenArrived, blockIdx.x, p.rank, token});
        ok = ptx::from_lane_0(ok);
        if (ok) {
            for (uint32_t base = warp * kWarpColumns; base < kHidden;
                 base += kChunksAtOnce * kChunkStep) {
                const uint32_t column = base + lane * 8;
                Sums sums(p, token, column);
#pragma unroll 1
                for (uint32_t shared = 0; shared < 2; ++shared)
                    sums.add(shared ? topk : 0, shared ? p.shape.num_shared : topk,
                             shared ? ~0u : routes, shared ? 1.f : weight);
                sums.store(p, token, column);
            }
        }
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
