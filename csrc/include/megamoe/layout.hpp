// The symmetric window of a rank: the only offset arithmetic in the project.
//
// A window has the same layout on every rank, so a peer's row is `base[peer] + offset`. Protocol
// state comes first and is what reset() clears; data regions follow and are never cleared.
#pragma once

#include "megamoe/config.hpp"
#include "megamoe/fault.hpp"
#include "megamoe/shape.hpp"

namespace megamoe {

// Order is memory order. R ranks, E_l local experts, S shared, U units, rows = ring * block_m.
#define MEGAMOE_REGIONS(X)                                                                   \
    X(kHostBarrier, "host_barrier")   /* [R] line: arrivals of peers' hosts; not cleared */  \
    X(kControl, "control")            /* Control */                                          \
    X(kFault, "fault")                /* [R] FaultRecord, written by rank r at r */          \
    X(kCountsFlag, "counts_flag")     /* [R] line: calls whose counts have arrived from r */ \
    X(kL1Full, "l1_full")             /* [B1] line: rows pulled, padding counted */          \
    X(kL1Empty, "l1_empty")           /* [B1] line: Linear 1 tiles done */                   \
    X(kL2Full, "l2_full")             /* [B2] line: Linear 1 tiles done */                   \
    X(kL2Empty, "l2_empty")           /* [B2] line: Linear 2 tiles done */                   \
    X(kTokenArrived, "token_arrived") /* [T_max] u32: slots of a token written by peers */   \
    X(kUnitCount, "unit_count")       /* [U][E] u32: routes counted by a unit */             \
    X(kRecvCount, "recv_count")       /* [2][R][E_l] u32: rows from r for a local expert */  \
    X(kRoute, "route")                /* [2][R][T_max*K] u32: token*K + slot, by expert */   \
    X(kInput, "input")                /* [T_max] rows of x */                                \
    X(kInputScale, "input_scale")     /* [T_max][H/128] f32 */                               \
    X(kL1Ring, "l1_ring")             /* [rows] rows of x */                                 \
    X(kL1Scale, "l1_scale")           /* [rows][H/128] f32; inner order is the backend's */  \
    X(kL2Ring, "l2_ring")             /* [rows] rows of the intermediate */                  \
    X(kL2Scale, "l2_scale")           /* [rows][I/128] f32; inner order is the backend's */  \
    X(kCombine, "combine")            /* [K+S][T_max] BF16 rows */

enum class Region : uint32_t {
#define X(id, text) id,
    MEGAMOE_REGIONS(X)
#undef X
        kNumRegions
};
inline constexpr Region kFirstCleared = Region::kControl;
inline constexpr Region kFirstKept = Region::kUnitCount;

struct alignas(kLineBytes) Line {
    uint32_t value;
};
struct alignas(kLineBytes) Line64 {
    uint64_t value;
};

// Words that only this rank's units touch, but for `abort`, which any peer may set.
struct Control {
    Line abort;         // 0, or 1 + the rank that gave up
    Line fault_claim;   // the first unit of this rank to give up writes the record
    Line epoch;         // calls finished since the last reset
    Line barrier;       // arrivals at the grid barrier of CPU units, cumulative
    Line ticket[2];     // next tile of this call, by stream; of CPU ranks, the first alone
    Line exits;         // roles that have left this call; CTAs, that have had their last ticket
    Line64 block_base;  // ring blocks of all earlier calls; advanced by the last to leave
};

struct Span {
    uint64_t offset;  // bytes from the window's base
    uint64_t count;   // elements
    uint64_t stride;  // bytes from one element to the next
};

// POD: built once on the host, passed to kernels by value.
struct WindowLayout {
    Span span[uint32_t(Region::kNumRegions)];
    uint64_t num_bytes;

