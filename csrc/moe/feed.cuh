// Feed: the two roles that fill stages. One takes tickets, posts tasks and loads weights, which
// wait for nothing; the other loads activations once the rings have them. So weights are on their
// way before any wait.
#pragma once

#include "moe/dispatch.cuh"
#include "moe/phased.cuh"

namespace megamoe::moe {

// Stages before a task's last one at which the next ticket is taken: 2 to 3 us. Late, so that
// neighbouring tickets start together wherever they are taken: tiles that share weights then find
// them in L2.
inline constexpr uint32_t kTicketAhead = 2;
// The same where no tiles share weights. There its tile becomes a task, and is looked at for its
// inputs, before the stages of the task before it run dry.
inline constexpr uint32_t kEarlyTicketAhead = 4, kEarlyPostAhead = 2;
MEGAMOE_DEVICE bool posts_early(const MoEParams& p) { return p.shape.wave_blocks == 1; }

MEGAMOE_DEVICE uint32_t box_for(uint32_t rows) {
    // Above kFewRows the many-row path takes over, with a box of 128, and above those one with a
    // tail.
    return rows <= 8 ? 0 : rows <= kFewRows ? ceil_div(rows, 16) : rows <= kManyRows ? 7 : 8;
}

MEGAMOE_DEVICE bool wait_stage(SharedStorage& s, const Cursor<kStages>& at, TraceSlot slot) {
    TraceSpan span(s.call.trace, slot);
    return wait(s.stage_empty[at.slot], at.phase, s.call) && !stopped(s.call);
}

// Tiles of tickets. With waves of one block they are worked out, not walked to: a walk passes every
// expert, active or not, which takes microseconds to a first tile.
class Tiles {
  public:
    MEGAMOE_DEVICE Tiles(const MoEParams& p, SharedStorage& s)
        : p_(p), s_(s), walk_(p.shape, s.block_begin, kL1Tiles, kL2Tiles, s.walk) {
        if (walks()) walk_.start();
    }
    // Tickets must not decrease.
    MEGAMOE_DEVICE Tile seek(uint32_t ticket) {
        const Place at = walks() ? walk_.seek(ticket) : find(ticket);
        if (at.kind == TileKind::kDone) return {TileKind::kDone, 0, 0, 0, 0, 0};
        const uint32_t expert = expert_at(p_, at.expert);
        const uint32_t block = at.block - s_.block_begin[at.expert];
        const ExpertBlocks blocks(p_.shape, s_.rows[expert]);
        return {at.kind, expert, at.block, blocks.begin(block), blocks.size(block), at.n};
    }

  private:
    MEGAMOE_DEVICE bool walks() const { return p_.shape.wave_blocks > 1; }
    MEGAMOE_DEVICE Place find(uint32_t ticket) const {
        Place at = place_of_ticket(ticket, s_.call.num_blocks, linear1_ahead(p_.shape), kL1Tiles,
                                   kL2Tiles);
        if (at.kind != TileKind::kDone) at.expert = expert_of(p_, s_.block_begin, at.block);
        return at;
    }

