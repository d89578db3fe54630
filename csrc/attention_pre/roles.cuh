// The roles beside math: controller, weight loader, input loader, publisher. One warp each.
//
// All walk the same stream of slots. Weights do not wait for events, except keys of the index cache
// that this very call may write.
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

// ---------------------------------------------------------------- weight loader

// Loads on their way when a role leaves after a stop must land before the CTA ends. `uses` pages
// have been filled, in order.
template <uint32_t kPages>
MEGAMOE_DEVICE void drain(uint64_t (&full)[kPages], uint32_t uses) {
    for (uint32_t use = uses > kPages ? uses - kPages : 0; use < uses; ++use)
        wait_always(full[use % kPages], use / kPages & 1);
}

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
            if (body && spec.loads == Loads::kKeys) use_ = slot.weight_page + spec.weight_pages(inst);
            at_.advance();
            --left_;  // slots that may hold later instructions
            return;
        }
        const TensorMap& map = p_.maps[inst.operand_row].weights;
        for_boxes(inst, spec, page, [&](uint32_t, int32_t x, int32_t y) {
            ptx::prefetch_box(map, x, y);
        });
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
MEGAMOE_DEVICE bool wait_weight_page(const AttentionParams& p, SharedStorage& s, Cursor at,
                                     uint32_t use, const Meanwhile& meanwhile) {
    const bool urgent = ptx::test_wait(s.inputs_ready[at.slot], at.phase);
    const uint32_t in_flight = urgent ? p.in_flight : p.early_in_flight;
    if (use >= in_flight) {
        const WeightPage landing(use - in_flight);
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
        if (!wait_weight_page(p, s, at, use, [&] { ahead.step(s); })) return;
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
        uint64_t& full = s.weight_full[page.index];
        if (!__all_sync(~0u, wait_weight_page(p, s, {t.slot_index, t.phase}, use, [] {}))) return;
        if (lane == 0) {
            if (count > 0)
                ptx::arrive_expect(full, count * kCachePageBytes);
            else
                ptx::arrive(full);
        }
        __syncwarp();
        const uint32_t number = __shfl_sync(~0u, entry, (i + (lane & 1)) % 32);
        if (lane < count) {
            ptx::load_box(s.weights[page.index] + lane * kCacheCodeBytes, map, 0,
                          int32_t(number * (kCachePageBytes / kBlockBytes)), full);
            ptx::bulk_load(s.key_scale[page.index] + lane * kCacheKeys,
                           cache + uint64_t(number) * kCachePageBytes + kCacheCodeBytes,
                           kCacheKeys * 4, full);
        }
        uses = use + 1;
    }
}

// The host may have written the maps since the last run.
MEGAMOE_DEVICE void acquire_map(const TensorMap& map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(&map) : "memory");
    ptx::prefetch_map(map);
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

// ---------------------------------------------------------------- input loader

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
        wait_always(s.tile_done[at.slot], at.phase);
        if (event != kNoCounter && slot.publish && !stopped(s))
            ptx::add_release_gpu(counter(p, event), increment);
        if (lane == 0) stamp(p, slot, Stamp::kPublished);
        arrive_warp(s.instruction_finished[at.slot]);
    }
}

}  // namespace megamoe::attention