    MEGAMOE_HD constexpr const Span& operator[](Region r) const { return span[uint32_t(r)]; }
    MEGAMOE_HD constexpr uint64_t clear_begin() const { return (*this)[kFirstCleared].offset; }
    MEGAMOE_HD constexpr uint64_t clear_end() const { return (*this)[kFirstKept].offset; }
};

MEGAMOE_HD constexpr WindowLayout make_window_layout(const MoEShape& s) {
    WindowLayout w{};
    uint64_t end = 0;
    auto put = [&](Region r, uint64_t count, uint64_t stride) {
        end =
            align_up(end, 1024);  // swizzled bulk copies need 1024; it is nothing beside the rings
        w.span[uint32_t(r)] = {end, count, stride};
        end += count * stride;
    };
    const uint64_t ranks = s.num_ranks;
    const uint64_t rows1 = uint64_t(s.ring_l1) * s.block_m, rows2 = uint64_t(s.ring_l2) * s.block_m;
    put(Region::kHostBarrier, ranks, kLineBytes);
    put(Region::kControl, 1, sizeof(Control));
    put(Region::kFault, ranks, align_up(sizeof(FaultRecord), kLineBytes));
    put(Region::kCountsFlag, ranks, kLineBytes);
    put(Region::kL1Full, s.ring_l1, kLineBytes);
    put(Region::kL1Empty, s.ring_l1, kLineBytes);
    put(Region::kL2Full, s.ring_l2, kLineBytes);
    put(Region::kL2Empty, s.ring_l2, kLineBytes);
    put(Region::kTokenArrived, s.max_tokens, 4);
    put(Region::kUnitCount, uint64_t(s.num_units) * s.num_experts, 4);
    put(Region::kRecvCount, 2 * ranks * s.local_experts(), 4);
    put(Region::kRoute, 2 * ranks * s.max_routes(), 4);
    put(Region::kInput, s.max_tokens, s.x_row_bytes());
    put(Region::kInputScale, s.max_tokens, uint64_t(s.x_groups()) * 4);
    put(Region::kL1Ring, rows1, s.x_row_bytes());
    put(Region::kL1Scale, rows1, uint64_t(s.x_groups()) * 4);
    put(Region::kL2Ring, rows2, s.h_row_bytes());
    put(Region::kL2Scale, rows2, uint64_t(s.h_groups()) * 4);
    put(Region::kCombine, uint64_t(s.num_slots()) * s.max_tokens, s.y_row_bytes());
    w.num_bytes = align_up(end, 4096);
    return w;
}

// A rank's view of the group's windows: typed pointers, own or a peer's.
struct Windows {
    WindowLayout layout;
    uint8_t* const* bases;  // [R], as mapped in this process
    uint32_t rank;

    MEGAMOE_HD uint8_t* at(uint32_t peer, Region r, uint64_t element = 0) const {
        return bases[peer] + layout[r].offset + element * layout[r].stride;
    }
    template <class T>
    MEGAMOE_HD T* ptr(uint32_t peer, Region r, uint64_t element = 0) const {
        return reinterpret_cast<T*>(at(peer, r, element));
    }
    MEGAMOE_HD Control& control(uint32_t peer) const {
        return *ptr<Control>(peer, Region::kControl);
    }
    // [2][R][E_l] and [2][R][T_max*K], as seen by the rank that receives.
    MEGAMOE_HD uint32_t* recv_count(const MoEShape& s, uint32_t owner, uint32_t parity,
                                    uint32_t source) const {
        const uint64_t first = (uint64_t(parity) * s.num_ranks + source) * s.local_experts();
        return ptr<uint32_t>(owner, Region::kRecvCount, first);
    }
    MEGAMOE_HD uint32_t* route(const MoEShape& s, uint32_t owner, uint32_t parity,
                               uint32_t source) const {
        const uint64_t first = (uint64_t(parity) * s.num_ranks + source) * s.max_routes();
        return ptr<uint32_t>(owner, Region::kRoute, first);
    }
    MEGAMOE_HD uint8_t* combine_row(const MoEShape& s, uint32_t source, uint32_t slot,
                                    uint32_t token) const {
        return at(source, Region::kCombine, uint64_t(slot) * s.max_tokens + token);
    }
};

}  // namespace megamoe
