// Rings, epochs, barriers: what each counter means, and which wait each access needs.
//
// Two kinds of words, and no global clear between calls:
//   flag     holds the epoch it was last raised in. A waiter of call e accepts e or later: a peer
//            that needs nothing more from this rank goes on to e + 1 while some role here has yet
//            to look. It can't be two ahead: finishing e + 1 takes this rank's flag of e + 1.
//            On a GPU every CTA raises a peer's flag by its share (flag_share), and an epoch is a
//            whole flag, so that no CTA waits to learn that it is the last.
//   counter  grows for the life of the session, by increments that do not depend on the call's data
//            (rings, grid barrier): a wait compares with a target that the waiter computes.
// Both may wrap; `reached` compares modulo 2^32.
// token_arrived is neither: its increments vary with the routes. The rank that owns the token
// resets it after reading, before its own next arrival at the count exchange, and peers add to it
// only after they have seen that arrival.
//
// Ring positions. The blocks of all calls form one endless sequence q = block_base + block; block q
// uses slot q % B for the q / B-th time. With u = q / B ("turn"):
//   l1_full[slot]   += rows pulled, the block's padding counted with its last row
//                      ready when reached (u + 1) * block_m
//   l1_empty[slot]  += 1 per finished Linear 1 tile of the block
//                      free for q when reached u * l1_tiles
//   l2_full[slot]   += 1 per finished Linear 1 tile;   ready when reached (u + 1) * l1_tiles
//   l2_empty[slot]  += 1 per finished Linear 2 tile;   free for q when reached u * l2_tiles
// The unit that brings l2_empty to (u + 1) * l2_tiles has seen every tile of the block finished
// (the additions are acquire-release), so it adds 1 to token_arrived of every row's source token.
//
// Hand-offs, and what orders them. "CPU" is the C++ memory model; the GPU kernel cites this table.
// clang-format off
//   #  data                 written by           read by              ordered by
//   1  unit_count           count, each unit     count, every unit    grid barrier (acq-rel add)
//   2  routes, recv_count   count, each unit     every peer's roles   grid barrier, then counts_flag
//                                                                     release (system) / acquire;
//                                                                     GPU: counts_flag alone, which
//                                                                     each CTA adds to with release
//   3  x, scales in input   staging: before the  peers' dispatch      as 2
//                           call; on a GPU each
//                           CTA, first of all
//   4  L1 ring rows         dispatch             linear1, all units   l1_full release / acquire
//                                                                     GPU: generic writes, bulk
//                                                                     reads: the reader fences the
//                                                                     async proxy
//   5  L1 slot reuse        linear1 (reads)      dispatch (writes)    l1_empty release / acquire
//   6  L2 ring rows         linear1              linear2, all units   l2_full release / acquire;
//                                                                     proxy as 4
//   7  L2 slot reuse        linear2 (reads)      linear1 (writes)     l2_empty release / acquire;
//                                                                     GPU: 5 and 7 need no look for
//                                                                     a ring's first turn in a call:
//                                                                     the last call's kernel is over
//   8  combine rows         linear2, all units   combine on source    l2_empty acq-rel chain, then
//                                                                     token_arrived release
//                                                                     (system) / acquire; GPU, many
//                                                                     tokens: proxy as 4
//   9  combine slot reuse   combine (reads)      peers' linear2 of    exit of the call, then
//                                                the next call        counts_flag of the next call
//  10  routes, recv_count   readers of call e    writers of call      two copies by epoch parity:
//      reuse                                     e + 2                a rank finishes e + 1 only
//                                                                     after every peer's flag of
//                                                                     e + 1, raised after e ended
// clang-format on
#pragma once

#include "megamoe/config.hpp"
#include "megamoe/layout.hpp"
#include "megamoe/shape.hpp"

namespace megamoe {

// `have` has come as far as `want`, for counters that may wrap.
MEGAMOE_HD constexpr bool reached(uint32_t have, uint32_t want) {
    return int32_t(have - want) >= 0;
}

struct RingPosition {
    uint32_t slot;
    uint32_t turn;
};
MEGAMOE_HD constexpr RingPosition ring_position(uint64_t q, uint32_t ring_blocks) {
    return {uint32_t(q % ring_blocks), uint32_t(q / ring_blocks)};
}
// The position `blocks` behind another, by 32-bit arithmetic: a GPU takes several times as long for
// 64-bit divisions.
MEGAMOE_HD constexpr RingPosition ring_position(RingPosition from, uint32_t blocks,
                                                uint32_t ring_blocks) {
    const uint32_t at = from.slot + blocks;
    return {at % ring_blocks, from.turn + at / ring_blocks};
}

// Targets of the four ring counters for block q.
struct L1Slot {
    uint32_t slot, free_target, ready_target;
};
struct L2Slot {
    uint32_t slot, free_target, ready_target, done_target;
};
MEGAMOE_HD constexpr L1Slot l1_slot(const MoEShape& s, RingPosition p) {
    return {p.slot, p.turn * s.l1_tiles(), (p.turn + 1) * s.block_m};
}
MEGAMOE_HD constexpr L2Slot l2_slot(const MoEShape& s, RingPosition p) {
    return {p.slot, p.turn * s.l2_tiles(), (p.turn + 1) * s.l1_tiles(),
            (p.turn + 1) * s.l2_tiles()};
}
MEGAMOE_HD constexpr L1Slot l1_slot(const MoEShape& s, uint64_t q) {
    return l1_slot(s, ring_position(q, s.ring_l1));
}
MEGAMOE_HD constexpr L2Slot l2_slot(const MoEShape& s, uint64_t q) {
    return l2_slot(s, ring_position(q, s.ring_l2));
}

// What the CTAs of a rank add to a counts flag in a call, together and each.
inline constexpr uint32_t kWholeFlag = 1 << 16;
MEGAMOE_HD constexpr uint32_t flag_share(uint32_t cta, uint32_t num_ctas) {
    return kWholeFlag / num_ctas + (cta < kWholeFlag % num_ctas);
}

// CPU units meet at the grid barrier this often in a call, always.
inline constexpr uint32_t kBarriersPerCall = 2;
// Arrivals that complete barrier `index` (0 or 1) of call `epoch` (from 1), on CPU ranks.
MEGAMOE_HD constexpr uint32_t barrier_target(uint32_t epoch, uint32_t index, uint32_t num_units) {
    return ((epoch - 1) * kBarriersPerCall + index + 1) * num_units;
}

}  // namespace megamoe