    const MoEParams& p_;
    SharedStorage& s_;
    PlaceWalk walk_;
};

// Counts tiles of weights through all experts of a matrix.
MEGAMOE_DEVICE uint64_t weight_tile(const Tile& tile) {
    const bool linear1 = tile.kind == TileKind::kLinear1;
    return uint64_t(tile.expert) * (linear1 ? kL1Tiles : kL2Tiles) + tile.n;
}

// Makes a tile the next task; false if the stream of tasks ends instead: there is none, or the call
// has been given up. One thread.
MEGAMOE_DEVICE bool post(const MoEParams& p, SharedStorage& s, const Tile& tile,
                         Cursor<kTaskSlots>& slot) {
    // Always comes: whatever happens, the roles finish the tasks they have.
    while (!ptx::try_wait(s.task_empty[slot.slot], slot.phase)) {
    }
    Task& task = s.task[slot.slot];
    uint64_t& full = s.task_full[slot.slot];
    if (tile.kind == TileKind::kDone || stopped(s.call)) {
        task.kind = TileKind::kDone;
        ptx::arrive(full);
        return false;
    }
    task.kind = tile.kind;
    task.expert = tile.expert;
    task.first_row = tile.first_row;
    task.num_rows = tile.num_rows;
    task.n = tile.n;
    task.box = box_for(tile.num_rows);
    task.l1 = l1_slot_of(p, s.call, tile.block);
    task.l2 = l2_slot_of(p, s.call, tile.block);
    task.l2_is_free = tile.block < p.shape.ring_l2;
    s.call.trace.note_task(slot.slot, tile.block);
    ptx::arrive(full);
    slot.advance();
    return true;
}

// One thread.
MEGAMOE_DEVICE void feed_weights(const MoEParams& p, SharedStorage& s) {
    ptx::prefetch_map(p.w1);
    ptx::prefetch_map(p.w2);
    Tiles tiles(p, s);
    uint32_t* tickets = &p.control(p.rank).ticket.value;
    const uint32_t ticket_ahead = posts_early(p) ? kEarlyTicketAhead : kTicketAhead;
    const uint32_t post_ahead = posts_early(p) ? kEarlyPostAhead : 0;
    Cursor<kStages> at;
    Cursor<kTaskSlots> slot;
    at.phase = slot.phase = 1;  // free at first
    uint32_t fills = 0;
    // The first ticket is dealt, and its weights wait for no answer.
    Tile tile = tiles.seek(blockIdx.x);
    bool more = post(p, s, tile, slot);
    while (more) {
        const bool linear1 = tile.kind == TileKind::kLinear1;
        const TensorMap& map = linear1 ? p.w1 : p.w2;
        const uint32_t floats = linear1 ? scale_floats(kHidden) : scale_floats(kInter);
        const float* scales = (linear1 ? p.w1_scale : p.w2_scale) + weight_tile(tile) * floats;
        const uint32_t num_blocks = k_blocks(tile.kind);
        const uint32_t take_at = min(ticket_ahead, num_blocks - 1);
        const uint32_t post_at = min(post_ahead, num_blocks - 1);
        int32_t y = int32_t(weight_tile(tile) * num_blocks * kTileN);
        uint32_t ticket = 0;
#pragma unroll 1
        for (uint32_t left = num_blocks; left-- > 0; y += kTileN) {
            if (!wait_stage(s, at, kTraceStageW)) {  // stopped: the stream ends
                if (left >= post_at) more = post(p, s, tile, slot);
                break;
            }
            if (left == take_at) ticket = gridDim.x + atomicAdd(tickets, 1);
            // The scales of the whole tile come with the first stage, not with the task, which
            // activations wait for.
            const uint32_t scale_bytes = kFp8 && left + 1 == num_blocks ? floats * 4 : 0;
            ptx::arrive_expect(s.stage_full[at.slot], kTileN * kBlockBytes + scale_bytes);
            ptx::tma_load(s.w[at.slot], map, 0, y, s.stage_full[at.slot], ptx::kEvictNormal);
            if (scale_bytes)
                ptx::bulk_load(s.w_scale[(slot.slot + kTaskSlots - 1) % kTaskSlots], scales,
                               scale_bytes, s.stage_full[at.slot]);
            ++fills;
            at.advance();
            if (left != post_at) continue;
            tile = tiles.seek(ticket);
            more = post(p, s, tile, slot);
        }
    }
    s.fills[0] = fills;
}

// Whether words say that a task's inputs are in the rings, and its output's slot is free.
// Hand-offs 4, 6 and 7.
class Inputs {
  public:
    MEGAMOE_DEVICE Inputs(const MoEParams& p, SharedStorage& s, const Task& task)
        : p_(p), s_(s), task_(task), linear1_(task.kind == TileKind::kLinear1) {}

    // One look.
    MEGAMOE_DEVICE bool there() const {
        if (!reached(ptx::load_acquire_gpu(full()), full_target())) return false;
        return !waits_for_l2() || reached(ptx::load_acquire_gpu(l2_empty()), task_.l2.free_target);
    }
    // False when the call is given up.
    MEGAMOE_DEVICE bool wait() const {
        const Phase phase = linear1_ ? Phase::kLinear1 : Phase::kLinear2;
        return wait_word<Compare::kReached, Scope::kGpu>(
                   p_, s_.call, full(), full_target(),
                   {Role::kMath, phase, linear1_ ? Tag::kL1Full : Tag::kL2Full, blockIdx.x, p_.rank,
                    ring_slot()}) &&
               (!waits_for_l2() ||
                wait_word<Compare::kReached, Scope::kGpu>(
                    p_, s_.call, l2_empty(), task_.l2.free_target,
                    {Role::kMath, phase, Tag::kL2Empty, blockIdx.x, p_.rank, task_.l2.slot}));
    }
    // Of the ring that the task reads.
    MEGAMOE_DEVICE uint32_t ring_slot() const { return linear1_ ? task_.l1.slot : task_.l2.slot; }

