// The roles beside math that load no pages: controller and publisher. A warp each; all roles walk
// the same stream of slots. The loaders are in weights.cuh and inputs.cuh.
#pragma once

#include "attention_pre/vm.cuh"

namespace megamoe::attention {

// ---------------------------------------------------------------- controller

// The queue of this CTA, a record ahead. A lane holds one word of the record.
class Queue {
  public:
    // Made before the CTA's barriers are, so that the first record is under way early.
    MEGAMOE_DEVICE explicit Queue(const AttentionParams& p) : p_(p) {
        if (!p.dynamic && threadIdx.x / 32 == kControllerWarp) fetch();
    }
    MEGAMOE_DEVICE void start(uint32_t epoch) {
        epoch_ = epoch;
        if (p_.dynamic) advance();
    }
    MEGAMOE_DEVICE bool empty() const { return place_ >= p_.depth; }
    MEGAMOE_DEVICE uint32_t place() const { return place_; }
    MEGAMOE_DEVICE uint32_t word() const { return word_; }
    MEGAMOE_DEVICE void advance() {
        ++place_;
        if (p_.dynamic) {
            uint32_t ticket = 0;
            if (ptx::lane() == 0)
                ticket = atomicAdd(p_.counters + uint64_t(p_.ticket_counter) * kCounterStride, 1);
            place_ = ticket_place(__shfl_sync(~0u, ticket, 0), p_.depth, gridDim.x, epoch_);
        }
        fetch();
    }

