// Tickets: which tile a CTA works on next, one after another.
//
// One stream: all CTAs take tickets of one sequence (schedule.hpp). Two streams: L2 has two halves,
// and a line that an SM reads from the far one comes over the link between them. So the SMs near
// each half have a stream of their own, with every other tile column: all tiles that share weights
// run near one half. A CTA whose stream is handed out takes what is left of the other.
#pragma once

#include "moe/dispatch.cuh"

namespace megamoe::moe {

// Streams that a launch may ask for. Columns are dealt in pairs. And a CTA that turns to the other
// stream must not wait for tiles which it has then queued behind its last one (docs/protocol.md):
// that one's activations have come, because it has more stages than there are, all filled.
inline constexpr bool kInPairs = kL1Tiles % 2 == 0 && kL2Tiles % 2 == 0;
inline constexpr bool kManyStages = (kKBlocks1 > kStages) && (kKBlocks2 > kStages);
inline constexpr uint32_t kMostStreams = kInPairs && kManyStages ? 2 : 1;

MEGAMOE_DEVICE uint32_t half_of_sm(const MoEParams& p) {
    const uint32_t sm = ptx::sm_id();
    return p.near_half[sm / 32] >> sm % 32 & 1;
}

// Of one thread. With waves of one block tiles are worked out, not walked to: a walk passes every
// expert, active or not, which takes microseconds to a first tile.
class Tickets {
  public:
    MEGAMOE_DEVICE Tickets(const MoEParams& p, SharedStorage& s)
        : p_(p),
          s_(s),
          walk_(p.shape, s.block_begin, of_stream(kL1Tiles), of_stream(kL2Tiles), s.walk) {
        if (walks()) walk_.start();
        if (num_streams() == 1) return;
        stream_ = half_of_sm(p);
        draw();
    }
    // Takes the next ticket. It is not touched before it is needed: whoever did would wait for it.
    MEGAMOE_DEVICE void draw() {
        drawn_ = ptx::fetch_add_relaxed_gpu(&p_.control(p_.rank).ticket[stream_].value, 1);
    }
    // The tile of the ticket.
    MEGAMOE_DEVICE Tile next() {
        if (num_streams() == 2) look_for_end();
        const uint32_t ticket = drawn_ + (num_streams() == 1 ? gridDim.x : 0);
        const Place at = walks() ? walk_.seek(ticket) : find(ticket);
        if (at.kind == TileKind::kDone) return {TileKind::kDone, 0, 0, 0, 0, 0};
        const uint32_t expert = expert_at(p_, s_, at.expert);
        const uint32_t block = at.block - s_.block_begin[at.expert];
        const ExpertBlocks blocks = blocks_of(p_, s_, at.expert);
        const uint32_t n = num_streams() == 1 ? at.n : at.n * 2 + stream_;
        return {at.kind, expert, at.block, blocks.begin(block), blocks.size(block), n};
    }

  private:
    MEGAMOE_DEVICE uint32_t num_streams() const { return kMostStreams == 1 ? 1 : p_.num_streams; }
    MEGAMOE_DEVICE uint32_t of_stream(uint32_t tiles) const {
        return num_streams() == 1 ? tiles : tiles / 2;
    }
    MEGAMOE_DEVICE bool walks() const { return p_.shape.wave_blocks > 1; }
    MEGAMOE_DEVICE Place find(uint32_t ticket) const {
        Place at = place_of_ticket(ticket, s_.call.num_blocks, linear1_ahead(p_.shape), kL1Tiles,
                                   kL2Tiles);
        if (at.kind != TileKind::kDone) at.expert = expert_of(p_, s_.block_begin, at.block);
        return at;
    }
    // Turns to the other stream if the own one has no such ticket; once. The walk mostly goes on:
    // it stands at this CTA's last tile. The other stream may be further behind, and to walk there
    // from the first expert takes long: so where the walk stood some tiles before the end is kept.
    MEGAMOE_DEVICE void look_for_end() {
        const uint32_t end = s_.call.num_blocks * of_stream(kL1Tiles + kL2Tiles);
        if (end_ == End::kFar && drawn_ + 2 * gridDim.x >= end) {
            s_.walk_kept = s_.walk;
            end_ = End::kNear;
        }
        if (end_ != End::kNear || drawn_ < end) return;
        end_ = End::kPassed;
        stream_ ^= 1;
        draw();
        if (walk_.passed(drawn_)) s_.walk = s_.walk_kept;
        if (walk_.passed(drawn_)) walk_.start();
    }

    enum class End : uint32_t { kFar, kNear, kPassed };  // of the own stream

    const MoEParams& p_;
    SharedStorage& s_;
    PlaceWalk walk_;
    uint32_t stream_ = 0;
    End end_ = End::kFar;
    // Of one stream the first tickets are dealt, and their weights wait for no answer.
    uint32_t drawn_ = blockIdx.x - gridDim.x;
};

}  // namespace megamoe::moe
