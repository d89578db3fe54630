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
