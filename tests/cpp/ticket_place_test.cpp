// place_of_ticket (csrc/include/megamoe/schedule.hpp) beside TileWalk, which tests/protocol holds
// to the rules: the same tile for every ticket of random calls with waves of one block. And both
// forms of ring_position (csrc/include/megamoe/protocol.hpp), also where turns wrap.
#include <cstdio>
#include <random>
#include <vector>

#include "megamoe/protocol.hpp"
#include "megamoe/schedule.hpp"

using namespace megamoe;

namespace {

struct Rows {
    const uint32_t* of;
    uint32_t operator()(uint32_t expert) const { return of[expert]; }
};

bool same(const MoEShape& s, const std::vector<uint32_t>& rows, std::minstd_rand& random) {
    TileWalk walk(s, Rows{rows.data()});
    const uint32_t blocks = count_blocks(s, Rows{rows.data()});
    for (uint32_t ticket = 0;; ticket += 1 + (random() % 4 == 0 ? random() % 5 : 0)) {
        const Tile want = walk.seek(ticket);
        const Place have =
            place_of_ticket(ticket, blocks, linear1_ahead(s), s.l1_tiles(), s.l2_tiles());
        const bool done = want.kind == TileKind::kDone;
        if (have.kind != want.kind || (!done && (have.block != want.block || have.n != want.n))) {
            std::printf(
                "ticket %u of %u blocks, lag %u, ring %u: kind %u block %u n %u, want %u %u "
                "%u\n",
                ticket, blocks, s.l2_lag, s.ring_l2, uint32_t(have.kind), have.block, have.n,
                uint32_t(want.kind), want.block, want.n);
            return false;
        }
        if (done) return true;
    }
}

bool same_position(uint64_t base, uint32_t block, uint32_t ring) {
    const RingPosition want = ring_position(base + block, ring);
    const RingPosition have = ring_position(ring_position(base, ring), block, ring);
    if (have.slot == want.slot && have.turn == want.turn) return true;
    std::printf("block %u behind %llu of a ring of %u: slot %u turn %u, want %u %u\n", block,
                static_cast<unsigned long long>(base), ring, have.slot, have.turn, want.slot,
                want.turn);
    return false;
}

}  // namespace

int main() {
    std::minstd_rand random(1);
    auto below = [&](uint32_t n) { return uint32_t(random() >> 8) % n; };
    for (int call = 0; call < 20000; ++call) {
        MoEShape s{};
        s.num_ranks = s.topk = s.wave_blocks = 1;
        s.num_experts = 1 + below(12);
        s.num_shared = below(3);
        s.block_m = 8u << below(3);
        s.tail_rows = below(2) ? s.block_m / 4 : 0;
        s.inter = kGroup * (1 + below(4));
        s.hidden = kGroup * (1 + below(6));
        s.l2_tile_n = kGroup * (1 + below(2));
        s.ring_l1 = 1 + below(9);
        s.ring_l2 = 1 + below(9);
        s.l2_lag = below(10);
        std::vector<uint32_t> rows(s.total_experts());
        for (uint32_t& r : rows) r = below(3) ? below(50) : 0;
        if (!same(s, rows, random)) return 1;
    }
    for (int i = 0; i < 20000; ++i) {
        const uint32_t ring = 1 + below(200), near = below(2000);
        const uint64_t turns = uint64_t(below(4)) << 32;  // counters hold the turn modulo 2^32
        const uint64_t base = turns * ring - (turns ? near : 0) + below(3);
        if (!same_position(base, below(4000), ring)) return 1;
    }
    std::puts("ok");
}
