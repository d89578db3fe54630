// The weight loader: pages of weights and of keys, ahead of the events that their task waits for,
// except keys of the index cache that this very call may write.
//
// One thread issues every page, so what it does per page bounds how fast pages come: everything
// that a task fixes is in registers before its first page, and barriers are known by address.
#pragma once

#include "attention_pre/loaders.cuh"

namespace megamoe::attention {

// Where the boxes of a task's weight pages lie in its matrix.
struct WeightBoxes {
    const TensorMap* map;
    int32_t x, y, block_x, block_y, tile_x, tile_y;  // of page 0; steps to the next block, tile
    uint32_t tiles, pages;                           // tiles: 1 or 2
    bool halves;                                     // two boxes of 64 columns by 64 of K

    MEGAMOE_DEVICE WeightBoxes(const AttentionParams& p, const Instruction& inst) {
        const SpecRow& spec = kSpecRows[inst.spec_id];
        map = &p.maps[inst.operand_row].weights;
        tiles = spec.tiles;
        pages = spec.blocks * tiles;
        halves = spec.loads == Loads::kBf16ByHead;
        const int32_t elements = spec.elements();
        x = halves ? inst.col : inst.k;
        y = halves ? inst.item * spec.k + inst.k : inst.col;
        block_x = halves ? 0 : elements;
        block_y = halves ? elements : 0;
        tile_x = halves ? kTileRows : 0;
        tile_y = halves ? 0 : spec.weight_row(inst, 1) - inst.col;
    }
    // By what `load` does with each box of a page: (byte offset in the page, column, row).
    template <class Load>
    MEGAMOE_DEVICE void page(uint32_t i, const Load& load) const {
        const int32_t block = i >> (tiles - 1), tile = i & (tiles - 1);
        const int32_t column = x + block * block_x + tile * tile_x;
        const int32_t row = y + block * block_y + tile * tile_y;
        for (int32_t half = 0; half <= int32_t(halves); ++half)
            load(half * (kPageBytes / 2), column + half * 64, row);
    }
};

// Where shared memory has no room for the next weights, the memory would idle until math frees a
// page. Meanwhile what comes next, of this instruction and those already in slots, is brought to
// L2, page by page with a pause between: requests beyond what the memory delivers would queue up,
// and with them every load and fence of the instruction under way.
class Ahead {
  public:
    MEGAMOE_DEVICE explicit Ahead(const AttentionParams& p) : p_(p), last_(clock()) {}

    // The loader has come to weight page `use`, of the instruction in slot `at`, and waits.
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
        const WeightBoxes boxes(p_, inst);
        boxes.page(page,
                   [&](uint32_t, int32_t x, int32_t y) { ptx::prefetch_box(*boxes.map, x, y); });
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

// An address the compiler does not work out again.
MEGAMOE_DEVICE uint32_t kept_address(const void* p) {
    uint32_t address = ptx::shared_address(p);
    asm volatile("" : "+r"(address));
    return address;
}

// The pool of weight pages as its loader sees it: the next page to fill, and the page that must
// have landed before. More on their way would not stream faster, but whatever else this SM asks of
// L2 (inputs, events, partial sums) would queue behind them.
class WeightPool {
  public:
    MEGAMOE_DEVICE WeightPool(const AttentionParams& p, SharedStorage& s)
        : s_(s),
          full_(kept_address(s.weight_full)),
          free_(kept_address(s.weight_free)),
          pages_(kept_address(s.weights)),
          in_flight_(p.in_flight) {}

    // A task whose first page is use `use` of the pool.
    MEGAMOE_DEVICE void begin(uint32_t use) {
        uses_ = use;
        page_ = WeightPage(use);
        may_start_ = use < in_flight_ ? in_flight_ - use : 0;
        landing_ = WeightPage(use + may_start_ - in_flight_);
    }

    // Waits until the next page may be filled. False after a stop.
    template <class Meanwhile>
    MEGAMOE_DEVICE bool wait(const Meanwhile& meanwhile) {
        if (may_start_ == 0) {
            while (!ptx::test_wait(full_ + landing_.index * 8, landing_.phase))
                if (stopped(s_)) return false;
            landing_.advance();
        } else {
            --may_start_;
        }
        while (!ptx::test_wait(free_ + page_.index * 8, page_.phase ^ 1)) {
            if (stopped(s_)) return false;
            meanwhile();
        }
        return !stopped(s_);
    }
    MEGAMOE_DEVICE void expect() const { ptx::arrive_expect(full(), kPageBytes); }
    MEGAMOE_DEVICE void load(const TensorMap* map, uint32_t offset, int32_t x, int32_t y) const {
        ptx::load_box(pages_ + page_.index * kPageBytes + offset, map, x, y, full());
    }
    MEGAMOE_DEVICE void advance() {
        page_.advance();
        ++uses_;
    }
    MEGAMOE_DEVICE uint32_t index() const { return page_.index; }
    MEGAMOE_DEVICE uint32_t uses() const { return uses_; }

