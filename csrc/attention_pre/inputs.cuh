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

// Blocks of K of the task's tokens, `group` of them to a page, each [tokens][128 bytes]; FP8 scales
// beside them.
MEGAMOE_DEVICE void load_input_blocks(const AttentionParams& p, SharedStorage& s, const Slot& slot,
                                      uint32_t& uses) {
    namespace slots = operand::qkv_a;
    const Instruction& inst = slot.inst;
    const SpecRow& spec = kSpecRows[inst.spec_id];
    const uint32_t lane = ptx::lane(), group = spec.group(), shift = 31 - __clz(group);
    const TensorMap& map = p.maps[inst.operand_row].inputs;
    const bool fp8 = spec.loads == Loads::kFp8;
    const auto* scales =
        reinterpret_cast<const float*>(s.operands[inst.operand_row][slots::a_scales]);
    const uint32_t first_column =
        inst.k + (spec.loads == Loads::kBf16ByHead ? inst.item * spec.pitch : 0);
#pragma unroll 1
    for (uint32_t first = 0, use = slot.input_page; first < spec.blocks; first += group, ++use) {
        const InputPage page(use);
        uint64_t& full = s.input_full[page.index];
        const uint32_t count = min(group, spec.blocks - first);
        if (!__all_sync(~0u, wait_page(s, s.input_free[page.index], page.phase ^ 1))) return;
        // Scales are asked for first: a box takes as long as they do.
        float scale[kTileRows / 32] = {};
        if (fp8) {
#pragma unroll
            for (uint32_t i = 0; i < kTileRows / 32; ++i) {  // neighbours share a line
                const uint32_t token = (i * 32 + lane) >> shift;
                const uint32_t block = (i * 32 + lane) & (group - 1);
                if (token < inst.rows && block < count)
                    scale[i] = ptx::load_l2(scales + (inst.row + token) * (spec.k / kGroup) +
                                            inst.k / kGroup + first + block);
            }
        }
        if (lane == 0) ptx::arrive_expect(full, count * spec.rows * kBlockBytes);
        __syncwarp();
        if (lane < count)
            ptx::load_box(s.inputs[page.index] + lane * spec.rows * kBlockBytes, map,
                          int32_t(first_column + (first + lane) * spec.elements()),
                          int32_t(inst.row), full);
        if (fp8) {
#pragma unroll
            for (uint32_t i = 0; i < kTileRows / 32; ++i) {
                const uint32_t token = (i * 32 + lane) >> shift;
                const uint32_t block = (i * 32 + lane) & (group - 1);
                s.input_scale[page.index][block * spec.rows + token] = scale[i];
            }
        }
        arrive_warp(full);
        uses = use + 1;
    }
}

MEGAMOE_DEVICE void load_queries(const AttentionParams& p, SharedStorage& s, const Slot& slot,
                                 uint32_t& uses) {
    const Instruction& inst = slot.inst;
    const SpecRow& spec = kSpecRows[inst.spec_id];
    const InputPage page(slot.input_page);
    uint64_t& full = s.input_full[page.index];
    if (!__all_sync(~0u, wait_page(s, s.input_free[page.index], page.phase ^ 1))) return;
    if (ptx::lane() == 0) {
        ptx::arrive_expect(full, spec.rows * kBlockBytes);
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
                load_input_blocks(p, s, slot, uses);
        }
        arrive_warp(s.instruction_finished[at.slot]);
    }
    if (stopped(s)) drain(s.input_full, uses);
}

}  // namespace megamoe::attention
