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

// A CTA's task from its number, (block of rows * tiles + tile) * parts + part.
struct TaskGrid {
    uint32_t parts, tiles;
    uint32_t band, rows;        // token rows of a block, of the call
    uint32_t block_n, columns;  // of a tile, of all tiles together
    uint32_t k_tile;            // columns of a part's reduction
    uint32_t item_columns;      // columns of a head; 0: the stage has none
    uint32_t wrap;              // whether columns count from the head's first
    uint32_t rope_columns;      // a tile that ends at a multiple is rotated; 0: none
};

struct CmpParams {
    StageMaps maps;
    uint64_t operands[kOperandSlots];
    Instruction task;  // what the stage's tasks have in common
    TaskGrid grid;
    uint32_t num_tokens;
    Trigger trigger;
    const Instruction* table;  // [CTAs], or null: `grid` says it all
    uint64_t* stamps;          // [CTAs][7] ns: see `Stamp`, and the SM as the last. Or null
    uint64_t delay_ns;         // math sleeps so long before its body; for tests
    uint32_t in_flight;        // weight pages that may be on their way at once
};

// One warp writes its CTA's task.
MEGAMOE_DEVICE void write_task(const CmpParams& p, Instruction& inst) {
    const uint32_t lane = ptx::lane();
    uint32_t& word = reinterpret_cast<uint32_t*>(&inst)[lane];
    if (p.table) {
        word = __ldg(reinterpret_cast<const uint32_t*>(p.table + blockIdx.x) + lane);
        return;
    }
    word = reinterpret_cast<const uint32_t*>(&p.task)[lane];
    __syncwarp();
    if (lane != 0) return;
    const TaskGrid& g = p.grid;
    const uint32_t part = blockIdx.x % g.parts, rest = blockIdx.x / g.parts;
    const uint32_t tile = rest % g.tiles, row = rest / g.tiles * g.band;
    const uint32_t column = tile * g.block_n, cols = min(g.block_n, g.columns - column);
    inst.row = row;
    inst.rows = min(g.band, g.rows - row);
    inst.col = g.wrap ? column % g.item_columns : column;
    inst.cols = cols;
    inst.k = part * g.k_tile;
    inst.part = part;
    if (g.item_columns) inst.item = column / g.item_columns;
    if (g.rope_columns && (column + cols) % g.rope_columns == 0) inst.flags |= kHasRope;
}

}  // namespace megamoe::attention
