// Who gets which row, and the one ticket order over all tiles of a call.
//
// Both derive from the expert counts alone, so every unit computes them for itself and no unit
// waits for a scheduler.
//
// Rows. Local experts are taken in the order shared first (they need no peer), then routed; on a
// GPU those that own tokens go to come before the other routed ones. The rows of an expert come by
// source rank, the own rank first and then upwards (so that ranks do not all pull from rank 0 at
// once), within a source by token and slot. Each expert's rows are cut into blocks of at most
// block_m rows (ExpertBlocks); blocks are numbered through the call.
//
// Tickets. A wave is up to wave_blocks consecutive blocks of one expert. The order is a sequence of
// segments: Linear 1 of a wave, or Linear 2 of a wave. Inside a segment the tile column is outer
// and the block inner, so that a weight tile is read once per wave. Linear 2 of a wave comes
//   - as soon as Linear 1 is l2_lag blocks ahead of it, and
//   - in any case before Linear 1 of a wave that would need its L2 ring slots.
// Hence for every block b: L1(b) precedes L2(b); L2(b - B2) precedes L1(b); at most B2 blocks are
// between their L1 and L2. A wave fits both rings (MoEShape::rings_fit), so the pulls of L1(b) wait
// only for L1(b - B1), which lies in an earlier wave. Every dependency points to a smaller ticket:
// the smallest unfinished ticket can always run.
//
// The tickets of a call may be dealt to two streams: stream h has the tile columns 2 j + h of every
// segment, and a sequence of its own. All dependencies point to an earlier segment, so they hold
// across streams, too (docs/protocol.md).
#pragma once

#include "megamoe/config.hpp"
#include "megamoe/shape.hpp"

namespace megamoe {

// Where one row of a local expert comes from, and which combine slot its result goes to.
struct RowSource {
    uint32_t rank;
    uint32_t token;
    uint32_t slot;
};

// Counts [R][E_l] and route lists of one call, as received. `begin` has room for R * E_l entries.
class RouteTable {
  public:
    MEGAMOE_HD RouteTable(const MoEShape& shape, uint32_t rank, uint32_t num_tokens,
                          const uint32_t* counts, uint32_t* begin)
        : shape_(shape), rank_(rank), num_tokens_(num_tokens), counts_(counts), begin_(begin) {}

    // Fills `begin[r][e]`, the position of (r, e) in r's route list, for r = first, first + step, …
    MEGAMOE_HD void index(uint32_t first, uint32_t step) {
        const uint32_t experts = shape_.local_experts();
        for (uint32_t r = first; r < shape_.num_ranks; r += step) {
            uint32_t sum = 0;
            for (uint32_t e = 0; e < experts; ++e) {
                begin_[r * experts + e] = sum;
                sum += counts_[r * experts + e];
            }
        }
    }

    MEGAMOE_HD uint32_t num_tokens() const { return num_tokens_; }
    MEGAMOE_HD uint32_t count(uint32_t source, uint32_t expert) const {
        return counts_[source * shape_.local_experts() + expert];
    }
    // Rows of a local expert; shared experts (index >= E_l) have one row per local token.
    MEGAMOE_HD uint32_t rows(uint32_t expert) const {
        if (expert >= shape_.local_experts()) return num_tokens_;
        uint32_t sum = 0;
        for (uint32_t r = 0; r < shape_.num_ranks; ++r) sum += count(r, expert);
        return sum;
    }
    // The source of a row; `routes(r)` gives r's list in this rank's window.
    template <class Routes>
    MEGAMOE_HD RowSource source(uint32_t expert, uint32_t row, Routes routes) const {
        if (expert >= shape_.local_experts())
            return {rank_, row, shape_.topk + expert - shape_.local_experts()};
        for (uint32_t i = 0; i < shape_.num_ranks; ++i) {
            const uint32_t r =
                rank_ + i < shape_.num_ranks ? rank_ + i : rank_ + i - shape_.num_ranks;
            const uint32_t n = count(r, expert);
            if (row < n) {
                const uint32_t at = begin_[r * shape_.local_experts() + expert] + row;
                const uint32_t route = routes(r)[at];
                return {r, route / shape_.topk, route % shape_.topk};
            }
            row -= n;
        }
        return {rank_, 0, 0};  // unreachable: row < rows(expert)
    }

