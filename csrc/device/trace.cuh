// Time stamps and waiting times of a CTA, compiled in with -DMEGAMOE_TRACE=1 (megamoe trace
// builds).
#pragma once

#include "device/ptx.cuh"

#ifndef MEGAMOE_TRACE
#define MEGAMOE_TRACE 0
#endif

namespace megamoe {

inline constexpr bool kTrace = MEGAMOE_TRACE != 0;

// Stamps are %globaltimer in ns; waits are sums of SM clocks. scripts/gpu_trace.py has the names.
enum TraceSlot : uint32_t {
    kTraceStart,
    kTraceListed,      // own routes listed and published
    kTraceCounts,      // every peer's counts are here
    kTraceFirstStage,  // the first rows are in the ring
    kTraceTilesDone,
    kTraceCombined,
    kTracePulled,  // the last row has been pulled
    kTraceEnd,
    kTraceStageX,  // activations wait for a free stage
    kTraceStageW,  // weights wait for a free stage
    kTraceMath,    // math waits for a full stage
    kTraceEpilogue1,
    kTraceEpilogue2,
    kTraceCycles,  // SM clocks from start to end
    kTraceTiles1,  // number of tiles
    kTraceTiles2,
    kTraceTag,  // and a slot for each Tag: waits on global words
    kNumTraceSlots = kTraceTag + 8
};

struct Trace {
    uint64_t value[kTrace ? uint32_t(kNumTraceSlots) : 1];
    MEGAMOE_DEVICE void stamp(TraceSlot slot) {
        if constexpr (kTrace) value[slot] = ptx::now_ns();
    }
    MEGAMOE_DEVICE void add(TraceSlot slot, uint64_t amount) {
        if constexpr (kTrace) value[slot] += amount;
    }
};

// Adds the time until its end to a slot. For one thread of the role.
class TraceSpan {
  public:
    MEGAMOE_DEVICE TraceSpan(Trace& trace, TraceSlot slot, bool on = true)
        : trace_(trace), slot_(slot), on_(on) {
        if constexpr (kTrace) start_ = clock64();
    }
    MEGAMOE_DEVICE ~TraceSpan() {
        if constexpr (kTrace)
            if (on_) trace_.add(slot_, clock64() - start_);
    }

  private:
    Trace& trace_;
    TraceSlot slot_;
    bool on_;
    uint64_t start_ = 0;
};

}  // namespace megamoe
