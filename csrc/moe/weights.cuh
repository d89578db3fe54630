// Weights: where the blocks of a tile lie, and how they are loaded.
//
// Plain: block after block, 32 KB each. Placed, for two streams of tickets: memory belongs to the
// halves of L2 by chunks of 4 KB, and in every aligned window of 16 those of one half are
// A = {0, 3, 4, 7, 9, 10, 13, 14} and those of the other are B, the rest; only which half has A
// differs from window to window. So a window holds a block of both tiles of a pair of columns, each
// in the chunks that are near to the SMs of its stream (megamoe/backends/cuda_placing.py).
#pragma once

#include "moe/tickets.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kMostKBlocks = kKBlocks1 > kKBlocks2 ? kKBlocks1 : kKBlocks2;
inline constexpr uint32_t kWindowChunks = 16;
// Blocks of a word of MoEParams::placed, where every tile has one for the block behind its last.
inline constexpr uint32_t kWordBlocks = 64;

MEGAMOE_DEVICE bool weights_are_placed(const MoEParams& p) {
    return kMostStreams == 2 && p.placed[0] != nullptr;
}

MEGAMOE_DEVICE void prefetch_weight_maps(const MoEParams& p) {
    for (const auto& maps : p.w) {
        ptx::prefetch_map(maps[0]);
        if (weights_are_placed(p)) ptx::prefetch_map(maps[1]);
    }
}

// The routed expert of this rank that the call's first ids name `order` experts before, or none.
// One warp.
inline constexpr uint32_t kNoExpert = ~0u;
MEGAMOE_DEVICE uint32_t named_expert(const MoEParams& p, uint32_t order) {
    constexpr uint32_t kIds = 8;
    const uint32_t lane = ptx::lane(), experts = p.shape.local_experts();
    const uint32_t ids = p.num_tokens * p.shape.topk;
    uint32_t id[kIds];
#pragma unroll
    for (uint32_t u = 0; u < kIds; ++u)
        id[u] = u * 32 + lane < ids ? uint32_t(__ldg(p.topk_idx + u * 32 + lane)) : kNoExpert;
#pragma unroll 1
    for (uint32_t first = 0; first < experts; first += 32) {
        uint32_t named = 0;
#pragma unroll
        for (uint32_t u = 0; u < kIds; ++u) {
            const uint32_t expert = id[u] - p.rank * experts - first;
            if (expert < min(experts - first, 32u)) named |= 1u << expert;
        }
        named = __reduce_or_sync(~0u, named);
        const bool wanted = named >> lane & 1 && __popc(named & ((1u << lane) - 1)) == order;
        const uint32_t found = __ballot_sync(~0u, wanted);
        if (found) return first + __ffs(found) - 1;
        order -= __popc(named);
    }
    return kNoExpert;
}

// Brings what tiles begin with into L2 while the ranks exchange counts. First tickets are dealt,
// and first come the experts that own tokens go to (expert_at), whatever peers route. Only a hint:
// it looks at a part of the ids. One warp.
inline constexpr uint32_t kFirstBlocks = 2;
MEGAMOE_DEVICE void prefetch_first_weights(const MoEParams& p) {
    if (p.shape.wave_blocks > 1 || weights_are_placed(p) || p.num_tokens == 0) return;
    const uint32_t order = blockIdx.x / kL1Tiles, shared = p.shape.num_shared;
    const uint32_t expert =
        order < shared ? p.shape.local_experts() + order : named_expert(p, order - shared);
    if (expert == kNoExpert || ptx::lane() != 0) return;
    const uint32_t block = (expert * kL1Tiles + blockIdx.x % kL1Tiles) * kKBlocks1;
#pragma unroll
    for (uint32_t kb = 0; kb < kFirstBlocks; ++kb)
        ptx::tma_prefetch(p.w[0][0], 0, int32_t((block + kb) * kTileN));
}

// The blocks of one tile, in order. Of one thread.
class WeightTile {
  public:
    // `index`: of the tile among those of all experts.
    MEGAMOE_DEVICE WeightTile(const MoEParams& p, TileKind kind, uint64_t index)
        : placed_(weights_are_placed(p)), maps_(p.w[kind == TileKind::kLinear1 ? 0 : 1]) {
        const uint32_t num_blocks = k_blocks(kind);
        if (placed_) {
            const uint64_t* words = p.placed[kind == TileKind::kLinear1 ? 0 : 1];
            words_ = words + index * (num_blocks / kWordBlocks + 1);
            bits_ = __ldg(words_);
            at_ = int32_t(index / 2 * num_blocks * kWindowChunks);
            aim(0);
        } else {
            at_ = int32_t(index * num_blocks * kTileN);
        }
    }
    MEGAMOE_DEVICE void load(uint32_t kb, uint8_t* stage, uint64_t& full) {
        if (!placed_) {
            ptx::tma_load(stage, maps_[0], 0, at_, full, ptx::kEvictNormal);
            at_ += kTileN;
            return;
        }
        ptx::tma_load_chunks(stage, *next_map_[0], next_chunk_[0], full);
        ptx::tma_load_chunks(stage + kTileN / 2 * kBlockBytes, *next_map_[1], next_chunk_[1], full);
        at_ += kWindowChunks;
        aim(kb + 1);
    }

  private:
    // Works out what the load of a block needs, before its stage is free.
    MEGAMOE_DEVICE void aim(uint32_t kb) {
        if (kMostKBlocks > kWordBlocks && kb != 0 && kb % kWordBlocks == 0) bits_ = __ldg(++words_);
        // A is 0, 3, 4, 7 by the first map, and from 9 by the second; B from 1 by the second, and
        // 8, 11, 12, 15 by the first.
        const uint32_t in_b = uint32_t(bits_) & 1;
        bits_ >>= 1;
        next_map_[0] = maps_ + in_b;
        next_map_[1] = maps_ + (in_b ^ 1);
        next_chunk_[0] = at_ + int32_t(in_b);
        next_chunk_[1] = at_ + 9 - int32_t(in_b);
    }

    const bool placed_;
    const TensorMap* const maps_;
    const uint64_t* words_ = nullptr;
    uint64_t bits_ = 0;
    const TensorMap* next_map_[2] = {};
    int32_t next_chunk_[2] = {};
    int32_t at_;  // plain: row of the map; placed: chunk
};

}  // namespace megamoe::moe
