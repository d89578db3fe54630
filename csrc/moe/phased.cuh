// Phases one after the other, compiled in with -DMEGAMOE_PHASED=1: what the power experiment
// compares overlap with (`megamoe bench power`). All rows are pulled before the first tile, all of
// Linear 1 is done before the first Linear 2, all of Linear 2 before the combine. Rings must hold
// every block of the call, and Linear 2 must come last in the ticket order, or the waits run into
// their limit.
#pragma once

#include "moe/dispatch.cuh"

#ifndef MEGAMOE_PHASED
#define MEGAMOE_PHASED 0
#endif

namespace megamoe::moe {

inline constexpr bool kPhased = MEGAMOE_PHASED != 0;

struct PhaseWait {
    uint32_t* word;
    uint32_t want;
    Tag tag;
};
// What says that a phase is done for block b of the call.
MEGAMOE_DEVICE PhaseWait phase_wait(const MoEParams& p, const CallState& call, Phase done,
                                    uint32_t b) {
    const L1Slot l1 = l1_slot_of(p, call, b);
    const L2Slot l2 = l2_slot_of(p, call, b);
    if (done == Phase::kPull)
        return {p.word(Region::kL1Full, l1.slot), l1.ready_target, Tag::kL1Full};
    if (done == Phase::kLinear1)
        return {p.word(Region::kL2Full, l2.slot), l2.ready_target, Tag::kL2Full};
    return {p.word(Region::kL2Empty, l2.slot), l2.done_target, Tag::kL2Empty};
}

// Waits until a phase is done for all blocks of this rank. One thread. Words are looked at several
// at once: one after the other they would take longer than the phases.
MEGAMOE_DEVICE bool wait_all_blocks(const MoEParams& p, SharedStorage& s, Phase done) {
    constexpr uint32_t kAtOnce = 4;
#pragma unroll 1
    for (uint32_t b0 = 0; b0 < s.call.num_blocks; b0 += kAtOnce) {
        uint32_t have[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t b = min(b0 + i, s.call.num_blocks - 1);
            have[i] = ptx::load_relaxed_sys(phase_wait(p, s.call, done, b).word);
        }
        bool all = true;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t b = min(b0 + i, s.call.num_blocks - 1);
            all = all && reached(have[i], phase_wait(p, s.call, done, b).want);
        }
#pragma unroll 1
        for (uint32_t i = 0; !all && i < kAtOnce; ++i) {
            const uint32_t b = min(b0 + i, s.call.num_blocks - 1);
            const PhaseWait wait = phase_wait(p, s.call, done, b);
            if (!wait_word<Compare::kReached, Scope::kGpu>(
                    p, s.call, wait.word, wait.want,
                    {Role::kMath, done, wait.tag, blockIdx.x, p.rank, b}))
                return false;
        }
    }
    __threadfence();  // with the relaxed loads before it: an acquire
    return true;
}

}  // namespace megamoe::moe
