// PlaceWalk and place_of_ticket (csrc/include/megamoe/schedule.hpp) beside TileWalk, which
// tests/protocol holds to the rules: the same tile for every ticket of random calls. And both
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

uint32_t expert_at(const MoEShape& s, uint32_t order) {
    return order < s.num_shared ? s.local_experts() + order : order - s.num_shared;
}

// Both forms that lead to places without a TileWalk; the closed one where waves are one block.
bool same(const MoEShape& s, const std::vector<uint32_t>& rows, std::minstd_rand& random) {
    std::vector<uint32_t> block_begin{0};
    for (uint32_t i = 0; i < s.total_experts(); ++i)
        block_begin.push_back(block_begin.back() + ExpertBlocks(s, rows[expert_at(s, i)]).count());
    const uint32_t blocks = block_begin.back();
    TileWalk walk(s, Rows{rows.data()});
    PlaceWalk::State state;
    PlaceWalk places(s, block_begin.data(), s.l1_tiles(), s.l2_tiles(), state);
    places.start();
    for (uint32_t ticket = 0;; ticket += 1 + (random() % 4 == 0 ? random() % 5 : 0)) {
        const Tile want = walk.seek(ticket);
        const bool done = want.kind == TileKind::kDone;
        const Place closed =
            place_of_ticket(ticket, blocks, linear1_ahead(s), s.l1_tiles(), s.l2_tiles());
        const Place walked = places.seek(ticket);
        auto right = [&](const Place& have) {
            return have.kind == want.kind &&
                   (done || (have.block == want.block && have.n == want.n));
        };
        const bool expert = done || expert_at(s, walked.expert) == want.expert;
        if (!right(walked) || !expert || (s.wave_blocks == 1 && !right(closed))) {
            std::printf(
                "ticket %u of %u blocks, waves of %u, lag %u, ring %u: walked to kind %u block %u "
                "n %u of the expert at %u, closed form %u %u %u, want %u %u %u of %u\n",
                ticket, blocks, s.wave_blocks, s.l2_lag, s.ring_l2, uint32_t(walked.kind),
                walked.block, walked.n, walked.expert, uint32_t(closed.kind), closed.block,
                closed.n, uint32_t(want.kind), want.block, want.n, want.expert);
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
        s.num_ranks = s.topk = 1;
        s.wave_blocks = below(2) ? 1 : 1 + below(5);
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
