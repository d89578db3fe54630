// The weight loader: pages of weights and of keys, ahead of the events that their task waits for,
// except keys of the index cache that this very call may write.
#pragma once

#include "attention_pre/loaders.cuh"

namespace megamoe::attention {

// Boxes of a weight page, by what `load` does with each: (byte offset in the page, column, row).
template <class Load>
MEGAMOE_DEVICE void for_boxes(const Instruction& inst, const SpecRow& spec, uint32_t page,
                              const Load& load) {
    const uint32_t block = spec.tiles == 1 ? page : page / spec.tiles;
    const uint32_t tile = spec.tiles == 1 ? 0 : page % spec.tiles;
    const int32_t k = inst.k + block * spec.elements();
    if (spec.loads == Loads::kBf16ByHead) {  // two boxes of 64 columns x 64 of K
        const int32_t row = inst.item * spec.k + k, col = inst.col + tile * kTileRows;
        load(0u, col, row);
        load(kPageBytes / 2, col + 64, row);
    } else {
        load(0u, k, int32_t(spec.weight_row(inst, tile)));
    }
}

// Where shared memory has no room for the next weights, the memory would idle until math frees a
// page. Meanwhile what comes next, of this instruction and those already in slots, is brought to
// L2, page by page with a pause between: requests beyond what the memory delivers would queue up,
// and with them every load and fence of the instruction under way.
class Ahead {
  public:
    MEGAMOE_DEVICE explicit Ahead(const AttentionParams& p) : p_(p), last_(clock()) {}

    // The loader has come to weight page `use`, of the instruction in slot `at`.
    MEGAMOE_DEVICE void here(Cursor at, uint32_t use) {
        now_ = use;
        if (use_ > use) return;
        use_ = use;
        at_ = at;
        left_ = kSlots;
    }
    MEGAMOE_DEVICE void step(SharedStorage& s) {
        if (left_ == 0 || use_ - now_ >= p_.ahead_pages) return;
        if (uint32_t(clock()) - last_ < p_.ahead_cycles) return;
        if (!ptx::test_wait(s.instruction_arrived[at_.slot], at_.phase)) return;
        const Slot& slot = s.slot[at_.slot];
        const Instruction& inst = slot.inst;
        if (inst.opcode == kExit) {
            left_ = 0;
            return;
        }
        const SpecRow& spec = kSpecRows[inst.spec_id];
        const uint32_t page = use_ - slot.weight_page;
        const bool body = inst.opcode != uint32_t(Opcode::kNoOp);
        if (!body || spec.loads == Loads::kKeys || page >= spec.weight_pages(inst)) {
            if (body && spec.loads == Loads::kKeys)
                use_ = slot.weight_page + spec.weight_pages(inst);
            at_.advance();
            --left_;  // slots that may hold later instructions
            return;
        }
        const TensorMap& map = p_.maps[inst.operand_row].weights;
        for_boxes(inst, spec, page,
                  [&](uint32_t, int32_t x, int32_t y) { ptx::prefetch_box(map, x, y); });
        last_ = clock();
        ++use_;
    }

