// The tile order and the row sources, as plain lists: for tests, `plan` and pictures.

#include "megamoe/schedule.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace megamoe {
namespace {

using TileTuple = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>;

struct VectorRows {
    const uint32_t* rows;
    uint32_t operator()(uint32_t expert) const { return rows[expert]; }
};

std::vector<TileTuple> schedule(const MoEShape& shape, const std::vector<uint32_t>& rows) {
    if (rows.size() != shape.total_experts())
        throw std::invalid_argument("schedule: one number of rows per local expert, shared last");
    if (!shape.rings_fit())
        throw std::invalid_argument("schedule: wave_blocks must be in 1..min(ring_l1, ring_l2)");
    TileWalk walk(shape, VectorRows{rows.data()});
    std::vector<TileTuple> tiles;
    for (uint32_t ticket = 0;; ++ticket) {
        const Tile t = walk.seek(ticket);
        if (t.kind == TileKind::kDone) return tiles;
        tiles.emplace_back(uint32_t(t.kind), t.expert, t.block, t.first_row, t.num_rows, t.n);
    }
}

// For every row of every local expert, in ticket order: (expert, row, rank, token, slot).
std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>> row_sources(
    const MoEShape& shape, uint32_t rank, uint32_t num_tokens, const std::vector<uint32_t>& counts,
    const std::vector<std::vector<uint32_t>>& routes) {
    if (counts.size() != size_t(shape.num_ranks) * shape.local_experts() ||
        routes.size() != shape.num_ranks)
        throw std::invalid_argument("row_sources: counts [R * E_l] and one route list per rank");
    std::vector<uint32_t> begin(counts.size());
    RouteTable table(shape, rank, num_tokens, counts.data(), begin.data());
    table.index(0, 1);
    std::vector<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t>> out;
    for (uint32_t e = 0; e < shape.total_experts(); ++e) {
        for (uint32_t row = 0; row < table.rows(e); ++row) {
            const RowSource s =
                table.source(e, row, [&](uint32_t peer) { return routes[peer].data(); });
            out.emplace_back(e, row, s.rank, s.token, s.slot);
        }
    }
    return out;
}

}  // namespace

void bind_schedule(nb::module_& m) {
    m.def("schedule", &schedule, nb::arg("shape"), nb::arg("rows"),
          "[(kind, expert, block, first_row, num_rows, n)] in ticket order; kind 0 is Linear 1.");
    m.def("row_sources", &row_sources, nb::arg("shape"), nb::arg("rank"), nb::arg("num_tokens"),
          nb::arg("counts"), nb::arg("routes"));
}

}  // namespace megamoe
