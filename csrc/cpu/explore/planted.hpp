// Bugs that the explorer must find. Each is one operation dropped, weakened or moved, outside of
// the production headers: in the sync policy, in the math policy, or in a member of the context.
#pragma once

#include "cpu/context.hpp"

namespace megamoe::cpu::explore {

#define MEGAMOE_PLANTED_BUGS(X)                                                                 \
    X(kNone, "none")                                                                            \
    X(kFlagByEquality, "count_flag_by_equality")     /* a late role never sees its epoch */     \
    X(kL1PublishedEarly, "l1_published_before_data") /* swapped publish */                      \
    X(kL2PublishedEarly, "l2_published_before_data") /* swapped publish */                      \
    X(kNoCountsWait, "dispatch_skips_counts_wait")                                              \
    X(kNoL1EmptyWait, "l1_empty_not_awaited")                                                   \
    X(kNoL2EmptyWait, "l2_empty_not_awaited")                                                   \
    X(kNoL1FullWait, "l1_full_not_awaited")                                                     \
    X(kNoL2FullWait, "l2_full_not_awaited")                                                     \
    X(kOneBarrier, "second_grid_barrier_skipped") /* published before all routes are written */ \
    X(kOneParity, "no_epoch_parity")              /* one copy of counts and routes */           \
    X(kLinear2First, "linear2_ticket_before_its_linear1")                                       \
    X(kTicketsIgnoreRing, "ticket_order_ignores_l2_ring")                                       \
    X(kCombineEarly, "combine_after_first_slot")                                                \
    X(kArrivedKept, "token_arrived_not_reset")                                                  \
    X(kArrivedResetLate, "token_arrived_reset_after_next_flag")                                 \
    X(kBlockBaseKept, "block_base_not_advanced")

enum class Bug : uint32_t {
#define X(id, text) id,
    MEGAMOE_PLANTED_BUGS(X)
#undef X
};
inline constexpr Bug kAllBugs[] = {
#define X(id, text) Bug::id,
    MEGAMOE_PLANTED_BUGS(X)
#undef X
};
inline const char* bug_name(Bug bug) {
    constexpr const char* kNames[] = {
#define X(id, text) text,
        MEGAMOE_PLANTED_BUGS(X)
#undef X
    };
    return kNames[uint32_t(bug)];
}

template <class Base>
struct AsProduced : Base {};

template <class Base>
struct OneParity : Base {
    void begin() {
        Base::begin();
        this->parity = 0;
    }
};

template <class Base>
struct KeptBlockBase : Base {
    void begin() {
        Base::begin();
        this->block_base = 0;
    }
};

// Exchanges tickets 2i and 2i + 1; with one tile of each kind per block, that is L2 before L1.
class SwappedWalk {
  public:
    SwappedWalk(const MoEShape& shape, TableRows rows) : shape_(shape), rows_(rows) {}
    Tile seek(uint32_t ticket) const { return TileWalk(shape_, rows_).seek(ticket ^ 1); }

  private:
    MoEShape shape_;
    TableRows rows_;
};
template <class Base>
struct Linear2First : Base {
    SwappedWalk tile_walk(const RouteTable& table) const {
        return {this->shape, TableRows{&table}};
    }
};

// The order for a ring that is larger than the real one.
template <class Base>
struct TicketsIgnoreRing : Base {
    TileWalk<TableRows> tile_walk(const RouteTable& table) const {
        MoEShape shape = this->shape;
        shape.ring_l2 += 8;
        shape.l2_lag += 4;
        return {shape, TableRows{&table}};
    }
};

}  // namespace megamoe::cpu::explore
