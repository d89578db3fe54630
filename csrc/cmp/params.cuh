// What the host hands to one standalone kernel (megamoe/cmp/kernels.py): everything by value, so
// that no CTA waits for a load before its weights are under way.
#pragma once

#include "attention_pre/vm.cuh"

// Which half of a stage the kernel computes.
#define MEGAMOE_CMP_WHOLE 0
#define MEGAMOE_CMP_PARTIAL 1  // a part of a split-K sum, to the workspace
#define MEGAMOE_CMP_FINAL 2    // the sum of the parts, and what follows

// Where the kernel waits for its producers. Later waits than the first cost nothing.
#define MEGAMOE_CMP_WAIT_ENTRY 0     // before anything else
#define MEGAMOE_CMP_WAIT_PROLOGUE 1  // after barriers and descriptors
#define MEGAMOE_CMP_WAIT_LATE 2      // before the first read of what they store

#ifndef MEGAMOE_CMP_PART
#error "MEGAMOE_CMP_PART says which half of the stage to compile: see megamoe/cmp/kernels.py"
#endif
#ifndef MEGAMOE_CMP_WAIT
#define MEGAMOE_CMP_WAIT MEGAMOE_CMP_WAIT_LATE
#endif

namespace megamoe::attention {

// When a CTA lets the kernels that depend on this one be scheduled.
enum class Trigger : uint32_t { kNever, kEntry, kWeights, kInputs, kStored };

// A CTA's task from its place in the launch: x counts parts, y tiles, z blocks of rows. Of scores x
// counts pieces of the keys, y blocks of a request's tokens, z requests.
struct TaskGrid {
    uint32_t band, rows;        // token rows of a block; of the call, or of a request
    uint32_t block_n, columns;  // of a tile, of all tiles; keys of a piece, of a request
    uint32_t pages, fresh;      // of a request in the block table; its first key that may be new
};

struct CmpParams {
    StageMaps maps;
    uint64_t operands[kOperandSlots];
    Instruction task;  // what the stage's tasks have in common
    TaskGrid grid;
    uint32_t num_tokens;
    Trigger trigger;
    const Instruction* table;  // [CTAs] of a launch in x alone, or null: `grid` says it all
    uint64_t* stamps;          // [CTAs][7] ns: see `Stamp`, and the SM as the last. Or null
    uint64_t delay_ns;         // math sleeps so long before its body; for tests
    uint32_t in_flight;        // weight pages that may be on their way at once
};

// Columns of a head, where a task belongs to one.
template <class S>
MEGAMOE_HD constexpr uint32_t head_columns() {
    switch (S::kOpcode) {
        case Opcode::kAbsorbQuery:
            return S::kN;
        case Opcode::kIndexQuery:
            return kGroup;
        case Opcode::kMainQuery:
            return S::kN / S::kHeads;
        default:
            return 0;
    }
}

// In registers, as far as the body looks at it.
template <class S>
MEGAMOE_DEVICE Instruction task_of(const CmpParams& p) {
    Instruction inst = p.task;
    if (p.table) {
        const auto* from = reinterpret_cast<const uint32_t*>(p.table + blockIdx.x);
        auto* to = reinterpret_cast<uint32_t*>(&inst);
#pragma unroll
        for (uint32_t i = 0; i < kInstructionWords; ++i) to[i] = __ldg(from + i);
        return inst;
    }
    const TaskGrid& g = p.grid;
    if constexpr (S::kLoads == Loads::kKeys) {
        const uint32_t kv = blockIdx.x * g.block_n, token = blockIdx.y * g.band;
        inst.row = blockIdx.z * g.rows + token;
        inst.rows = min(g.band, g.rows - token);
        inst.item = blockIdx.z;
        inst.kv = kv;
        inst.kv_len = min(g.block_n, g.columns - kv);
        inst.page = blockIdx.z * g.pages + kv / kCacheKeys;
        inst.aux = g.rows - token;
        if (kv + inst.kv_len > g.fresh) inst.flags |= kHasNewKeys;
        return inst;
    }
    constexpr uint32_t kHead = head_columns<S>();
    const uint32_t column = blockIdx.y * g.block_n;
    inst.row = blockIdx.z * g.band;
    inst.rows = min(g.band, g.rows - inst.row);
    inst.cols = min(g.block_n, g.columns - column);
    inst.col = column;
    inst.k = blockIdx.x * (S::kK / S::kParts);
    inst.part = blockIdx.x;
    if constexpr (kHead > 0) inst.item = column / kHead;
    if constexpr (S::kOpcode == Opcode::kAbsorbQuery) inst.col = column % kHead;
    if constexpr (S::kOpcode == Opcode::kMainQuery)  // a head's last tile is rotated
        if ((column + inst.cols) % kHead == 0) inst.flags |= kHasRope;
    return inst;
}

}  // namespace megamoe::attention
