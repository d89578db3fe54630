// What a unit was waiting for when its limit expired, or why it gave up.
#pragma once

#include "megamoe/config.hpp"

namespace megamoe {

// clang-format off: one name per line
#define MEGAMOE_ROLES(X)       \
    X(kHost, "host")           \
    X(kDispatch, "dispatch")   \
    X(kMath, "math")           \
    X(kCombine, "combine")
#define MEGAMOE_PHASES(X)                                               \
    X(kCount, "count")       /* local counting of routes */             \
    X(kExchange, "exchange") /* waiting for every peer's counts */      \
    X(kPull, "pull")         /* rows from peers into the L1 ring */     \
    X(kLinear1, "linear1")                                              \
    X(kLinear2, "linear2")                                              \
    X(kReduce, "combine")    /* the source rank sums its slots */       \
    X(kReset, "reset")
#define MEGAMOE_TAGS(X)                  \
    X(kGridBarrier, "grid_barrier")      \
    X(kCountsFlag, "counts_flag")        \
    X(kL1Full, "l1_full")                \
    X(kL1Empty, "l1_empty")              \
    X(kL2Full, "l2_full")                \
    X(kL2Empty, "l2_empty")              \
    X(kTokenArrived, "token_arrived")    \
    X(kHostBarrier, "host_barrier")
// clang-format on

#define X(id, text) id,
enum class Role : uint32_t { MEGAMOE_ROLES(X) };
enum class Phase : uint32_t { MEGAMOE_PHASES(X) };
enum class Tag : uint32_t { MEGAMOE_TAGS(X) };
#undef X

// One wait: who waits for what. `peer` is the own rank where the wait is local.
struct Wait {
    Role role;
    Phase phase;
    Tag tag;
    uint32_t unit;
    uint32_t peer;
    uint32_t index;
};

#define MEGAMOE_FAULT_FIELDS(X) \
    X(valid) X(rank) X(unit) X(role) X(phase) X(tag) X(peer) X(index) X(epoch) X(want) X(have)

struct FaultRecord {
#define X(name) uint32_t name;
    MEGAMOE_FAULT_FIELDS(X)
#undef X
};

}  // namespace megamoe
