// Combine with many tokens: each math warp has tokens of its own, whose slots stream through a ring
// in the memory of the stages, which tiles no longer need. While a piece is added, the next ones
// are on their way, those of the next token too: 160 KB per SM, where memory's bandwidth takes 48
// (4.2 TB/s times 1.5 us over 132 SMs).
#pragma once

#include "moe/shared.cuh"

namespace megamoe::moe {

inline constexpr uint32_t kWarpColumns = 32 * 8;  // a lane takes 8 columns at a time

// Chunks of kWarpColumns in a piece of a slot: the largest number above half of the most that
// divides the slot's; else all of a short slot, or the most, and the slot's last piece is shorter.
// Large pieces, because keeping the ring's books takes longer than adding 2 KB.
MEGAMOE_HD constexpr uint32_t piece_chunks(uint32_t most) {
    const uint32_t chunks = ceil_div(kHidden, kWarpColumns);
    for (uint32_t n = most; 2 * n > most; --n)
        if (chunks % n == 0) return n;
    return chunks < most ? chunks : most;
}
inline constexpr uint32_t kPieceChunks = piece_chunks(8);
inline constexpr uint32_t kPieceColumns = kPieceChunks * kWarpColumns;
inline constexpr uint32_t kSlotPieces = ceil_div(kHidden, kPieceColumns);
inline constexpr uint32_t kSlotPieceBytes = kPieceColumns * 2;
// A warp's ring of pieces; its barriers lie at the end.
inline constexpr uint32_t kSlotRingBytes = 24 << 10, kSlotBarrierBytes = 32 * 8;
inline constexpr uint32_t kSlotRing = (kSlotRingBytes - kSlotBarrierBytes) / kSlotPieceBytes < 32
                                          ? (kSlotRingBytes - kSlotBarrierBytes) / kSlotPieceBytes
                                          : 32;
static_assert(kMathWarps * kSlotRingBytes <= sizeof(SharedStorage::w) + sizeof(SharedStorage::x));

// Adds a slot's 8 columns: the contract's fma chain.
MEGAMOE_DEVICE void add_slot(float (&sum)[8], const uint4& v, float weight) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        sum[2 * k] = fmaf(weight, __uint_as_float(word[k] << 16), sum[2 * k]);
        sum[2 * k + 1] = fmaf(weight, __uint_as_float(word[k] & 0xffff0000u), sum[2 * k + 1]);
    }
}

MEGAMOE_DEVICE void store_sum(const MoEParams& p, uint32_t token, uint32_t column,
                              const float (&sum)[8]) {
    const uint32_t out[4] = {ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]),
                             ptx::pack_bf16(sum[4], sum[5]), ptx::pack_bf16(sum[6], sum[7])};
    ptx::store_u128(p.y + (uint64_t(token) * kHidden + column) * 2, out);
}

// A bit for each route of the token that is not masked.
MEGAMOE_DEVICE uint32_t routes_of(const MoEParams& p, uint32_t token) {
    constexpr uint32_t kAtOnce = 8;
    const int32_t* ids = p.topk_idx + uint64_t(token) * p.shape.topk;
    uint32_t routes = 0;
    for (uint32_t j0 = 0; j0 < p.shape.topk; j0 += kAtOnce) {
        int32_t id[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
            id[i] = j0 + i < p.shape.topk ? __ldg(ids + j0 + i) : -1;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) routes |= uint32_t(id[i] >= 0) << (j0 + i);
    }
    return routes;
}

// A warp's tokens, up to 32 at a time, and the ring that their slots pass through. Those that are
// there come first. All lanes keep the books, lane 0 asks for pieces.
class SlotStream {
  public:
    MEGAMOE_DEVICE SlotStream(const MoEParams& p, SharedStorage& s, uint32_t warp)
        : p_(p),
          s_(s),
          full_(reinterpret_cast<uint64_t*>(reinterpret_cast<uint8_t*>(&s) +
                                            (warp + 1) * kSlotRingBytes - kSlotBarrierBytes)),
          ring_(kWAddress + warp * kSlotRingBytes) {
        if (ptx::lane() < kSlotRing) ptx::barrier_init(full_[ptx::lane()], 1);
        ptx::barrier_init_fence();
        __syncwarp();
    }

