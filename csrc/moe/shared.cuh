// Shared memory of a CTA, and the stream of tasks that its roles walk together.
#pragma once

#include "device/wait.cuh"
#include "moe/params.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kStages = 4;
// One task in the math warps, one being announced, one or two being fed.
inline constexpr uint32_t kTaskSlots = 4;
inline constexpr uint32_t kMathThreads = 256, kMathWarps = 8;
inline constexpr uint32_t kThreads = 384;
inline constexpr uint32_t kMathRegisters = 232, kOtherRegisters = 40;

// Named barriers; 0 is __syncthreads.
inline constexpr int kMathBarrier = 1;

// Rows travel in pieces: large ones, unless tails take the room.
inline constexpr uint32_t kMostPiece = kTailRows ? 1024 : 4096;
inline constexpr uint32_t kPullBuffers = kTailRows ? 6 : 4, kPullJobs = 32;
inline constexpr uint32_t kXRowBytes = kHidden * kElementBytes;
inline constexpr uint32_t kPieces = ceil_div(kXRowBytes, kMostPiece);
inline constexpr uint32_t kPieceBytes = align_up(ceil_div(kXRowBytes, kPieces), 16);
inline constexpr uint32_t kXGroups = kHidden / kGroup;
// Bulk copies are made of 16 bytes; other rows of scales are read word by word.
inline constexpr bool kBulkScales = kFp8 && kXGroups % 4 == 0;
inline constexpr uint32_t kScaleFloats = scale_floats(kHidden) > scale_floats(kInter)
                                             ? scale_floats(kHidden)
                                             : scale_floats(kInter);

// A position in a ring of shared-memory slots.
template <uint32_t kSlots>
struct Cursor {
    uint32_t slot = 0, phase = 0;
    MEGAMOE_DEVICE void advance() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Task {
    TileKind kind;
    uint32_t expert;
    uint32_t first_row;
    uint32_t num_rows;
    uint32_t n;
    uint16_t box;         // activation rows loaded: box_rows(box) >= num_rows
    uint16_t l2_is_free;  // no earlier block of this call had the slot
    L1Slot l1;            // of the block
    L2Slot l2;
};

// A row on its way into the L1 ring.
struct PullJob {
    const uint8_t *x, *x_scale;  // at its source
    uint32_t in_block;
    uint16_t weight;             // what its arrival counts: 1, and the block's padding
    uint16_t is_free;            // no earlier block of this call had the slot
    uint32_t slot, free_target;  // of the ring
};

// What a math warp remembers from task to task. Not in registers, which accumulators fill.
struct MathState {
    Cursor<kTaskSlots> task;
    Cursor<kStages> stage;
    uint32_t rows_phase, amax_turn;
};

struct SharedStorage {
    // Stages. After the last tile, both together, the rings of combine_many.cuh.
    alignas(1024) uint8_t w[kStages][kTileN * kBlockBytes];
    alignas(1024) uint8_t x[kStages][kMaxBlockM * kBlockBytes];
    alignas(128) uint8_t pull[kPullBuffers][align_up(kPieceBytes, 128)];
    alignas(128) float x_scale[kStages][kMaxBlockM];
    alignas(128) float pull_scale[kPullBuffers][align_up(kXGroups, 32)];
    alignas(16) float w_scale[kTaskSlots][kScaleFloats];
    uint64_t row_target[kMaxBlockM];  // where each row of the Linear 2 task goes
    uint32_t amax[3][kFewRows];
    MathState math[kMathWarps];
    uint32_t count[kMaxExperts], begin[kMaxExperts];  // [R][E_l]: rows, position in the route list
    uint16_t order[kMaxExperts];                      // of the routed experts (expert_at)
    // In the order of the walks (expert_at): rows and blocks before the expert; one more at the
    // end.
    uint32_t row_begin[kMaxExperts + kMaxShared + 1], block_begin[kMaxExperts + kMaxShared + 1];
    uint2 scan[2][kThreads / 32];
    Task task[kTaskSlots];
    PullJob job[kPullJobs];
    PlaceWalk::State walk, walk_kept;  // of tickets.cuh
    CallState call;
    uint32_t fills[2];  // stages filled by the weight and by the activation role
    // A stage is full when both its weights and its activations have arrived.
    uint64_t stage_full[kStages], stage_empty[kStages];
    uint64_t task_full[kTaskSlots], task_empty[kTaskSlots];
    uint64_t tile_written[kTaskSlots];
    uint64_t rows_ready;
    uint64_t pull_full[kPullBuffers];
};
static_assert(sizeof(SharedStorage) <= 232448, "a CTA has 227 KB");
// Where the storage starts: behind the 1 KB that the system keeps of every CTA's shared memory.
// Known here, so that wgmma descriptors are constants and take no registers; the kernel checks it.
inline constexpr uint32_t kSharedBase = 1024;
inline constexpr uint32_t kWAddress = kSharedBase;
inline constexpr uint32_t kXAddress = kWAddress + sizeof(SharedStorage::w);

MEGAMOE_DEVICE uint32_t k_blocks(TileKind kind) {
    return kind == TileKind::kLinear1 ? kKBlocks1 : kKBlocks2;
}

}  // namespace megamoe::moe
