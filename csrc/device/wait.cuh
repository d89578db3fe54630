// Bounded waits. Every wait on another CTA or rank has a limit; when it expires the unit records
// what it waited for, tells every rank, and its CTA leaves the call. The CUDA context survives.
//
// Inside a CTA nobody waits for time: a role that gives up notes why and raises `stop`, after which
// waits on shared-memory barriers return at once, results are not published, and the role that
// hands out tasks ends their stream. So all roles meet again at the end of the kernel, where one
// thread tells the world: only this CTA can have run into the limit until then, and its roles are
// quick.
#pragma once

#include "device/ptx.cuh"
#include "device/trace.cuh"
#include "megamoe/fault.hpp"
#include "megamoe/layout.hpp"
#include "megamoe/protocol.hpp"

namespace megamoe {

// In shared memory, the same for all roles of a CTA.
struct CallState {
    uint32_t stop;  // 0, kStopPeer: another CTA or rank gave up, kStopHere: this CTA did
    uint32_t epoch;
    uint64_t block_base;
    RingPosition l1_base, l2_base;  // where the call's first block lies
    uint32_t num_blocks;
    uint32_t want, have;  // with kStopHere: what was waited for
    Wait what;
    Trace trace;
};
inline constexpr uint32_t kStopPeer = 1, kStopHere = 2;

MEGAMOE_DEVICE bool stopped(const CallState& call) {
    return *const_cast<const volatile uint32_t*>(&call.stop) != 0;
}

// False if the CTA gives up; the barrier's phase is then unknown.
MEGAMOE_DEVICE bool wait(uint64_t& bar, uint32_t parity, const CallState& call) {
    while (!ptx::try_wait(bar, parity)) {
        if (stopped(call)) return false;
    }
    return true;
}

// The first CTA of a rank to give up writes the record to every rank, then stops them. One thread.
template <class Params>
MEGAMOE_DEVICE void give_up(const Params& p, const CallState& call) {
    Control& own = p.control(p.rank);
    if (atomicAdd(&own.fault_claim.value, 1) != 0) return;
    const Wait& what = call.what;
    const FaultRecord record{1,
                             p.rank,
                             what.unit,
                             uint32_t(what.role),
                             uint32_t(what.phase),
                             uint32_t(what.tag),
                             what.peer,
                             what.index,
                             call.epoch,
                             call.want,
                             call.have};
#pragma unroll 1
    for (uint32_t peer = 0; peer < p.shape.num_ranks; ++peer)
        *p.template ptr<FaultRecord>(peer, Region::kFault, p.rank) = record;
    ptx::fence_sys();
#pragma unroll 1
    for (uint32_t peer = 0; peer < p.shape.num_ranks; ++peer)
        ptx::store_release_sys(&p.control(peer).abort.value, p.rank + 1);
}

// The same without an answer, for the math warps: opaque to the compiler, so that it keeps wgmma
// results where they are. After a stop they go on with whatever is in the stage.
MEGAMOE_DEVICE void wait_or_stop(uint64_t& bar, uint32_t parity, const CallState& call) {
    asm volatile(
        "{ .reg .pred done, go; .reg .b32 word;\n"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni LEAVE;\n"
        "ld.volatile.shared.u32 word, [%2];\n"
        "setp.eq.u32 go, word, 0;\n"
        "@go bra.uni AGAIN;\n"
        "LEAVE: }" ::"r"(ptx::shared_address(&bar)),
        "r"(parity), "r"(ptx::shared_address(&call.stop))
        : "memory");
}

enum class Compare { kEqual, kReached };
enum class Scope { kGpu, kSystem };

// Waits for a word in this rank's window, with acquire order. False when this rank or a peer gives
// up. One thread per word: it spins on its own.
template <Compare kCompare, Scope kScope, class Params>
MEGAMOE_DEVICE bool wait_word(const Params& p, CallState& call, const uint32_t* word, uint32_t want,
                              const Wait& what) {
    auto look = [&] {
        return kScope == Scope::kGpu ? ptx::load_acquire_gpu(word) : ptx::load_acquire_sys(word);
    };
    auto done = [&](uint32_t v) {
        return kCompare == Compare::kEqual ? v == want : reached(v, want);
    };
    uint32_t have = look();
    if (done(have)) return true;
    TraceSpan span(call.trace, TraceSlot(kTraceTag + uint32_t(what.tag)));
    TraceWait event(call.trace, what.tag, what.index);
    const uint64_t start = ptx::now_ns();
    for (uint32_t spin = 1;; ++spin) {
        have = look();
        if (done(have)) return true;
        if (spin % 16 != 0) continue;
        if (stopped(call)) return false;
        if (ptx::load_relaxed_sys(&p.control(p.rank).abort.value) != 0) {
            atomicCAS(&call.stop, 0, kStopPeer);
            return false;
        }
        if (ptx::now_ns() - start > p.timeout_ns) {
            if (atomicCAS(&call.stop, 0, kStopHere) == 0) {
                call.what = what;
                call.want = want;
                call.have = have;
            }
            return false;
        }
    }
}

}  // namespace megamoe
