// The sync policy of CPU ranks: std::atomic_ref on shared memory, bounded waits, the abort word.
//
// Phases are templates over a policy with load, store, add, wait_equal, wait_reached, the observe_*
// hooks and the traces' stretch; the explorer (explore/) supplies another one.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "cpu/trace.hpp"
#include "megamoe/fault.hpp"
#include "megamoe/layout.hpp"
#include "megamoe/protocol.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megamoe::cpu {

// Figures of a session, for people: nothing in the protocol reads them.
struct Stats {
    std::atomic<uint64_t> blocked[uint32_t(Tag::kHostBarrier) + 1] = {};  // waits that had to wait
    std::atomic<uint32_t> pulled = 0, consumed = 0, produced = 0, retired = 0;  // blocks, this call
    std::atomic<uint32_t> high_water_l1 = 0, high_water_l2 = 0;

    void begin_call() { pulled = consumed = produced = retired = 0; }
    static void raise(std::atomic<uint32_t>& mark, uint32_t value) {
        uint32_t seen = mark.load(std::memory_order_relaxed);
        while (value > seen &&
               !mark.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
        }
    }
};

class CpuSync {
  public:
    CpuSync(const MoEShape& shape, const Windows& windows, double limit_s, Stats& stats,
            CpuTrace* trace = nullptr)
        : shape_(shape), windows_(windows), limit_s_(limit_s), stats_(stats), trace_(trace) {}

    static uint32_t load(uint32_t* word) {
        return std::atomic_ref(*word).load(std::memory_order_acquire);
    }
    static void store(uint32_t* word, uint32_t value) {
        std::atomic_ref(*word).store(value, std::memory_order_release);
    }
    // Returns the value before the addition.
    static uint32_t add(uint32_t* word, uint32_t value) {
        return std::atomic_ref(*word).fetch_add(value, std::memory_order_acq_rel);
    }

    // False when the limit expired here or on a peer; the caller then leaves the call.
    bool wait_equal(uint32_t* word, uint32_t want, const Wait& wait) {
        return wait_for(word, want, wait, [](uint32_t have, uint32_t w) { return have == w; });
    }
    bool wait_reached(uint32_t* word, uint32_t want, const Wait& wait) {
        return wait_for(word, want, wait,
                        [](uint32_t have, uint32_t w) { return reached(have, w); });
    }

    void observe_pulled() {
        const uint32_t pulled = stats_.pulled.fetch_add(1) + 1;
        Stats::raise(stats_.high_water_l1, live(pulled, stats_.consumed, shape_.ring_l1));
    }
    void observe_consumed() { stats_.consumed.fetch_add(1); }
    void observe_produced() {
        const uint32_t produced = stats_.produced.fetch_add(1) + 1;
        Stats::raise(stats_.high_water_l2, live(produced, stats_.retired, shape_.ring_l2));
    }
    void observe_retired() { stats_.retired.fetch_add(1); }
    // The event of a traced call that lasts as long as what this returns.
    Stretch stretch(uint32_t unit, TraceRole role, TraceKind kind, uint32_t a = 0, uint32_t b = 0,
                    uint32_t c = 0) {
        return {trace_, unit, role, kind, a, b, c};
    }

  private:
    // Blocks of a ring in use. A slot is freed before its owner has come to count it, so the
    // difference alone may say more than the ring holds, or less than none.
    static uint32_t live(uint32_t entered, const std::atomic<uint32_t>& left, uint32_t capacity) {
        const int32_t n = int32_t(entered - left.load());
        return n < 0 ? 0 : uint32_t(n) < capacity ? uint32_t(n) : capacity;
    }

    template <class Done>
    bool wait_for(uint32_t* word, uint32_t want, const Wait& wait, Done done) {
        if (done(load(word), want)) return true;
        stats_.blocked[uint32_t(wait.tag)].fetch_add(1, std::memory_order_relaxed);
        const Stretch traced = stretch(wait.unit, trace_role(wait.role), TraceKind::kWait,
                                       uint32_t(wait.tag), wait.index);
        const auto start = std::chrono::steady_clock::now();
        for (uint32_t spin = 0;; ++spin) {
            const uint32_t have = load(word);
            if (done(have, want)) return true;
            if (spin < kPauses) {
                pause();
                continue;
            }
            if (load(&windows_.control(windows_.rank).abort.value) != 0) return false;
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
            if (waited.count() > limit_s_) {
                give_up(wait, want, have);
                return false;
            }
            // Cores are often fewer than roles: hand the core over, then sleep in growing steps.
            if (spin < kPauses + kYields)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(std::chrono::microseconds(
                    spin < kPauses + 2 * kYields ? kShortNapUs : kLongNapUs));
        }
    }

    // The first unit of a rank to give up tells every rank what it waited for, then stops them.
    void give_up(const Wait& wait, uint32_t want, uint32_t have) {
        Control& own = windows_.control(windows_.rank);
        if (add(&own.fault_claim.value, 1) != 0) return;
        const uint32_t epoch = load(&own.epoch.value) + 1;
        const FaultRecord record{1,
                                 windows_.rank,
                                 wait.unit,
                                 uint32_t(wait.role),
                                 uint32_t(wait.phase),
                                 uint32_t(wait.tag),
                                 wait.tag == Tag::kTokenArrived ? slowest_peer(epoch) : wait.peer,
                                 wait.index,
                                 epoch,
                                 want,
                                 have};
        for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
            *windows_.ptr<FaultRecord>(peer, Region::kFault, windows_.rank) = record;
            store(&windows_.control(peer).abort.value, windows_.rank + 1);
        }
    }

    // A token's counter does not say whose row is missing. But once counts are exchanged, a rank's
    // tiles wait for no other rank: the one whose math and dispatch roles have not left is the
    // cause.
    uint32_t slowest_peer(uint32_t epoch) const {
        for (uint32_t i = 1; i < shape_.num_ranks; ++i) {
            const uint32_t peer = (windows_.rank + i) % shape_.num_ranks;
            Control& c = windows_.control(peer);
            const bool finished = reached(load(&c.epoch.value), epoch) ||
                                  load(&c.exits.value) >= shape_.num_units + shape_.num_pullers;
            if (!finished) return peer;
        }
        return windows_.rank;
    }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    static constexpr uint32_t kPauses = 64, kYields = 64, kShortNapUs = 20, kLongNapUs = 100;

    MoEShape shape_;
    Windows windows_;
    double limit_s_;
    Stats& stats_;
    CpuTrace* trace_;
};

}  // namespace megamoe::cpu
