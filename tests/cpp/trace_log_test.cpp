// The recorder of traced GPU builds (csrc/device/trace.cuh), on the host: what it writes, and that
// a full track drops events and counts them instead of writing past its end.
#define MEGAMOE_TRACE 1
#include <cstdio>
#include <vector>

#include "device/trace.cuh"

using namespace megamoe;

static_assert(sizeof(TraceBuffers) == 32);
static_assert(sizeof(TraceEvent) == sizeof(uint4) * 2);

namespace {

constexpr uint32_t kUnits = 3, kCapacity = 8, kGuard = 0xA5A5A5A5;
int failures = 0;

void expect(bool ok, const char* what, uint64_t have, uint64_t want) {
    if (ok) return;
    ++failures;
    std::printf("%s: %llu, want %llu\n", what, (unsigned long long)have, (unsigned long long)want);
}
void equal(uint64_t have, uint64_t want, const char* what) {
    expect(have == want, what, have, want);
}

struct Job {
    uint32_t weight;
};

// A buffer with a track's length of guard words before and after it.
struct Buffers {
    std::vector<TraceEvent> events;
    std::vector<uint32_t> recorded = std::vector<uint32_t>(kUnits * kNumTraceRoles, kGuard);
    TraceBuffers to{};
    Buffers() : events((kUnits * kNumTraceRoles + 2) * kCapacity) {
        std::memset(static_cast<void*>(events.data()), 0xA5, events.size() * sizeof(TraceEvent));
        to = {nullptr, recorded.data(), events.data() + kCapacity, kCapacity};
    }
    TraceEvent* track(uint32_t unit, TraceRole role) {
        return to.events + (unit * kNumTraceRoles + uint32_t(role)) * kCapacity;
    }
    // Every event that no role of `unit` may have touched is as it was.
    void check_guards(uint32_t unit, const uint32_t (&written)[kNumTraceRoles]) {
        for (size_t i = 0; i < events.size(); ++i) {
            const int64_t at = int64_t(i) - kCapacity - int64_t(unit) * kNumTraceRoles * kCapacity;
            const bool ours = at >= 0 && at < int64_t(kNumTraceRoles * kCapacity) &&
                              at % kCapacity < written[at / kCapacity];
            if (!ours) equal(events[i].kind, kGuard, "a word outside the track");
        }
    }
};

void check(const TraceEvent& e, TraceKind kind, uint64_t begin, uint64_t end, uint32_t a,
           uint32_t b, uint32_t c) {
    equal(e.kind, uint32_t(kind), "kind");
    equal(e.begin, begin, "begin");
    equal(e.end, end, "end");
    equal(e.a, a, "a");
    equal(e.b, b, "b");
    equal(e.c, c, "c");
}

void a_tile_is_recorded() {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = 1;
    trace.open(&buffers.to);
    trace.note_task(2, 40);
    const uint64_t late = (uint64_t(7) << 32) + 5;  // both halves of a stamp
    ptx::host_clock = late;
    trace.begin(TraceKind::kLinear2);
    ptx::host_clock = late + 100;
    trace.begin(TraceKind::kScatter);
    ptx::host_clock = late + 130;
    trace.end(TraceRole::kMath, TraceKind::kScatter, trace.block_of_task(2), 3, 64);
    trace.end(TraceRole::kMath, TraceKind::kLinear2, trace.block_of_task(2), 3, 64);
    trace.close(&buffers.to);
    const TraceEvent* track = buffers.track(1, TraceRole::kMath);
    check(track[0], TraceKind::kScatter, late + 100, late + 130, 40, 3, 64);
    check(track[1], TraceKind::kLinear2, late, late + 130, 40, 3, 64);
    equal(buffers.recorded[1 * kNumTraceRoles + uint32_t(TraceRole::kMath)], 2, "recorded");
    equal(buffers.recorded[0], kGuard, "another unit's count");
    uint32_t written[kNumTraceRoles] = {};
    written[uint32_t(TraceRole::kMath)] = 2;
    buffers.check_guards(1, written);
}

// Lanes in turn, lane 0, which counts, last.
void a_batch_of_rows_is_recorded(uint32_t rows, uint32_t ready) {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = 0;
    trace.open(&buffers.to);
    ptx::host_clock = 1000;
    trace.begin(TraceKind::kPull);
    Job jobs[kTraceJobs] = {};
    for (uint32_t i = 0; i < rows; ++i) {
        trace.note_job(i, 100 + i, 71);
        jobs[i].weight = i + 1;
    }
    for (uint32_t i = 0; i < ready; ++i) {
        ptx::host_clock = 1010 + i;
        trace.job_ready(i);
    }
    ptx::host_clock = 2000;
    for (uint32_t lane = 32; lane-- > 0;) {
        threadIdx.x = 352 + lane;
        trace.end_jobs(jobs, 17, rows, ready);
    }
    threadIdx.x = 0;
    trace.close(&buffers.to);
    equal(buffers.recorded[uint32_t(TraceRole::kPull)], ready + 1, "rows and their batch");
    const TraceEvent* track = buffers.track(0, TraceRole::kPull);
    const uint32_t kept = ready + 1 < kCapacity ? ready + 1 : kCapacity;
    for (uint32_t i = 0; i < ready && i < kept; ++i)
        check(track[i], TraceKind::kRows, 1010 + i, 1010 + i, 100 + i, i + 1, 71);
    if (ready < kept) check(track[ready], TraceKind::kPull, 1000, 2000, 17, rows, 0);
    uint32_t written[kNumTraceRoles] = {};
    written[uint32_t(TraceRole::kPull)] = kept;
    buffers.check_guards(0, written);
}

// Lanes of several math warps, before any tile.
void first_rows_are_recorded() {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = 2;
    trace.open(&buffers.to);
    for (uint32_t i = 0; i < 3; ++i) {
        ptx::host_clock = 500 + i;
        trace.row_ready(60 + i, i + 1, 3 - i);
    }
    trace.record(TraceRole::kMath, TraceKind::kPull, 400, 510, 2, 3);
    trace.close(&buffers.to);
    const TraceEvent* track = buffers.track(2, TraceRole::kMath);
    for (uint32_t i = 0; i < 3; ++i)
        check(track[i], TraceKind::kRows, 500 + i, 500 + i, 60 + i, i + 1, 3 - i);
    check(track[3], TraceKind::kPull, 400, 510, 2, 3, 0);
    equal(buffers.recorded[2 * kNumTraceRoles + uint32_t(TraceRole::kMath)], 4, "recorded");
    uint32_t written[kNumTraceRoles] = {};
    written[uint32_t(TraceRole::kMath)] = 4;
    buffers.check_guards(2, written);
}

void a_full_track_counts_on() {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = kUnits - 1;
    trace.open(&buffers.to);
    for (uint32_t i = 0; i < 3 * kCapacity; ++i)
        trace.record(TraceRole::kCombine, TraceKind::kWait, i, i + 1, i);
    trace.close(&buffers.to);
    const uint32_t last = (kUnits - 1) * kNumTraceRoles;
    equal(buffers.recorded[last + uint32_t(TraceRole::kCombine)], 3 * kCapacity, "counted");
    equal(buffers.recorded[last + uint32_t(TraceRole::kFeed)], 0, "an empty track");
    for (uint32_t i = 0; i < kCapacity; ++i)
        check(buffers.track(kUnits - 1, TraceRole::kCombine)[i], TraceKind::kWait, i, i + 1, i, 0,
              0);
    uint32_t written[kNumTraceRoles] = {};
    written[uint32_t(TraceRole::kCombine)] = kCapacity;
    buffers.check_guards(kUnits - 1, written);
}

void waits_go_to_the_track_of_who_waits() {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = 0;
    trace.open(&buffers.to);
    const struct {
        Tag tag;
        uint32_t thread;
        int role;  // -1: not recorded
    } cases[] = {
        {Tag::kL1Empty, 352, int(TraceRole::kPull)},
        {Tag::kL1Full, 288, int(TraceRole::kFeed)},
        {Tag::kL2Full, 288, int(TraceRole::kFeed)},
        {Tag::kTokenArrived, 0, int(TraceRole::kCombine)},
        {Tag::kTokenArrived, 32, -1},
        {Tag::kCountsFlag, 1, -1},
    };
    uint32_t want[kNumTraceRoles] = {};
    for (const auto& one : cases) {
        threadIdx.x = one.thread;
        ptx::host_clock = 50;
        {
            TraceWait wait(trace, one.tag, 9);
            ptx::host_clock = 60;
        }
        if (one.role < 0) continue;
        const uint32_t place = want[one.role]++;
        check(buffers.track(0, TraceRole(one.role))[place], TraceKind::kWait, 50, 60,
              uint32_t(one.tag), 9, 0);
    }
    threadIdx.x = 0;
    trace.close(&buffers.to);
    for (uint32_t role = 0; role < kNumTraceRoles; ++role)
        equal(buffers.recorded[role], want[role], "waits of a role");
}

// What came before the log was open begins where the CTA did; the caller may have staged for it.
void a_call_begins_where_its_cta_arrived(bool staged) {
    Buffers buffers;
    Trace trace{};
    blockIdx.x = 0;
    ptx::host_clock = 400;
    const TraceArrival arrival = TraceArrival::now();
    trace.open(&buffers.to);
    ptx::host_clock = 450;
    trace.begin_call(arrival, staged, 77);
    ptx::host_clock = 500;
    trace.end(TraceRole::kDispatch, TraceKind::kList);
    trace.close(&buffers.to);
    equal(trace.value[kTraceStart], 400, "start");
    equal(trace.value[kTraceStaged], 450, "staged");
    equal(trace.value[kTraceCycles], uint64_t(0) - 1234, "cycles");
    const TraceEvent* track = buffers.track(0, TraceRole::kDispatch);
    if (staged) check(track[0], TraceKind::kStage, 400, 450, 77, 0, 0);
    check(track[staged], TraceKind::kList, 450, 500, 0, 0, 0);
    uint32_t written[kNumTraceRoles] = {};
    written[uint32_t(TraceRole::kDispatch)] = staged + 1;
    equal(buffers.recorded[uint32_t(TraceRole::kDispatch)], staged + 1u, "events of a begin");
    buffers.check_guards(0, written);
}

void without_buffers_nothing_is_written() {
    Trace trace{};
    trace.open(nullptr);
    for (uint32_t i = 0; i < 3; ++i) trace.record(TraceRole::kMath, TraceKind::kWait, 1, 2);
    trace.close(nullptr);
    equal(trace.recorded[uint32_t(TraceRole::kMath)], 3, "counted all the same");
}

}  // namespace

int main() {
    a_tile_is_recorded();
    a_batch_of_rows_is_recorded(5, 5);
    a_batch_of_rows_is_recorded(5, 2);  // given up on the way
    a_batch_of_rows_is_recorded(32, 32);
    first_rows_are_recorded();
    a_full_track_counts_on();
    waits_go_to_the_track_of_who_waits();
    a_call_begins_where_its_cta_arrived(true);
    a_call_begins_where_its_cta_arrived(false);
    without_buffers_nothing_is_written();
    if (!failures) std::printf("ok\n");
    return failures != 0;
}