    // The tokens first, first + stride, ...: 32 of them, or all. The ring is empty.
    MEGAMOE_DEVICE void begin(uint32_t first, uint32_t stride) {
        const uint32_t num = min(32, ceil_div(p_.num_tokens - first, stride));
        token_ = first + min(ptx::lane(), num - 1) * stride;
        ptx::prefetch_l2(p_.topk_weight + uint64_t(token_) * p_.shape.topk);
        routes_ = routes_of(p_, token_);
        all_ = todo_ = ~0u >> (32 - num);
        here_ = opened_ = done_ = 0;
        slots_ = left_ = 0;
        look();
        looked_ = 0;
    }
    // False when no token is left. The caller sums it whole.
    MEGAMOE_DEVICE bool next(uint32_t& token, uint64_t& slots) {
        fill();
        while (done_ == opened_) {
            if (todo_ == 0) return false;
            const uint32_t k = __ffs(todo_) - 1;
            if (!wait(k)) {
                todo_ ^= 1u << k;
                continue;
            }
            look();
            fill();
        }
        const uint32_t k = __shfl_sync(~0u, order_, done_++);
        token = __shfl_sync(~0u, token_, k);
        slots = slots_of(k);
        return true;
    }
    // The next piece: this lane's columns of each chunk. Of columns beyond the slot, garbage.
    MEGAMOE_DEVICE void take(uint4 (&v)[kPieceChunks]) {
        while (!ptx::try_wait(full_[tail_.slot], tail_.phase)) {
        }
        const uint32_t from = ring_ + tail_.slot * kSlotPieceBytes + ptx::lane() * 16;
#pragma unroll
        for (uint32_t c = 0; c < kPieceChunks; ++c)
            v[c] = ptx::load_shared4(from + c * kWarpColumns * 2);
        __syncwarp();  // all lanes have read the piece: lane 0 may ask for another in its place
        tail_.advance();
        --pieces_;
        fill();
    }
    // Counts that were seen start at zero in the next call.
    MEGAMOE_DEVICE void end() {
        if ((all_ & here_) >> ptx::lane() & 1) *p_.word(Region::kTokenArrived, token_) = 0;
    }

  private:
    // Every lane at its own token's count.
    MEGAMOE_DEVICE void look() {
        const uint32_t have = ptx::load_acquire_sys(p_.word(Region::kTokenArrived, token_));
        here_ |= __ballot_sync(~0u, have == __popc(routes_) + p_.shape.num_shared);
        __syncwarp();
        ptx::fence_proxy_async();
    }
    MEGAMOE_DEVICE bool wait(uint32_t k) {
        const uint32_t token = __shfl_sync(~0u, token_, k);
        const uint32_t want = __popc(__shfl_sync(~0u, routes_, k)) + p_.shape.num_shared;
        uint32_t ok = 0;
        if (ptx::lane() == 0)
            ok = wait_word<Compare::kEqual, Scope::kSystem>(
                p_, s_.call, p_.word(Region::kTokenArrived, token), want,
                {Role::kCombine, Phase::kReduce, Tag::kTokenArrived, blockIdx.x, p_.rank, token});
        return ptx::from_lane_0(ok);
    }
    MEGAMOE_DEVICE uint64_t slots_of(uint32_t k) const {
        return __shfl_sync(~0u, routes_, k) | ((uint64_t(1) << p_.shape.num_shared) - 1)
                                                  << p_.shape.topk;
    }
    // Asks for pieces until the ring is full or no token is there.
    MEGAMOE_DEVICE void fill() {
        while (pieces_ < kSlotRing) {
            while (left_ == 0) {
                if (slots_ != 0 && ++piece_ < kSlotPieces)
                    left_ = slots_;
                else if (!open())
                    return;
            }
            const uint32_t slot = __ffsll(left_) - 1;
            left_ &= left_ - 1;
            if (ptx::lane() == 0) {
                const uint32_t column = piece_ * kPieceColumns;
                const uint32_t bytes = min(kPieceColumns, kHidden - column) * 2;
                uint64_t& full = full_[head_.slot];
                ptx::arrive_expect(full, bytes);
                ptx::bulk_load(ring_ + head_.slot * kSlotPieceBytes,
                               from_ + slot * slot_stride() + column * 2, bytes, full);
            }
            head_.advance();
            ++pieces_;
        }
    }
    // The next token to ask for. If none is there, counts are looked at once more, and then only
    // when the ring is empty.
    MEGAMOE_DEVICE bool open() {
        slots_ = 0;
        if ((todo_ & here_) == 0) {
            if (todo_ == 0 || looked_ == opened_) return false;
            looked_ = opened_;
            look();
            if ((todo_ & here_) == 0) return false;
        }
        const uint32_t k = __ffs(todo_ & here_) - 1;
        todo_ ^= 1u << k;
        if (ptx::lane() == opened_) order_ = k;
        ++opened_;
        slots_ = left_ = slots_of(k);
        piece_ = 0;
        from_ = p_.at(p_.rank, Region::kCombine, __shfl_sync(~0u, token_, k));
        return true;
    }
    MEGAMOE_DEVICE uint64_t slot_stride() const {
        return uint64_t(p_.shape.max_tokens) * kHidden * 2;
    }