  private:
    MEGAMOE_DEVICE const uint32_t* full() const {
        return p_.word(linear1_ ? Region::kL1Full : Region::kL2Full, ring_slot());
    }
    MEGAMOE_DEVICE uint32_t full_target() const {
        return linear1_ ? task_.l1.ready_target : task_.l2.ready_target;
    }
    MEGAMOE_DEVICE bool waits_for_l2() const { return linear1_ && !task_.l2_is_free; }
    MEGAMOE_DEVICE const uint32_t* l2_empty() const {
        return p_.word(Region::kL2Empty, task_.l2.slot);
    }

    const MoEParams& p_;
    SharedStorage& s_;
    const Task& task_;
    bool linear1_;
};

// One thread.
MEGAMOE_DEVICE void feed_activations(const MoEParams& p, SharedStorage& s) {
    Cursor<kStages> at;
    Cursor<kTaskSlots> slot;
    at.phase = 1;
    uint32_t fills = 0;
    bool ok = true, there = false;  // nobody gave up; a look has found the next task's inputs
    Phase begun = Phase::kExchange;
    while (true) {
        while (!ptx::try_wait(s.task_full[slot.slot], slot.phase)) {
        }
        const Task task = s.task[slot.slot];
        ptx::arrive(s.task_empty[slot.slot]);
        slot.advance();
        if (task.kind == TileKind::kDone) break;
        const bool linear1 = task.kind == TileKind::kLinear1;
        const Phase phase = linear1 ? Phase::kLinear1 : Phase::kLinear2;
        if (kPhased && phase != begun) {
            begun = phase;
            ok = ok && wait_all_blocks(p, s, linear1 ? Phase::kPull : Phase::kLinear1);
        }
        const Inputs inputs(p, s, task);
        ok = ok && (there || inputs.wait());
        there = false;
        if (!ok) continue;  // keep consuming tasks: their stream must end for every role
        if (fills == 0) s.call.trace.stamp(kTraceFirstStage);
        ptx::fence_proxy_async();
        const uint32_t rows = box_rows(task.box), block_m = p.shape.block_m;
        const TensorMap& map = linear1 ? p.x[task.box] : p.h[task.box];
        const uint32_t num_blocks = k_blocks(task.kind), groups = num_blocks / (kFp8 ? 1 : 2);
        const float* scale = p.ptr<float>(p.rank, linear1 ? Region::kL1Scale : Region::kL2Scale) +
                             uint64_t(inputs.ring_slot()) * groups * block_m;
#pragma unroll 1
        for (uint32_t kb = 0; kb < num_blocks; ++kb) {
            if (posts_early(p) && kb + 1 == num_blocks &&
                ptx::test_wait(s.task_full[slot.slot], slot.phase)) {
                const Task& next = s.task[slot.slot];
                there = next.kind != TileKind::kDone && Inputs(p, s, next).there();
            }
            if (!wait_stage(s, at, kTraceStageX)) {
                ok = false;
                break;
            }
            ptx::arrive_expect(s.stage_full[at.slot], rows * (kBlockBytes + (kFp8 ? 4 : 0)));
            ptx::tma_load(s.x[at.slot], map, int32_t(kb * kBlockK),
                          int32_t(inputs.ring_slot() * block_m), s.stage_full[at.slot],
                          ptx::kEvictLast);
            if constexpr (kFp8)
                ptx::bulk_load(s.x_scale[at.slot], scale + kb * block_m, rows * 4,
                               s.stage_full[at.slot]);
            ++fills;
            at.advance();
        }
    }
    s.fills[1] = fills;
}

// After a give-up, when all roles have left: waits for copies that are still on their way into this
// CTA's shared memory. The role that filled fewer stages makes up for its missing arrivals.
MEGAMOE_DEVICE void drain_stages(SharedStorage& s) {
    const uint32_t few = min(s.fills[0], s.fills[1]), many = max(s.fills[0], s.fills[1]);
    for (uint32_t i = few; i < many; ++i) ptx::arrive(s.stage_full[i % kStages]);
    for (uint32_t i = many > kStages ? many - kStages : 0; i < many; ++i) {
        while (!ptx::try_wait(s.stage_full[i % kStages], i / kStages & 1)) {
        }
    }
}

}  // namespace megamoe::moe
