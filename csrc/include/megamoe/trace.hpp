// What a traced call writes down: events of each role of each unit, in buffers of a fixed size.
//
// A track is one role of one unit (a CTA, or a thread of a CPU rank), written by that role alone,
// in no particular order. An event lies inside another of its track or beside it. A full track
// counts what it drops. Stamps are nanoseconds of one clock per rank.
#pragma once

#include "megamoe/config.hpp"

namespace megamoe {

// clang-format off: one name per line
#define MEGAMOE_TRACE_ROLES(X)  \
    X(kDispatch, "dispatch")    \
    X(kPull, "pull")            \
    X(kFeed, "feed")            /* GPU: brings activations into stages */ \
    X(kMath, "math")            \
    X(kPublish, "publish")      /* GPU: announces what math has written */ \
    X(kCombine, "combine")
// The numbers a, b, c of an event stand behind its name.
#define MEGAMOE_TRACE_KINDS(X)                                                          \
    X(kStage, "stage")          /* tokens into the window, by unit or host: their number */ \
    X(kList, "list")            /* own routes listed, counts published */               \
    X(kExchange, "exchange")    /* waiting for every peer's counts, and reading them */ \
    X(kPull, "pull")            /* first row or block, rows */                          \
    X(kRows, "rows")            /* instant: block, rows that are now in the L1 ring, source rank */ \
    X(kLinear1, "linear1")      /* a tile: block, column, rows */                       \
    X(kActivate, "activate")    /* its SwiGLU and requantisation: as above */           \
    X(kLinear2, "linear2")      /* a tile: as above */                                  \
    X(kScatter, "scatter")      /* its rows on their way to their owners: as above */   \
    X(kPublish1, "publish1")    /* a Linear 1 tile is announced: block, column */       \
    X(kPublish2, "publish2")    /* a Linear 2 tile is announced: block, column */       \
    X(kCombine, "combine")      /* tokens reduced: first, number */                     \
    X(kWait, "wait")            /* a wait that had to wait: tag, index */
// clang-format on
#define MEGAMOE_TRACE_FIELDS(X) \
    X(uint64_t, begin)          \
    X(uint64_t, end) X(uint32_t, kind) X(uint32_t, a) X(uint32_t, b) X(uint32_t, c)

#define X(id, text) id,
enum class TraceRole : uint32_t { MEGAMOE_TRACE_ROLES(X) kCount };
enum class TraceKind : uint32_t { MEGAMOE_TRACE_KINDS(X) kCount };
#undef X
inline constexpr uint32_t kNumTraceRoles = uint32_t(TraceRole::kCount);
inline constexpr uint32_t kNumTraceKinds = uint32_t(TraceKind::kCount);

struct TraceEvent {
#define X(type, name) type name;
    MEGAMOE_TRACE_FIELDS(X)
#undef X
};
static_assert(sizeof(TraceEvent) == 32, "two stores of 16 bytes");

// Where a rank's call writes. Tracks are [units][kNumTraceRoles].
struct TraceBuffers {
    uint64_t* slots;     // [units][kNumTraceSlots]: the sums of device/trace.cuh; CPU ranks: null
    uint32_t* recorded;  // [tracks]: events of the call, those dropped included
    TraceEvent* events;  // [tracks][capacity]
    uint64_t capacity;
};

}  // namespace megamoe