  private:
    MEGAMOE_DEVICE static uint32_t clock() {
        uint32_t t;
        asm volatile("mov.u32 %0, %clock;" : "=r"(t));
        return t;
    }
    const AttentionParams& p_;
    uint32_t last_, use_ = 0, now_ = 0, left_ = 0;
    Cursor at_;
};

// Waits until weight page `use` may be filled: it is free, and few pages are on their way. More
// would not stream faster, but whatever else this SM asks of L2 (inputs, events, partial sums)
// would queue behind them.
template <class Meanwhile>
MEGAMOE_DEVICE bool wait_weight_page(const AttentionParams& p, SharedStorage& s, uint32_t use,
                                     const Meanwhile& meanwhile) {
    if (use >= p.in_flight) {
        const WeightPage landing(use - p.in_flight);
        if (!wait_page(s, s.weight_full[landing.index], landing.phase)) return false;
    }
    const WeightPage page(use);
    uint64_t& free = s.weight_free[page.index];
    while (!ptx::test_wait(free, page.phase ^ 1)) {
        if (stopped(s)) return false;
        meanwhile();
    }
    return wait_page(s, free, page.phase ^ 1);
}

// One lane. Counts the pages it fills.
MEGAMOE_DEVICE void load_matrix(const AttentionParams& p, SharedStorage& s, const Slot& slot,
                                Cursor at, Ahead& ahead, uint32_t& uses) {
    const Instruction& inst = slot.inst;
    const SpecRow& spec = kSpecRows[inst.spec_id];
    const TensorMap& map = p.maps[inst.operand_row].weights;
    const uint32_t pages = spec.weight_pages(inst);
#pragma unroll 1
    for (uint32_t i = 0; i < pages; ++i) {
        const uint32_t use = slot.weight_page + i;
        const WeightPage page(use);
        uint64_t& full = s.weight_full[page.index];
        ahead.here(at, use);
        if (!wait_weight_page(p, s, use, [&] { ahead.step(s); })) return;
        ptx::arrive_expect(full, kPageBytes);
        for_boxes(inst, spec, i, [&](uint32_t offset, int32_t x, int32_t y) {
            ptx::load_box(s.weights[page.index] + offset, map, x, y, full);
        });
        uses = use + 1;
    }
}

// A page of 128 keys is two pages of the cache. Keys that this call may write wait for the events;
// pages past the request's length are not read, since the block table may not name them.
MEGAMOE_DEVICE void load_keys(const AttentionParams& p, SharedStorage& s, const Task& t,
                              uint32_t& uses) {
    namespace slots = operand::index_score;
    const Instruction& inst = t.inst();
    const uint32_t lane = ptx::lane();
    const TensorMap& map = p.maps[inst.operand_row].weights;
    t.wait_scales();  // of the controller: the table, too
    const auto* cache = t.operand<const uint8_t>(slots::cache);
    const auto* table = t.operand<const int32_t>(slots::block_table) + inst.page;
    const uint32_t length = t.slot.length;
    const uint32_t num_pages = inst.kv_len / kCacheKeys;
    bool events = false;
    static_assert(kTableEntries == 32);
    uint32_t entry = 0, later = t.slot.table[lane];
#pragma unroll 1
    for (uint32_t i = 0; i < num_pages; i += 2) {
        if (i % 32 == 0) {
            entry = later;
            later = i + 32 + lane < num_pages ? uint32_t(__ldg(table + i + 32 + lane)) : 0;
        }
        const uint32_t first = inst.kv + i * kCacheKeys;
        const uint32_t count = first >= length ? 0 : first + kCacheKeys >= length ? 1 : 2;
        const bool maybe_new = first + count * kCacheKeys + p.num_tokens > length;
        if (t.has(kHasNewKeys) && count > 0 && maybe_new && !events) {
            t.wait_inputs();
            ptx::fence_proxy_async_global();
            events = true;
        }
        const uint32_t use = t.slot.weight_page + i / 2;
        const WeightPage page(use);
        if (!__all_sync(~0u, wait_weight_page(p, s, use, [] {}))) return;
        load_key_pages(s, page.index, map, cache, entry, i, count);
        uses = use + 1;
    }
}

MEGAMOE_DEVICE void run_weight_loader(const AttentionParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane();
    if (lane < p.num_operand_rows) acquire_map(p.maps[lane].weights);
    __syncwarp();
    uint32_t uses = 0;
    Ahead ahead(p);
    for (Cursor at;; at.advance()) {
        wait_always(s.instruction_arrived[at.slot], at.phase);
        Slot& slot = s.slot[at.slot];
        if (slot.inst.opcode == kExit) break;
        if (lane == 0) stamp(p, slot, Stamp::kVisible);
        if (slot.inst.opcode != uint32_t(Opcode::kNoOp)) {
            const Loads loads = kSpecRows[slot.inst.spec_id].loads;
            if (loads == Loads::kKeys)
                load_keys(p, s, {p, s, slot, at.slot, at.phase}, uses);
            else if (loads != Loads::kNone && lane == 0)
                load_matrix(p, s, slot, at, ahead, uses);
        }
        arrive_warp(s.instruction_finished[at.slot]);
    }
    uses = __shfl_sync(~0u, uses, 0);
    if (stopped(s)) drain(s.weight_full, uses);
}

}  // namespace megamoe::attention
