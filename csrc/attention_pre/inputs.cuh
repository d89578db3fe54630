// The input loader: waits for events, then brings pages of tokens and their scales.
#pragma once

#include "attention_pre/loaders.cuh"

namespace megamoe::attention {

// Notes what was waited for, and stops this CTA; others see `raised`.
MEGAMOE_DEVICE void give_up(const AttentionParams& p, SharedStorage& s, const Slot& slot,
                            uint32_t event, uint32_t want, uint32_t have) {
    atomicExch(&s.stop, 1);
    if (atomicCAS(&p.fault->raised, 0, 1) != 0) return;
    p.fault->worker = blockIdx.x;
    p.fault->place = slot.place;
    p.fault->event = event;
    p.fault->want = want;
    p.fault->have = have;
    p.fault->epoch = s.epoch;
}

// A lane per event. False if this CTA gives up.
MEGAMOE_DEVICE bool wait_events(const AttentionParams& p, SharedStorage& s, const Slot& slot) {
    const uint32_t lane = ptx::lane();
    const uint32_t event = lane < kMaxWaits ? slot.inst.wait_event[lane] : kNoCounter;
    const uint32_t threshold = lane < kMaxWaits ? slot.inst.wait_threshold[lane] : 0;
    const uint32_t* word = counter(p, event == kNoCounter ? 0 : event);
    bool done = event == kNoCounter;
    uint32_t have = 0;
    uint64_t start = 0;
    for (uint32_t spin = 0;; ++spin) {
        if (!done) {
            have = ptx::load_acquire_gpu(word);
            done = event_reached(have, threshold, s.epoch);
        }
        if (__all_sync(~0u, done)) return true;
        if (spin % 64 != 63) continue;
        const uint64_t now = ptx::now_ns();
        if (start == 0) start = now;
        const bool late = now - start > p.timeout_ns;
        if (__any_sync(~0u, late || ptx::load_relaxed_sys(&p.fault->raised) != 0)) {
            const uint32_t first = __ffs(__ballot_sync(~0u, !done)) - 1;
            if (lane == first) give_up(p, s, slot, event, threshold * s.epoch, have);
            __syncwarp();
            return false;
        }
    }
}

// Blocks of K of the task's tokens, `group` of them to a page, each [tokens][128 bytes], FP8 scales
// beside them. Everything that does not depend on the events is worked out before they are waited
// for.
struct InputBlocks {
    const TensorMap* map;
    const float* scales;    // this lane's first; null where there are none
    uint32_t stride;        // floats to the lane's next token
    uint32_t token, block;  // of the lane's first scale in a page
    uint32_t step, last;    // to its next token; tokens that exist
    uint32_t rows, row, blocks, group, use;
    uint32_t column;  // block of the matrix

    MEGAMOE_DEVICE InputBlocks(const AttentionParams& p, const SharedStorage& s, const Slot& slot) {
        namespace slots = operand::qkv_a;
        const Instruction& inst = slot.inst;
        const SpecRow& spec = kSpecRows[inst.spec_id];
        map = &p.maps[inst.operand_row].inputs;
        group = spec.group();
        const uint32_t shift = 31 - __clz(group), groups = spec.k / kGroup;
        blocks = spec.blocks;
        rows = spec.rows;
        row = inst.row;
        last = inst.rows;
        use = slot.input_page;
        column = (inst.k + (spec.loads == Loads::kBf16ByHead ? inst.item * spec.pitch : 0)) /
                 spec.elements();
        token = ptx::lane() >> shift;
        block = ptx::lane() & (group - 1);
        step = 32 >> shift;
        stride = groups * step;
        scales = nullptr;
        if (spec.loads == Loads::kFp8)
            scales = reinterpret_cast<const float*>(s.operands[inst.operand_row][slots::a_scales]) +
                     (row + token) * groups + inst.k / kGroup + block;
    }