  private:
    MEGAMOE_DEVICE uint32_t full() const { return full_ + page_.index * 8; }
    SharedStorage& s_;
    uint32_t full_, free_, pages_, in_flight_;
    WeightPage page_{0}, landing_{0};
    uint32_t may_start_ = 0, uses_ = 0;
};

// The first stage's bodies load no pages, and every other CTA waits for them: of the weights behind
// them only so many pages come before they are done, since their loads and stores would queue
// behind more.
inline constexpr uint32_t kBeforeFirst = 4;

// One lane. `behind` says that the task before, in slot `first`, is not to be held up.
MEGAMOE_DEVICE void load_matrix(const AttentionParams& p, SharedStorage& s, WeightPool& pool,
                                Cursor at, Ahead& ahead, bool behind, Cursor first) {
    const WeightBoxes boxes(p, s.slot[at.slot].inst);
    pool.begin(s.slot[at.slot].weight_page);
#pragma unroll 1
    for (uint32_t i = 0; i < boxes.pages; ++i) {
        if (behind && i == kBeforeFirst) wait_always(s.tile_done[first.slot], first.phase);
        bool waits = false;
        const bool go = pool.wait([&] {
            if (!waits) ahead.here(at, pool.uses());
            waits = true;
            ahead.step(s);
        });
        if (!go) return;
        pool.expect();
        boxes.page(
            i, [&](uint32_t offset, int32_t x, int32_t y) { pool.load(boxes.map, offset, x, y); });
        pool.advance();
    }
}

// A page of 128 keys is two pages of the cache. Keys that this call may write wait for the events;
// pages past the request's length are not read, since the block table may not name them.
MEGAMOE_DEVICE void load_keys(const AttentionParams& p, SharedStorage& s, WeightPool& pool,
                              const Task& t) {
    namespace slots = operand::index_score;
    const Instruction& inst = t.inst();
    const uint32_t lane = ptx::lane();
    const TensorMap& map = p.maps[inst.operand_row].weights;
    t.wait_scales();  // of the controller: the table, too
    const auto* cache = t.operand<const uint8_t>(slots::cache);
    const auto* table = t.operand<const int32_t>(slots::block_table) + inst.page;
    const uint32_t length = t.slot.length, kv = inst.kv;
    const uint32_t num_pages = inst.kv_len / kCacheKeys;
    bool fresh = t.has(kHasNewKeys);  // events not waited for
    static_assert(kTableEntries == 32);
    pool.begin(t.slot.weight_page);
    uint32_t entry = 0, later = t.slot.table[lane];
#pragma unroll 1
    for (uint32_t i = 0; i < num_pages; i += 2) {
        if (i % 32 == 0) {
            entry = later;
            later = i + 32 + lane < num_pages ? uint32_t(__ldg(table + i + 32 + lane)) : 0;
        }
        const uint32_t first = kv + i * kCacheKeys;
        const uint32_t count = first >= length ? 0 : first + kCacheKeys >= length ? 1 : 2;
        const bool maybe_new = first + count * kCacheKeys + p.num_tokens > length;
        if (fresh && count > 0 && maybe_new) {
            t.wait_inputs();
            ptx::fence_proxy_async_global();
            fresh = false;
        }
        if (!__all_sync(~0u, pool.wait([] {}))) return;
        load_key_pages(s, pool.index(), map, cache, entry, i, count);
        pool.advance();
    }
}

MEGAMOE_DEVICE void run_weight_loader(const AttentionParams& p, SharedStorage& s) {
    const uint32_t lane = ptx::lane();
    if (lane < p.num_operand_rows) acquire_map(p.maps[lane].weights);
    __syncwarp();
    WeightPool pool(p, s);
    Ahead ahead(p);
    bool behind_first = false;
    Cursor before;
    for (Cursor at;; at.advance()) {
        wait_always(s.instruction_arrived[at.slot], at.phase);
        Slot& slot = s.slot[at.slot];
        if (slot.inst.opcode == kExit) break;
        if (lane == 0) stamp(p, slot, Stamp::kVisible);
        if (slot.inst.opcode != uint32_t(Opcode::kNoOp)) {
            const Loads loads = kSpecRows[slot.inst.spec_id].loads;
            if (loads == Loads::kKeys)
                load_keys(p, s, pool, {p, s, slot, at.slot, at.phase});
            else if (loads != Loads::kNone && lane == 0)
                load_matrix(p, s, pool, at, ahead, behind_first, before);
            behind_first = slot.place == 0 && loads == Loads::kNone;
            before = at;
        }
        arrive_warp(s.instruction_finished[at.slot]);
    }
    if (stopped(s)) drain(s.weight_full, __shfl_sync(~0u, pool.uses(), 0));
}

}  // namespace megamoe::attention