  private:
    MoEShape shape_;
    uint32_t rank_;
    uint32_t num_tokens_;
    const uint32_t* counts_;
    uint32_t* begin_;
};

// How an expert's rows are cut: into blocks of block_m - tail rows, of which the last has what is
// left. Where one tail holds that, there is a block less, and the first has the tail: it costs less
// than a pass over the expert's weights. (More tails would cost as much.)
class ExpertBlocks {
  public:
    MEGAMOE_HD ExpertBlocks(const MoEShape& shape, uint32_t rows)
        : rows_(rows), step_(shape.block_m - shape.tail()) {
        const uint32_t last = shape.tail() && rows > step_ ? rows % step_ : 0;
        if (last > 0 && last <= shape.tail()) tail_ = shape.tail();
    }

    MEGAMOE_HD uint32_t count() const { return ceil_div(rows_ - tail_, step_); }
    // First row of a block, and how many it has.
    MEGAMOE_HD uint32_t begin(uint32_t block) const {
        return block * step_ + (block > 0 ? tail_ : 0);
    }
    MEGAMOE_HD uint32_t size(uint32_t block) const {
        const uint32_t left = rows_ - begin(block), most = step_ + (block == 0 ? tail_ : 0);
        return left < most ? left : most;
    }
    // The block of a row.
    MEGAMOE_HD uint32_t of(uint32_t row) const {
        return row < step_ + tail_ ? 0 : (row - tail_) / step_;
    }

  private:
    uint32_t rows_, step_, tail_ = 0;
};

// Consecutive blocks of one expert. `first_block` counts through the call, `first_of_expert` in the
// expert.
struct Wave {
    uint32_t expert;
    uint32_t first_block;
    uint32_t num_blocks;
    uint32_t first_of_expert;
    MEGAMOE_HD uint32_t end_block() const { return first_block + num_blocks; }
};

// Yields the waves of a call in order. `Rows` maps a local expert to its number of rows.
template <class Rows>
class WaveWalk {
  public:
    MEGAMOE_HD WaveWalk(const MoEShape& shape, Rows rows) : shape_(shape), rows_(rows) {}

    // False when there is none left.
    MEGAMOE_HD bool next(Wave& wave) {
        while (of_expert_ == expert_blocks_) {
            if (order_ == shape_.total_experts()) return false;
            expert_ = expert_at(order_++);
            const uint32_t rows = rows_(expert_);
            expert_blocks_ = rows ? ExpertBlocks(shape_, rows).count() : 0;
            of_expert_ = 0;
        }
        const uint32_t left = expert_blocks_ - of_expert_;
        const uint32_t n = left < shape_.wave_blocks ? left : shape_.wave_blocks;
        wave = {expert_, block_, n, of_expert_};
        block_ += n;
        of_expert_ += n;
        return true;
    }

  private:
    MEGAMOE_HD uint32_t expert_at(uint32_t order) const {
        const uint32_t shared = shape_.num_shared;
        return order < shared ? shape_.local_experts() + order : order - shared;
    }

