// What every role of a rank's call holds: shape, windows, policies, and the call itself.
#pragma once

#include "megamoe/layout.hpp"
#include "megamoe/protocol.hpp"
#include "megamoe/schedule.hpp"
#include "megamoe/trace.hpp"

namespace megamoe::cpu {

struct Call {
    uint32_t num_tokens;
    const int32_t* topk_idx;   // [T, K], -1 masked
    const float* topk_weight;  // [T, K]
    uint8_t* y;                // [T] BF16 rows
};

// Maps a local expert to its rows, for the walks of schedule.hpp.
struct TableRows {
    const RouteTable* table;
    uint32_t operator()(uint32_t expert) const { return table->rows(expert); }
};

// `Sync` orders accesses and waits; `Math` moves and computes rows (the explorer's are tiny). Roles
// take any context with these members: the explorer plants bugs by hiding some of them.
template <class Sync, class Math>
struct Context {
    MoEShape shape;
    Windows windows;
    Sync& sync;
    Math& math;
    Call call;

    // Read by each role when it starts, the same for all roles of the call.
    uint32_t epoch = 0;
    uint32_t parity = 0;  // which copy of counts and routes
    uint64_t block_base = 0;

    uint32_t rank() const { return windows.rank; }
    Control& control() const { return windows.control(rank()); }
    uint32_t* word(Region r, uint32_t element) const {
        return windows.template ptr<uint32_t>(rank(), r, element);
    }

    void begin() {
        epoch = sync.load(&control().epoch.value) + 1;
        parity = epoch & 1;
        block_base = control().block_base.value;
    }
    RouteTable route_table(uint32_t* begin) const {
        RouteTable table(shape, rank(), call.num_tokens,
                         windows.recv_count(shape, rank(), parity, 0), begin);
        table.index(0, 1);
        return table;
    }
    RowSource source(const RouteTable& table, uint32_t expert, uint32_t row) const {
        return table.source(expert, row, [this](uint32_t peer) {
            return windows.route(shape, rank(), parity, peer);
        });
    }
    TileWalk<TableRows> tile_walk(const RouteTable& table) const {
        return {shape, TableRows{&table}};
    }
    // Rows come to blocks in ring slots: the position of a slot's first row.
    uint8_t* ring_row(Region r, uint32_t slot) const {
        return windows.at(rank(), r, uint64_t(slot) * shape.block_m);
    }
};

}  // namespace megamoe::cpu
