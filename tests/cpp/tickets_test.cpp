// Tickets of the CUDA kernel, on the host: calls with one and with two streams, their CTAs at any
// speed. Every tile must be the one that TileWalk has for the ticket, run once, and no CTA may wait
// for ever. TICKETS is a file that holds class Tickets of csrc/moe/tickets.cuh.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "megamoe/layout.hpp"
#include "megamoe/schedule.hpp"

#define MEGAMOE_DEVICE inline

using namespace megamoe;

namespace {

struct Index {
    uint32_t x;
};
Index blockIdx, gridDim;
uint32_t kL1Tiles, kL2Tiles;
constexpr uint32_t kMostStreams = 2;

struct CallState {
    uint32_t num_blocks;
};
struct SharedStorage {
    const uint32_t *row_begin, *block_begin;
    PlaceWalk::State walk, walk_kept;
    CallState call;
};
struct MoEParams {
    MoEShape shape;
    uint32_t rank, num_streams;
    std::vector<uint32_t> half;
    Control* words;
    Control& control(uint32_t) const { return *words; }
};

uint32_t half_of_sm(const MoEParams& p) { return p.half[blockIdx.x]; }
uint32_t expert_at(const MoEShape& shape, uint32_t order) {
    const uint32_t shared = shape.num_shared;
    return order < shared ? shape.local_experts() + order : order - shared;
}
uint32_t expert_at(const MoEParams& p, const SharedStorage&, uint32_t order) {
    return expert_at(p.shape, order);
}
ExpertBlocks blocks_of(const MoEParams& p, const SharedStorage& s, uint32_t order) {
    return ExpertBlocks(p.shape, s.row_begin[order + 1] - s.row_begin[order]);
}
uint32_t expert_of(const MoEParams&, const uint32_t* begin, uint32_t i) {
    uint32_t e = 0;
    while (begin[e + 1] <= i) ++e;
    return e;
}
namespace ptx {
uint32_t* drawn_from;
uint32_t drawn;
uint32_t fetch_add_relaxed_gpu(uint32_t* word, uint32_t v) {
    drawn_from = word;
    drawn = *word;
    *word += v;
    return drawn;
}
}  // namespace ptx

#include TICKETS

struct Rows {
    const uint32_t* of;
    uint32_t operator()(uint32_t expert) const { return of[expert]; }
};

std::minstd_rand random_bits(1);
uint32_t below(uint32_t n) { return uint32_t(random_bits() >> 8) % n; }

struct Cta {
    SharedStorage s;
    std::unique_ptr<Tickets> tickets;
    std::vector<Tile>* stream;  // of its ticket
    uint32_t at;                // the ticket
    bool drawn = true, ended = false, begun = false;
    std::deque<Tile> posted;  // begun is of the first
};

class Call {
  public:
    Call(const MoEShape& shape, uint32_t num_streams, uint32_t num_ctas)
        : p_{shape, 0, num_streams, {}, &words_}, ctas_(num_ctas) {
        kL1Tiles = shape.l1_tiles();
        kL2Tiles = shape.l2_tiles();
        gridDim.x = num_ctas;
        std::vector<uint32_t> rows(shape.total_experts());
        for (uint32_t& r : rows) r = below(3) ? below(50) : 0;
        for (uint32_t i = 0; i < shape.total_experts(); ++i) {
            const uint32_t n = rows[expert_at(shape, i)];
            row_begin_.push_back(row_begin_.back() + n);
            begin_.push_back(begin_.back() + (n ? ExpertBlocks(shape, n).count() : 0));
        }
        TileWalk<Rows> walk(shape, Rows{rows.data()});
        for (uint32_t i = 0;; ++i) {
            const Tile tile = walk.seek(i);
            if (tile.kind == TileKind::kDone) break;
            tiles_[num_streams == 2 ? tile.n % 2 : 0].push_back(tile);
        }
        left_[0].assign(begin_.back(), kL1Tiles);
        left_[1].assign(begin_.back(), kL2Tiles);
        for (uint32_t i = 0; i < num_ctas; ++i) {
            p_.half.push_back(i < 2 ? i : below(2));
            ctas_[i].s = {row_begin_.data(), begin_.data(), {}, {}, {begin_.back()}};
        }
    }

    bool run() {
        for (blockIdx.x = 0; blockIdx.x < ctas_.size(); ++blockIdx.x) {
            Cta& c = ctas_[blockIdx.x];
            c.tickets = std::make_unique<Tickets>(p_, c.s);
            c.stream = p_.num_streams == 2 ? from() : &tiles_[0];
            c.at = p_.num_streams == 2 ? ptx::drawn : blockIdx.x;
        }
        const uint32_t slow = below(3);  // a half, or none
        std::vector<uint32_t> able;
        while (true) {
            able.clear();
            for (uint32_t i = 0; i < ctas_.size(); ++i)
                if (can_step(ctas_[i])) able.push_back(i);
            if (able.empty()) break;
            blockIdx.x = able[below(uint32_t(able.size()))];
            if (p_.half[blockIdx.x] == slow && below(8))
                blockIdx.x = able[below(uint32_t(able.size()))];
            if (!step(ctas_[blockIdx.x])) return false;
        }
        for (uint32_t kind = 0; kind < 2; ++kind)
            for (uint32_t b = 0; b < begin_.back(); ++b)
                if (left_[kind][b]) {
                    std::printf("stuck: Linear %u of block %u lacks %u tiles", kind + 1, b,
                                left_[kind][b]);
                    return false;
                }
        return true;
    }