    MEGAMOE_DEVICE void load(SharedStorage& s, uint32_t& uses) {
        const uint32_t box = min(group, blocks) * rows * kBlockBytes;
#pragma unroll 1
        for (uint32_t first = 0; first < blocks; first += group, ++use) {
            const InputPage page(use);
            uint64_t& full = s.input_full[page.index];
            if (!__all_sync(~0u, wait_page(s, s.input_free[page.index], page.phase ^ 1))) return;
            if (ptx::lane() == 0) {  // a last box may reach beyond the task's blocks
                ptx::arrive_expect(full, box);
                ptx::load_box(s.inputs[page.index], *map, 0, int32_t(row), int32_t(column + first),
                              full);
            }
            if (scales) {
                const bool mine = block < blocks - first;
                float scale[kTileRows / 32] = {};
#pragma unroll
                for (uint32_t i = 0; i < kTileRows / 32; ++i)  // neighbours share a line
                    if (token + i * step < last && mine)
                        scale[i] = ptx::load_l2(scales + i * stride + first);
#pragma unroll
                for (uint32_t i = 0; i < kTileRows / 32; ++i)
                    s.input_scale[page.index][block * rows + token + i * step] = scale[i];
            }
            arrive_warp(full);
            uses = use + 1;
        }
    }
};

// Queries of scores, and their weights where scales of other inputs are.
MEGAMOE_DEVICE void load_queries(const AttentionParams& p, SharedStorage& s, const Slot& slot,
                                 uint32_t& uses) {
    const Instruction& inst = slot.inst;
    const SpecRow& spec = kSpecRows[inst.spec_id];
    const uint32_t weights = inst.rows * spec.pitch * 4;  // of a query each, FP32
    const InputPage page(slot.input_page);
    uint64_t& full = s.input_full[page.index];
    if (!__all_sync(~0u, wait_page(s, s.input_free[page.index], page.phase ^ 1))) return;
    if (ptx::lane() == 0) {
        ptx::fence_proxy_async();  // scales of other inputs were ordinary stores
        ptx::arrive_expect(full, spec.rows * kBlockBytes + weights);
        ptx::bulk_load(s.input_scale[page.index],
                       reinterpret_cast<const float*>(
                           s.operands[inst.operand_row][operand::index_score::weights]) +
                           inst.row * spec.pitch,
                       weights, full);
        ptx::load_box(s.inputs[page.index], p.maps[inst.operand_row].inputs, 0,
                      int32_t(inst.row * spec.pitch), full);
        ptx::arrive(full);
    }
    uses = slot.input_page + 1;
}

MEGAMOE_DEVICE void run_input_loader(const AttentionParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane();
    if (lane < p.num_operand_rows) acquire_map(p.maps[lane].inputs);
    __syncwarp();
    wait_always(s.operands_ready, 0);
    uint32_t uses = 0;
    for (Cursor at;; at.advance()) {
        wait_always(s.instruction_arrived[at.slot], at.phase);
        const Slot& slot = s.slot[at.slot];
        if (slot.inst.opcode == kExit) break;
        InputBlocks blocks(p, s, slot);
        const bool go = !__any_sync(~0u, stopped(s)) && wait_events(p, s, slot);
        __syncwarp();
        ptx::fence_proxy_async_global();  // what the events announce was stored by ordinary stores
        arrive_warp(s.inputs_ready[at.slot]);
        if (lane == 0) stamp(p, slot, Stamp::kInputsReady);
        if (go && slot.inst.opcode != uint32_t(Opcode::kNoOp)) {
            const Loads loads = kSpecRows[slot.inst.spec_id].loads;
            if (loads == Loads::kKeys)
                load_queries(p, s, slot, uses);
            else if (loads != Loads::kNone)
                blocks.load(s, uses);
        }
        arrive_warp(s.instruction_finished[at.slot]);
    }
    if (stopped(s)) drain(s.input_full, uses);
}

}  // namespace megamoe::attention