    MoEShape shape_;
    Rows rows_;
    uint32_t order_ = 0, expert_ = 0, expert_blocks_ = 0, of_expert_ = 0, block_ = 0;
};

// Blocks of a call.
template <class Rows>
MEGAMOE_HD uint32_t count_blocks(const MoEShape& shape, Rows rows) {
    uint32_t blocks = 0;
    for (uint32_t e = 0; e < shape.total_experts(); ++e)
        blocks += ExpertBlocks(shape, rows(e)).count();
    return blocks;
}

enum class TileKind : uint32_t { kLinear1, kLinear2, kDone };

// One unit of work. `block` counts through the call; add the call's block_base for the ring.
struct Tile {
    TileKind kind;
    uint32_t expert;
    uint32_t block;
    uint32_t first_row;  // in the expert
    uint32_t num_rows;   // 1..block_m
    uint32_t n;          // tile column
};

// The iterator over tiles, which the quicker forms below are held to. Tickets given to seek() must
// not decrease.
template <class Rows>
class TileWalk {
  public:
    MEGAMOE_HD TileWalk(const MoEShape& shape, Rows rows)
        : shape_(shape), rows_(rows), walk1_(shape, rows), walk2_(shape, rows) {
        have1_ = walk1_.next(wave1_);
        have2_ = walk2_.next(wave2_);
    }

    MEGAMOE_HD Tile seek(uint32_t ticket) {
        while (ticket >= segment_end_) {
            if (!next_segment()) return {TileKind::kDone, 0, 0, 0, 0, 0};
        }
        const uint32_t i = ticket - segment_begin_;
        const uint32_t m = i % segment_.num_blocks;
        const ExpertBlocks blocks(shape_, rows_(segment_.expert));
        const uint32_t of_expert = segment_.first_of_expert + m, row = blocks.begin(of_expert);
        return {kind_, segment_.expert,        segment_.first_block + m,
                row,   blocks.size(of_expert), i / segment_.num_blocks};
    }

  private:
    // Linear 2 of the oldest waiting wave, or Linear 1 of the next one.
    MEGAMOE_HD bool next_segment() {
        if (!have2_) return false;
        segment_begin_ = segment_end_;
        if (linear2_next()) {
            kind_ = TileKind::kLinear2;
            segment_ = wave2_;
            segment_end_ += wave2_.num_blocks * shape_.l2_tiles();
            have2_ = walk2_.next(wave2_);
        } else {
            kind_ = TileKind::kLinear1;
            segment_ = wave1_;
            segment_end_ += wave1_.num_blocks * shape_.l1_tiles();
            l1_end_ = wave1_.end_block();
            have1_ = walk1_.next(wave1_);
        }
        return true;
    }
    MEGAMOE_HD bool linear2_next() const {
        if (!have1_) return true;
        if (wave2_.first_block >= l1_end_) return false;
        const bool slots_needed = wave1_.end_block() > wave2_.first_block + shape_.ring_l2;
        return slots_needed || l1_end_ >= wave2_.end_block() + shape_.l2_lag;
    }

    MoEShape shape_;
    Rows rows_;
    WaveWalk<Rows> walk1_, walk2_;
    Wave wave1_{}, wave2_{}, segment_{};
    bool have1_ = false, have2_ = false;
    TileKind kind_ = TileKind::kDone;
    uint32_t segment_begin_ = 0, segment_end_ = 0, l1_end_ = 0;
};

// A place in the order of tickets.
struct Place {
    TileKind kind;
    uint32_t block;
    uint32_t n;
    uint32_t expert = 0;  // in the order of the walks; place_of_ticket leaves it open
};

// TileWalk by a table of where each expert's blocks begin, in the order of the walks, with the
// number of all blocks behind it: few steps from segment to segment, for a unit that has no time.
// What it remembers may lie elsewhere, for a unit that has no registers.
class PlaceWalk {
  public:
    // Blocks of one expert.
    struct Blocks {
        uint32_t expert, begin, end;
        MEGAMOE_HD uint32_t count() const { return end - begin; }
    };
    struct State {
        Blocks wave1, wave2;  // next of Linear 1, next of Linear 2; empty behind the last
        Blocks segment;
        TileKind kind;
        uint32_t segment_begin, segment_end;
    };

    MEGAMOE_HD PlaceWalk(const MoEShape& shape, const uint32_t* block_begin, uint32_t l1_tiles,
                         uint32_t l2_tiles, State& state)
        : shape_(shape),
          block_begin_(block_begin),
          l1_tiles_(l1_tiles),
          l2_tiles_(l2_tiles),
          s_(state) {}