  private:
    std::vector<Tile>* from() {
        return &tiles_[ptx::drawn_from == &words_.ticket[1].value ? 1 : 0];
    }
    // A feeder has filled all stages of the last tile it posted, so that has its inputs.
    bool can_post(const Cta& c) const {
#ifdef EARLY
        return c.posted.size() < 2;
#else
        return c.posted.empty() || (c.posted.size() == 1 && c.begun);
#endif
    }
    bool can_step(const Cta& c) const {
        if (!c.drawn || c.begun) return true;
        return (!c.ended && can_post(c)) || (!c.posted.empty() && ready(c.posted.front()));
    }
    bool step(Cta& c) {
        if (!c.drawn) return draw(c);
        const bool may_post = !c.ended && can_post(c);
        if (may_post && below(2)) return post(c);
        if (c.begun) {
            const Tile& tile = c.posted.front();
            --left_[tile.kind == TileKind::kLinear2][tile.block];
            c.posted.pop_front();
            c.begun = false;
        } else if (!c.posted.empty() && ready(c.posted.front())) {
            c.begun = true;
        } else if (may_post) {
            return post(c);
        }
        return true;
    }
    bool draw(Cta& c) {
        c.tickets->draw();
        c.drawn = true;
        c.stream = from();
        c.at = ptx::drawn + (p_.num_streams == 1 ? gridDim.x : 0);
        return true;
    }
    bool post(Cta& c) {
        ptx::drawn_from = nullptr;
        const Tile have = c.tickets->next();
        if (ptx::drawn_from) {  // it has turned
            if (c.at < c.stream->size()) {
                std::printf("turned with ticket %u of %zu", c.at, c.stream->size());
                return false;
            }
            c.stream = from();
            c.at = ptx::drawn;
        }
        const Tile done{TileKind::kDone, 0, 0, 0, 0, 0};
        const Tile want = c.at < c.stream->size() ? (*c.stream)[c.at] : done;
        if (have.kind != want.kind || have.expert != want.expert || have.block != want.block ||
            have.first_row != want.first_row || have.num_rows != want.num_rows ||
            have.n != want.n) {
            std::printf("ticket %u of stream %d: kind %u block %u n %u, want %u %u %u", c.at,
                        int(c.stream - tiles_), uint32_t(have.kind), have.block, have.n,
                        uint32_t(want.kind), want.block, want.n);
            return false;
        }
        c.ended = have.kind == TileKind::kDone;
        c.drawn = c.ended;
        if (!c.ended) c.posted.push_back(have);
        for (uint32_t h = 0; c.ended && h < p_.num_streams; ++h)
            if (words_.ticket[h].value + (p_.num_streams == 1 ? gridDim.x : 0) < tiles_[h].size()) {
                std::printf("a CTA ended with tickets left in stream %u", h);
                return false;
            }
        return true;
    }
    // The waits of docs/protocol.md.
    bool ready(const Tile& tile) const {
        const uint32_t b = tile.block, b1 = p_.shape.ring_l1, b2 = p_.shape.ring_l2;
        if (tile.kind == TileKind::kLinear2) return left_[0][b] == 0;
        for (uint32_t pulled = b1; pulled <= b; ++pulled)
            if (left_[0][pulled - b1]) return false;
        return b < b2 || left_[1][b - b2] == 0;
    }

    Control words_{};
    MoEParams p_;
    std::vector<Cta> ctas_;
    std::vector<uint32_t> row_begin_{0}, begin_{0};
    std::vector<Tile> tiles_[2];     // by ticket
    std::vector<uint32_t> left_[2];  // tiles of a block
};

}  // namespace

int main() {
    for (int call = 0; call < 3000; ++call) {
        MoEShape s{};
        s.num_ranks = s.topk = 1;
        s.num_experts = 1 + below(20);
        s.num_shared = below(3);
        s.block_m = 8u << below(2);
        s.tail_rows = below(2) ? s.block_m / 4 : 0;
        const uint32_t streams = 1 + (below(4) > 0);
        s.inter = kGroup * streams * (1 + below(3));
        s.hidden = kGroup * streams * (1 + below(3));
        s.l2_tile_n = kGroup;
        s.ring_l1 = 2 + below(9);
        s.ring_l2 = 2 + below(9);
        const uint32_t ring = s.ring_l1 < s.ring_l2 ? s.ring_l1 : s.ring_l2;
        s.wave_blocks = (streams == 2 ? 2 : 1) + below(ring - 1);
        s.l2_lag = below(10);
        const uint32_t ctas = 2 + below(12);
        if (Call(s, streams, ctas).run()) continue;
        std::printf(" (call %d, %u streams, %u CTAs, waves of %u, lag %u, rings %u %u)\n", call,
                    streams, ctas, s.wave_blocks, s.l2_lag, s.ring_l1, s.ring_l2);
        return 1;
    }
    std::puts("ok");
}
