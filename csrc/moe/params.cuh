// What one launch of the MoE kernel is given, and what it is compiled for.
//
// Compiled in: the matrix shape, so that loop counts and divisions are constants. Everything else
// (ranks, experts, rings, capacities) comes with the launch, so that one cubin serves them all.
#pragma once

#include "device/tma.cuh"
#include "megamoe/layout.hpp"
#include "megamoe/protocol.hpp"
#include "megamoe/schedule.hpp"
#include "megamoe/trace.hpp"

#if !defined(MEGAMOE_HIDDEN) || !defined(MEGAMOE_INTER) || !defined(MEGAMOE_FP8) || \
    !defined(MEGAMOE_TAIL_ROWS)
#error "compile by compile_moe of megamoe/backends/cuda_build.py: it defines the matrix shape"
#endif

namespace megamoe::moe {

inline constexpr uint32_t kHidden = MEGAMOE_HIDDEN;
inline constexpr uint32_t kInter = MEGAMOE_INTER;
inline constexpr bool kFp8 = MEGAMOE_FP8;
inline constexpr uint32_t kElementBytes = kFp8 ? 1 : 2;

// A tile is 256 rows of a weight: for Linear 1 the gate and up rows of 128 columns of the
// intermediate, for Linear 2 256 output columns. K is walked in blocks of 128 bytes.
inline constexpr uint32_t kTileN = 256;
inline constexpr uint32_t kBlockBytes = 128;
inline constexpr uint32_t kBlockK = kBlockBytes / kElementBytes;
inline constexpr uint32_t kKBlocks1 = kHidden / kBlockK, kKBlocks2 = kInter / kBlockK;
inline constexpr uint32_t kL1Tiles = kInter / kGroup;
inline constexpr uint32_t kL2Tiles = ceil_div(kHidden, kTileN);
// Two FP32 weight scales per 128 of K; rows of the scale tables are a multiple of 16 bytes.
MEGAMOE_HD constexpr uint32_t scale_floats(uint32_t k) { return align_up(k / kGroup, 2) * 2; }
// MEGAMOE_TAIL_ROWS is 0, or 16 for blocks with tails.
inline constexpr uint32_t kFewRows = 96, kManyRows = 128, kTailRows = MEGAMOE_TAIL_ROWS;
inline constexpr uint32_t kMaxBlockM = kManyRows + kTailRows;
inline constexpr uint32_t kMaxRanks = 72;
inline constexpr uint32_t kMaxSms = 192;
// Routed experts of the group, and with the shared ones of a rank.
inline constexpr uint32_t kMaxExperts = 512, kMaxShared = 8;

// Token counts for which a tensor map exists: rows of an activation box.
inline constexpr uint32_t kNumBoxes = 9;
MEGAMOE_HD constexpr uint32_t box_rows(uint32_t i) {
    return i == 0 ? 8 : i < 7 ? i * 16 : i == 7 ? 128 : 144;  // 8 16 32 48 64 80 96 128 144
}

struct MoEParams {
    // Of Linear 1 and 2, tiles of all local experts (weights.cuh): plain, as [rows][128 bytes], by
    // the first map alone; placed, two of chunks.
    TensorMap w[2][2];
    TensorMap x[kNumBoxes], h[kNumBoxes];  // L1 and L2 ring, one map per box height
    MoEShape shape;
    WindowLayout layout;
    uint32_t rank;
    uint32_t num_tokens;
    uint64_t timeout_ns;
    const int32_t* topk_idx;    // [T, K], -1 masked
    const float* topk_weight;   // [T, K]
    const float* w1_scale;      // [experts, kL1Tiles, scale_floats(H)]: gate, up
    const float* w2_scale;      // [experts, kL2Tiles, scale_floats(I)]: rows 0..127, 128..255
    const uint64_t* placed[2];  // or null: plain. [experts, tiles, words]: a bit for a block of K
    uint8_t* y;                 // [T] BF16 rows
    float swiglu_clamp;         // infinity: none
    uint32_t stage_is_bf16;
    const void* stage_x;        // the call's rows, or null: they are in the window
    const float* stage_scale;   // FP32 [T, H/128] with e4m3 rows
    const TraceBuffers* trace;  // or null; looked at by traced builds only
    uint32_t num_streams;       // of tickets (tickets.cuh), and for two, which SMs have the second
    uint32_t near_half[kMaxSms / 32];
    uint8_t* bases[kMaxRanks];  // windows, as mapped here

    MEGAMOE_DEVICE uint8_t* at(uint32_t peer, Region r, uint64_t element = 0) const {
        return bases[peer] + layout[r].offset + element * layout[r].stride;
    }
    template <class T>
    MEGAMOE_DEVICE T* ptr(uint32_t peer, Region r, uint64_t element = 0) const {
        return reinterpret_cast<T*>(at(peer, r, element));
    }
    MEGAMOE_DEVICE uint32_t* word(Region r, uint64_t element = 0) const {
        return ptr<uint32_t>(rank, r, element);
    }
    MEGAMOE_DEVICE Control& control(uint32_t peer) const {
        return *ptr<Control>(peer, Region::kControl);
    }
    MEGAMOE_DEVICE uint32_t* recv_count(uint32_t owner, uint32_t parity, uint32_t source) const {
        const uint64_t first =
            (uint64_t(parity) * shape.num_ranks + source) * shape.local_experts();
        return ptr<uint32_t>(owner, Region::kRecvCount, first);
    }
    MEGAMOE_DEVICE uint32_t* route(uint32_t owner, uint32_t parity, uint32_t source) const {
        const uint64_t first = (uint64_t(parity) * shape.num_ranks + source) * shape.max_routes();
        return ptr<uint32_t>(owner, Region::kRoute, first);
    }
};
static_assert(sizeof(MoEParams) <= 4096, "kernel parameters have 4 KB");

}  // namespace megamoe::moe