    // First of all.
    MEGAMOE_HD void start() {
        s_ = State{};
        advance(s_.wave1);
        s_.wave2 = s_.wave1;
    }
    // Whether seek() would have to go back to this ticket.
    MEGAMOE_HD bool passed(uint32_t ticket) const { return ticket < s_.segment_begin; }
    // Tickets must not lie before the segment of the last one.
    MEGAMOE_HD Place seek(uint32_t ticket) {
        while (ticket >= s_.segment_end) {
            if (s_.wave2.count() == 0) return {TileKind::kDone, 0, 0, 0};
            next_segment();
        }
        const uint32_t i = ticket - s_.segment_begin, blocks = s_.segment.count();
        return {s_.kind, s_.segment.begin + i % blocks, i / blocks, s_.segment.expert};
    }

  private:
    MEGAMOE_HD void next_segment() {
        const bool linear2 = linear2_next();
        Blocks& wave = linear2 ? s_.wave2 : s_.wave1;
        s_.kind = linear2 ? TileKind::kLinear2 : TileKind::kLinear1;
        s_.segment = wave;
        s_.segment_begin = s_.segment_end;
        s_.segment_end += wave.count() * (linear2 ? l2_tiles_ : l1_tiles_);
        advance(wave);
    }
    // As in TileWalk: blocks before wave1 have had their Linear 1.
    MEGAMOE_HD bool linear2_next() const {
        if (s_.wave1.count() == 0) return true;
        if (s_.wave2.begin == s_.wave1.begin) return false;
        return s_.wave1.end > s_.wave2.begin + shape_.ring_l2 ||
               s_.wave1.begin >= s_.wave2.end + shape_.l2_lag;
    }
    MEGAMOE_HD void advance(Blocks& wave) const {
        uint32_t expert = wave.expert;
        const uint32_t begin = wave.end;
        while (expert < shape_.total_experts() && block_begin_[expert + 1] == begin) ++expert;
        const uint32_t left =
            expert < shape_.total_experts() ? block_begin_[expert + 1] - begin : 0;
        wave = {expert, begin, begin + (left < shape_.wave_blocks ? left : shape_.wave_blocks)};
    }

    const MoEShape& shape_;
    const uint32_t* block_begin_;
    uint32_t l1_tiles_, l2_tiles_;
    State& s_;
};

// Linear 2 of a block comes when so many blocks have had their Linear 1, itself among them; for
// waves of one block.
MEGAMOE_HD constexpr uint32_t linear1_ahead(const MoEShape& s) {
    return s.l2_lag + 1 < s.ring_l2 ? s.l2_lag + 1 : s.ring_l2;
}

// Where TileWalk leads when every wave is one block, without walking there: `ahead` blocks begin
// with Linear 1; then Linear 2 of a block and Linear 1 of the next new one take turns; what is left
// of Linear 2 ends the call.
MEGAMOE_HD constexpr Place place_of_ticket(uint32_t ticket, uint32_t num_blocks, uint32_t ahead,
                                           uint32_t l1_tiles, uint32_t l2_tiles) {
    if (ahead > num_blocks) ahead = num_blocks;
    if (ticket < ahead * l1_tiles)
        return {TileKind::kLinear1, ticket / l1_tiles, ticket % l1_tiles};
    ticket -= ahead * l1_tiles;
    const uint32_t both = l1_tiles + l2_tiles, turns = num_blocks - ahead, turn = ticket / both;
    if (turn < turns) {
        const uint32_t n = ticket % both;
        if (n < l2_tiles) return {TileKind::kLinear2, turn, n};
        return {TileKind::kLinear1, ahead + turn, n - l2_tiles};
    }
    ticket -= turns * both;
    const uint32_t block = turns + ticket / l2_tiles;
    if (block >= num_blocks) return {TileKind::kDone, 0, 0};
    return {TileKind::kLinear2, block, ticket % l2_tiles};
}

}  // namespace megamoe