    const MoEParams& p_;
    SharedStorage& s_;
    uint64_t* full_;
    uint32_t ring_;
    // Of this lane: its token, and which one is the lane'th to be summed.
    uint32_t token_, routes_, order_ = 0;
    uint32_t all_, todo_, here_;  // a bit per token: in use; not asked for yet; all slots are there
    uint32_t opened_, done_;      // tokens asked for, summed
    uint32_t looked_;             // opened_ at the last look
    // What is asked for next: slots of the token, those of them left of this piece.
    uint64_t slots_, left_;
    uint32_t piece_;
    const uint8_t* from_;
    Cursor<kSlotRing> head_, tail_;
    uint32_t pieces_ = 0;  // in the ring
};

MEGAMOE_DEVICE void combine_many(const MoEParams& p, SharedStorage& s) {
    // No tile of this CTA reads stages any more, nor is anything on its way into them, unless the
    // call is given up: then y is void.
    ptx::named_barrier<kMathThreads>(kMathBarrier);
    if (ptx::from_lane_0(stopped(s.call))) return;
    const uint32_t lane = ptx::lane(), warp = threadIdx.x / 32, topk = p.shape.topk;
    const uint32_t stride = kMathWarps * gridDim.x;
    SlotStream stream(p, s, warp);
    for (uint32_t first = warp * gridDim.x + blockIdx.x; first < p.num_tokens;
         first += 32 * stride) {
        stream.begin(first, stride);
        uint32_t token;
        uint64_t slots;
        while (stream.next(token, slots)) {
            const float mine =
                lane < topk ? __ldg(p.topk_weight + uint64_t(token) * topk + lane) : 1.f;
#pragma unroll 1
            for (uint32_t piece = 0; piece < kSlotPieces; ++piece) {
                float sum[kPieceChunks][8] = {};
#pragma unroll 1
                for (uint64_t left = slots; left != 0; left &= left - 1) {
                    const uint32_t slot = __ffsll(left) - 1;
                    uint4 v[kPieceChunks];
                    stream.take(v);
                    const float weight = slot < topk ? __shfl_sync(~0u, mine, slot) : 1.f;
#pragma unroll
                    for (uint32_t c = 0; c < kPieceChunks; ++c) add_slot(sum[c], v[c], weight);
                }
                const uint32_t column = piece * kPieceColumns + lane * 8;
#pragma unroll
                for (uint32_t c = 0; c < kPieceChunks; ++c)
                    if (column + c * kWarpColumns < kHidden)
                        store_sum(p, token, column + c * kWarpColumns, sum[c]);
            }
        }
        stream.end();
    }
}

}  // namespace megamoe::moe