  private:
    MEGAMOE_DEVICE void fetch() {
        if (empty()) return;
        const uint64_t first = p_.dynamic ? 0 : uint64_t(blockIdx.x) * p_.depth;
        word_ = __ldg(reinterpret_cast<const uint32_t*>(p_.instructions + first + place_) +
                      ptx::lane());
    }
    const AttentionParams& p_;
    uint32_t place_ = 0, word_ = 0, epoch_ = 0;
};

// Words of a record, by field.
#define MEGAMOE_WORD(field) (offsetof(Instruction, field) / 4)

// What the loaders and math need from memory beside pages: scales of the task's weight blocks,
// [tile][block]; of scores, the request's length and pages.
MEGAMOE_DEVICE void load_scales(SharedStorage& s, Slot& slot) {
    const Instruction& inst = slot.inst;
    const SpecRow& spec = kSpecRows[inst.spec_id];
    if (spec.loads == Loads::kKeys) {
        namespace slots = operand::index_score;
        const uint64_t* row = s.operands[inst.operand_row];
        const auto* table = reinterpret_cast<const uint32_t*>(row[slots::block_table]) + inst.page;
        const auto* lengths = reinterpret_cast<const uint32_t*>(row[slots::context_lens]);
        const uint32_t lane = ptx::lane(), length = __ldg(lengths + inst.item);
        const uint32_t entry = lane < inst.kv_len / kCacheKeys ? __ldg(table + lane) : 0;
        slot.table[lane] = entry;
        if (lane == 0) slot.length = length;
        return;
    }
    if (spec.loads != Loads::kFp8) return;
    // The same slot in every FP8 opcode: asserted below.
    const auto* scales =
        reinterpret_cast<const float*>(s.operands[inst.operand_row][operand::qkv_a::w_scales]);
    const uint32_t groups = spec.k / kGroup, blocks = spec.blocks;
    for (uint32_t i = ptx::lane(); i < blocks * spec.tiles; i += 32) {
        const uint32_t tile = i / blocks, block = i % blocks;
        slot.w_scale[i] =
            __ldg(scales + spec.weight_row(inst, tile) / kGroup * groups + inst.k / kGroup + block);
    }
}
#define MEGAMOE_SAME_GEMM_SLOTS(op)                                    \
    static_assert(operand::op::a == operand::qkv_a::a &&               \
                  operand::op::a_scales == operand::qkv_a::a_scales && \
                  operand::op::w_scales == operand::qkv_a::w_scales)
MEGAMOE_SAME_GEMM_SLOTS(index_key);
MEGAMOE_SAME_GEMM_SLOTS(index_query);
MEGAMOE_SAME_GEMM_SLOTS(main_query);
MEGAMOE_SAME_GEMM_SLOTS(gemm_swiglu);
MEGAMOE_SAME_GEMM_SLOTS(gemm_store);
#undef MEGAMOE_SAME_GEMM_SLOTS

MEGAMOE_DEVICE void run_controller(const AttentionParams& p, SharedStorage& s, Queue& queue) {
    const uint32_t lane = ptx::lane();
    if (p.dynamic) {
        wait_always(s.operands_ready, 0);
        queue.start(s.epoch);
    }
    uint32_t weight_page = 0, input_page = 0;
    bool ready = false;
    Cursor at;
    while (true) {
        // Padding asks for nothing.
        while (!queue.empty()) {
            const uint32_t word = queue.word();
            const bool idle =
                __shfl_sync(~0u, word, MEGAMOE_WORD(opcode)) == uint32_t(Opcode::kNoOp) &&
                __shfl_sync(~0u, word, MEGAMOE_WORD(wait_event)) == kNoCounter &&
                __shfl_sync(~0u, word, MEGAMOE_WORD(signal_event)) == kNoCounter;
            if (!idle) break;
            queue.advance();
        }
        Slot& slot = s.slot[at.slot];
        wait_always(s.instruction_finished[at.slot], at.phase ^ 1);
        const bool exit = queue.empty() || __any_sync(~0u, stopped(s));
        reinterpret_cast<uint32_t*>(&slot.inst)[lane] =
            exit && lane == MEGAMOE_WORD(opcode) ? kExit : queue.word();
        __syncwarp();
        if (exit) {
            if (lane == 0) ptx::arrive(s.instruction_arrived[at.slot]);
            return;
        }
        const Instruction& inst = slot.inst;
        const bool is_body = inst.opcode != uint32_t(Opcode::kNoOp);
        if (lane == 0) {
            slot.weight_page = weight_page;
            slot.input_page = input_page;
            slot.place = queue.place();
#ifdef MEGAMOE_ATTENTION_TRACE
            slot.stamps =
                p.trace + ((p.dynamic ? 0 : blockIdx.x) * uint64_t(p.depth) + slot.place) *
                              uint32_t(Stamp::kCount);
#endif
            slot.publish = inst.reduce_counter == kNoCounter;
            ptx::arrive(s.instruction_arrived[at.slot]);
        }
        if (is_body) {
            weight_page += kSpecRows[inst.spec_id].weight_pages(inst);
            input_page += kSpecRows[inst.spec_id].input_pages();
        }
        queue.advance();  // in flight while the scales arrive
        if (is_body) {
            if (!ready) wait_always(s.operands_ready, 0);
            ready = true;
            load_scales(s, slot);
        }
        arrive_warp(s.scales_ready[at.slot]);
        at.advance();
    }
}

// ---------------------------------------------------------------- publisher

// Signals what a task's unit has stored, so that math need not wait for its stores to arrive.
MEGAMOE_DEVICE void run_publisher(const AttentionParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane();
    if (lane == 0) {  // what every role needs to know first
        const uint32_t bytes = p.num_operand_rows * sizeof(s.operands[0]);
        ptx::bulk_load(s.operands, p.operands, bytes, s.operands_ready);
        s.epoch = p.epochs[blockIdx.x] + 1;
        ptx::arrive_expect(s.operands_ready, bytes);
    }
    wait_always(s.operands_ready, 0);
    for (Cursor at;; at.advance()) {
        wait_always(s.instruction_arrived[at.slot], at.phase);
        const Slot& slot = s.slot[at.slot];
        if (slot.inst.opcode == kExit) break;
        const uint32_t event = lane < kMaxSignals ? slot.inst.signal_event[lane] : kNoCounter;
        const uint32_t increment = lane < kMaxSignals ? slot.inst.signal_increment[lane] : 0;
        // Not every body waits for these two, but somebody must, or a barrier's phase ends unseen.
        wait_always(s.scales_ready[at.slot], at.phase);
        wait_always(s.inputs_ready[at.slot], at.phase);
        wait_always(s.tile_done[at.slot], at.phase);
        if (event != kNoCounter && slot.publish && !stopped(s))
            ptx::add_release_gpu(counter(p, event), increment);
        if (lane == 0) stamp(p, slot, Stamp::kPublished);
        arrive_warp(s.instruction_finished[at.slot]);
    }
}

}  // namespace megamoe::attention
