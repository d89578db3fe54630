// Time stamps, events and waiting times of a CTA, compiled in with -DMEGAMOE_TRACE=1. Without it
// nothing of this leaves a trace in the code.
#pragma once

#include "device/ptx.cuh"
#include "megamoe/fault.hpp"
#include "megamoe/trace.hpp"

#ifndef MEGAMOE_TRACE
#define MEGAMOE_TRACE 0
#endif
// Sums of waits for stages and of epilogues, too: a math thread then reads clocks at every step of
// a mainloop.
#ifndef MEGAMOE_TRACE_WAITS
#define MEGAMOE_TRACE_WAITS 0
#endif

namespace megamoe {

inline constexpr bool kTrace = MEGAMOE_TRACE != 0;
inline constexpr bool kTraceWaits = kTrace && MEGAMOE_TRACE_WAITS;

// Stamps are %globaltimer in ns; waits are sums of SM clocks. scripts/gpu_configs.py has the names.
enum TraceSlot : uint32_t {
    kTraceStart,
    kTraceStaged,      // the own share of tokens is in the window
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
    kTraceTask,    // math waits for a task and its first stage
    kTraceEpilogue1,
    kTraceEpilogue2,
    kTraceCycles,  // SM clocks from start to end
    kTraceTiles1,  // number of tiles
    kTraceTiles2,
    kTraceTag,  // and a slot for each Tag: waits on global words
    kNumTraceSlots = kTraceTag + 8
};

// Blocks of tasks and of rows on their way, by their place in SharedStorage: only traces need them.
inline constexpr uint32_t kTraceTasks = 4, kTraceJobs = 32, kTraceBlockBits = 24;

// The events of a CTA's tracks. In shared memory; one thread per role.
template <bool kOn>
struct TraceLog {
    TraceEvent* events;  // of this CTA
    uint32_t capacity;
    uint32_t recorded[kNumTraceRoles];
    uint64_t begun[kNumTraceKinds];
    uint32_t task_block[kTraceTasks];
    uint32_t job_row[kTraceJobs];   // block, and the source rank above kTraceBlockBits
    uint32_t job_done[kTraceJobs];  // ns after the batch's begin

    MEGAMOE_DEVICE void open(const TraceBuffers* to) {
        capacity = to ? uint32_t(to->capacity) : 0;
        events = to ? to->events + uint64_t(blockIdx.x) * kNumTraceRoles * capacity : nullptr;
    }
    MEGAMOE_DEVICE void record(TraceRole role, TraceKind kind, uint64_t begin, uint64_t end,
                               uint32_t a = 0, uint32_t b = 0, uint32_t c = 0) {
        put(role, recorded[uint32_t(role)]++, kind, begin, end, a, b, c);
    }
    MEGAMOE_DEVICE void put(TraceRole role, uint32_t i, TraceKind kind, uint64_t begin,
                            uint64_t end, uint32_t a, uint32_t b, uint32_t c) {
        if (i >= capacity) return;
        auto* to = reinterpret_cast<uint4*>(events + uint64_t(role) * capacity + i);
        to[0] =
            make_uint4(uint32_t(begin), uint32_t(begin >> 32), uint32_t(end), uint32_t(end >> 32));
        to[1] = make_uint4(uint32_t(kind), a, b, c);
    }
    // A kind belongs to one role and does not nest in itself: its begin has a place of its own, not
    // a register, which accumulators fill.
    MEGAMOE_DEVICE void begin(TraceKind kind) { begun[uint32_t(kind)] = ptx::now_ns(); }
    MEGAMOE_DEVICE void end(TraceRole role, TraceKind kind, uint32_t a = 0, uint32_t b = 0,
                            uint32_t c = 0) {
        record(role, kind, begun[uint32_t(kind)], ptx::now_ns(), a, b, c);
    }
    MEGAMOE_DEVICE void note_task(uint32_t slot, uint32_t block) { task_block[slot] = block; }
    MEGAMOE_DEVICE uint32_t block_of_task(uint32_t slot) const { return task_block[slot]; }
    MEGAMOE_DEVICE void note_job(uint32_t job, uint32_t block, uint32_t source) {
        job_row[job] = source << kTraceBlockBits | block;
    }
    MEGAMOE_DEVICE void job_ready(uint32_t job) {
        job_done[job] = uint32_t(ptx::now_ns() - begun[uint32_t(TraceKind::kPull)]);
    }
    // A row that a math warp has copied: one lane of any of them, on the math warps' track.
    MEGAMOE_DEVICE void row_ready(uint32_t block, uint32_t rows, uint32_t source) {
        const uint64_t at = ptx::now_ns();
        const auto role = TraceRole::kMath;
        put(role, atomicAdd(&recorded[uint32_t(role)], 1), TraceKind::kRows, at, at, block, rows,
            source);
    }
    // The batch's events: its rows, a lane each, and itself. All lanes.
    template <class Jobs>
    MEGAMOE_DEVICE void end_jobs(const Jobs& jobs, uint32_t first, uint32_t n, uint32_t ready) {
        __syncwarp();
        const uint32_t lane = ptx::lane();
        const uint64_t begin = begun[uint32_t(TraceKind::kPull)];
        if (lane < ready) {
            const uint64_t at = begin + job_done[lane];
            put(TraceRole::kPull, recorded[uint32_t(TraceRole::kPull)] + lane, TraceKind::kRows, at,
                at, job_row[lane] & ((1u << kTraceBlockBits) - 1), jobs[lane].weight,
                job_row[lane] >> kTraceBlockBits);
        }
        __syncwarp();
        if (lane != 0) return;
        recorded[uint32_t(TraceRole::kPull)] += ready;
        end(TraceRole::kPull, TraceKind::kPull, first, n);
    }
    MEGAMOE_DEVICE void close(const TraceBuffers* to) const {
        if (!to) return;
        for (uint32_t i = 0; i < kNumTraceRoles; ++i)
            to->recorded[blockIdx.x * kNumTraceRoles + i] = recorded[i];
    }
};
template <>
struct TraceLog<false> {
    MEGAMOE_DEVICE void open(const TraceBuffers*) {}
    MEGAMOE_DEVICE void record(TraceRole, TraceKind, uint64_t, uint64_t, uint32_t = 0, uint32_t = 0,
                               uint32_t = 0) {}
    MEGAMOE_DEVICE void begin(TraceKind) {}
    MEGAMOE_DEVICE void end(TraceRole, TraceKind, uint32_t = 0, uint32_t = 0, uint32_t = 0) {}
    MEGAMOE_DEVICE void note_task(uint32_t, uint32_t) {}
    MEGAMOE_DEVICE uint32_t block_of_task(uint32_t) const { return 0; }
    MEGAMOE_DEVICE void note_job(uint32_t, uint32_t, uint32_t) {}
    MEGAMOE_DEVICE void job_ready(uint32_t) {}
    MEGAMOE_DEVICE void row_ready(uint32_t, uint32_t, uint32_t) {}
    template <class Jobs>
    MEGAMOE_DEVICE void end_jobs(const Jobs&, uint32_t, uint32_t, uint32_t) {}
    MEGAMOE_DEVICE void close(const TraceBuffers*) const {}
};

// When a CTA began, in registers: shared memory is not its own yet.
struct TraceArrival {
    uint64_t ns = 0, clock = 0;
    MEGAMOE_DEVICE static TraceArrival now() {
        if constexpr (kTrace) return {ptx::now_ns(), uint64_t(clock64())};
        return {};
    }
};

struct Trace : TraceLog<kTrace> {
    uint64_t value[kTrace ? uint32_t(kNumTraceSlots) : 1];
    // What the CTA has done before the log was open: tokens staged, or none where the caller did
    // that. Now it lists routes.
    MEGAMOE_DEVICE void begin_call(const TraceArrival& at, bool staged, uint32_t num_tokens) {
        if constexpr (kTrace) {
            value[kTraceStart] = at.ns;
            value[kTraceCycles] = -at.clock;
            stamp(kTraceStaged);
            if (staged)
                record(TraceRole::kDispatch, TraceKind::kStage, at.ns, value[kTraceStaged],
                       num_tokens);
            begin(TraceKind::kList);
        }
    }
    MEGAMOE_DEVICE void stamp(TraceSlot slot) {
        if constexpr (kTrace) value[slot] = ptx::now_ns();
    }
    MEGAMOE_DEVICE void add(TraceSlot slot, uint64_t amount) {
        if constexpr (kTrace) value[slot] += amount;
    }
};

// Adds the time until its end to a slot, with MEGAMOE_TRACE_WAITS. For one thread of the role. No
// register holds the begin.
class TraceSpan {
  public:
    MEGAMOE_DEVICE TraceSpan(Trace& trace, TraceSlot slot, bool on = true)
        : trace_(trace), slot_(slot), on_(on) {
        if constexpr (kTraceWaits)
            if (on_) trace_.add(slot_, -clock64());
    }
    MEGAMOE_DEVICE ~TraceSpan() {
        if constexpr (kTraceWaits)
            if (on_) trace_.add(slot_, clock64());
    }

  private:
    Trace& trace_;
    TraceSlot slot_;
    bool on_;
};

// A wait for a global word that had to wait: an event of the role that waits for such words. For
// one thread of the role; of the combining warps, for the first.
class TraceWait {
  public:
    MEGAMOE_DEVICE TraceWait(Trace& trace, Tag tag, uint32_t index)
        : trace_(trace), tag_(tag), index_(index) {
        if constexpr (kTrace) begin_ = ptx::now_ns();
    }
    MEGAMOE_DEVICE ~TraceWait() {
        if constexpr (kTrace) {
            const bool combine = tag_ == Tag::kTokenArrived;
            if (tag_ == Tag::kCountsFlag || (combine && threadIdx.x != 0)) return;
            const TraceRole role = combine                 ? TraceRole::kCombine
                                   : tag_ == Tag::kL1Empty ? TraceRole::kPull
                                                           : TraceRole::kFeed;
            trace_.record(role, TraceKind::kWait, begin_, ptx::now_ns(), uint32_t(tag_), index_);
        }
    }

  private:
    Trace& trace_;
    Tag tag_;
    uint32_t index_;
    uint64_t begin_ = 0;
};

}  // namespace megamoe
