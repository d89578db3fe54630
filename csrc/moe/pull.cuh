// Pull: one warp of each CTA copies rows from peers' inputs into the L1 ring, in ticket order.
//
// A row travels as pieces of at most kMostPiece, peer -> shared memory -> ring, all but one
// buffer on their way in while a piece is on its way out. Rows are announced a few pieces later,
// when their last piece has been written; all are announced before the warp blocks on a ring slot,
// because that slot may depend on them. In a small call the math warps, which have nothing to do
// yet, copy the rows instead.
#pragma once

#include "moe/dispatch.cuh"

namespace megamoe::moe {

struct FoundRow {
    PullJob job;
    uint32_t block, source;
};
// A row of the call: its expert, by bisection, and its place in the ring.
MEGAMOE_DEVICE FoundRow find_row(const MoEParams& p, SharedStorage& s, uint32_t row) {
    const uint32_t at = expert_of(p, s.row_begin, row), expert = expert_at(p, s, at);
    const uint32_t block_m = p.shape.block_m, of_expert = row - s.row_begin[at];
    const RowSource from = row_source(p, s, expert, of_expert);
    const ExpertBlocks blocks = blocks_of(p, s, at);
    const uint32_t block_of_expert = blocks.of(of_expert);
    const uint32_t block = s.block_begin[at] + block_of_expert;
    const uint32_t in_block = of_expert - blocks.begin(block_of_expert);
    const L1Slot slot = l1_slot_of(p, s.call, block);
    // The block's last row brings its padding with it.
    const bool last = in_block + 1 == blocks.size(block_of_expert);
    return {{p.at(from.rank, Region::kInput, from.token),
             p.at(from.rank, Region::kInputScale, from.token), in_block,
             uint16_t(last ? block_m - in_block : 1), block < p.shape.ring_l1, slot.slot,
             slot.free_target},
            block,
            from.rank};
}

// Rows that the math warps copy before their first tile: all of a small call's, which then arrive
// sooner, or none. Those beyond the ring's first turn would have to wait, which a math warp must
// not.
inline constexpr uint32_t kFirstRows = 2;  // of a warp
MEGAMOE_DEVICE uint32_t first_rows(const MoEParams& p, const SharedStorage& s) {
    const uint32_t rows = s.row_begin[p.shape.total_experts()], ring = p.shape.ring_l1;
    if (rows > kFirstRows * kMathWarps * gridDim.x) return 0;
    if (s.call.num_blocks <= ring) return rows;
    const uint32_t at = expert_of(p, s.block_begin, ring);
    const ExpertBlocks blocks = blocks_of(p, s, at);
    return s.row_begin[at] + blocks.begin(ring - s.block_begin[at]);
}

class Puller {
  public:
    MEGAMOE_DEVICE Puller(const MoEParams& p, SharedStorage& s) : p_(p), s_(s) {}

    // The rows of the call, in the order of the walks, are dealt to the CTAs in turn; the first may
    // be the math warps'.
    MEGAMOE_DEVICE void run() {
        ptx::fence_proxy_async();  // peers' rows, acquired with their counts: hand-off 3
        const uint32_t rows = s_.row_begin[p_.shape.total_experts()];
        bool ok = true;
        for (uint32_t first = first_rows(p_, s_) + blockIdx.x; ok && first < rows;
             first += kPullJobs * gridDim.x)
            ok = copy(first, min(kPullJobs, ceil_div(rows - first, gridDim.x)));
        if (ptx::lane() == 0) s_.call.trace.stamp(kTracePulled);
    }

  private:
    MEGAMOE_DEVICE PullJob find(uint32_t row) {
        const FoundRow found = find_row(p_, s_, row);
        s_.call.trace.note_job(ptx::lane(), found.block, found.source);
        return found.job;
    }

    // Copies n rows of the call: first, first + gridDim.x, …
    MEGAMOE_DEVICE bool copy(uint32_t first, uint32_t n) {
        __syncwarp();
        if (ptx::lane() < n) s_.job[ptx::lane()] = find(first + ptx::lane() * gridDim.x);
        __syncwarp();
        in_ = out_ = announced_ = 0;
        bool ok = true;
        if (ptx::lane() == 0) s_.call.trace.begin(TraceKind::kPull);
        for (const uint32_t end = n * kPieces; in_ < end; ++in_) {
            if (in_ % kPieces == 0 && !(ok = claim_slot(s_.job[in_ / kPieces]))) break;
            if (in_ - out_ == kPullBuffers - 1) {
                store_piece();
                if (ptx::lane() == 0) {
                    ptx::bulk_wait<2>();       // all but the last two pieces are in the ring
                    ptx::bulk_wait_read<1>();  // the buffer of the next piece has been read
                }
                if (out_ >= 2) announce((out_ - 2) / kPieces);
            }
            load_piece();
        }
        drain();
        s_.call.trace.end_jobs(s_.job, first, n, announced_);
        return ok;
    }
    // The ring slot that the row goes to. Before blocking, announces what has been copied.
    MEGAMOE_DEVICE bool claim_slot(const PullJob& job) {
        if (job.is_free) return true;
        const uint32_t* word = p_.word(Region::kL1Empty, job.slot);
        uint32_t have = 0;
        if (ptx::lane() == 0) have = ptx::load_acquire_gpu(word);
        uint32_t ok = reached(ptx::from_lane_0(have), job.free_target);
        if (!ok) {
            drain();
            if (ptx::lane() == 0)
                ok = wait_word<Compare::kReached, Scope::kGpu>(
                    p_, s_.call, word, job.free_target,
                    {Role::kDispatch, Phase::kPull, Tag::kL1Empty, blockIdx.x, p_.rank, job.slot});
            ok = ptx::from_lane_0(ok);
        }
        ptx::fence_proxy_async();  // hand-off 5
        return ok;
    }
    MEGAMOE_DEVICE void load_piece() {
        const uint32_t buffer = in_ % kPullBuffers, piece = in_ % kPieces;
        const PullJob& job = s_.job[in_ / kPieces];
        if (ptx::lane() != 0) return;
        const uint32_t at = piece * kPieceBytes, bytes = min(kPieceBytes, kXRowBytes - at);
        const uint32_t scales = kBulkScales && piece + 1 == kPieces ? kXGroups * 4 : 0;
        uint64_t& full = s_.pull_full[buffer];
        ptx::arrive_expect(full, bytes + scales);
        ptx::bulk_load(s_.pull[buffer], job.x + at, bytes, full);
        if (scales) ptx::bulk_load(s_.pull_scale[buffer], job.x_scale, scales, full);
    }
    MEGAMOE_DEVICE void store_piece() {
        const uint32_t buffer = out_ % kPullBuffers, piece = out_ % kPieces;
        const PullJob& job = s_.job[out_ / kPieces];
        // Loads always arrive: this wait needs no limit.
        while (!ptx::try_wait(s_.pull_full[buffer], phases_ >> buffer & 1)) {
        }
        phases_ ^= 1u << buffer;
        if (ptx::lane() == 0) {
            const uint32_t at = piece * kPieceBytes;
            const uint64_t row = uint64_t(job.slot) * p_.shape.block_m + job.in_block;
            ptx::bulk_store(p_.at(p_.rank, Region::kL1Ring, row) + at, s_.pull[buffer],
                            min(kPieceBytes, kXRowBytes - at));
            ptx::bulk_commit();
        }
        if (kFp8 && piece + 1 == kPieces) store_scales(buffer, job);
        ++out_;
    }
    // Into [slot][H/128][block_m], where a stage finds the scales of its rows side by side.
    MEGAMOE_DEVICE void store_scales(uint32_t buffer, const PullJob& job) {
        const uint32_t block_m = p_.shape.block_m;
        float* to = p_.ptr<float>(p_.rank, Region::kL1Scale) +
                    uint64_t(job.slot) * kXGroups * block_m + job.in_block;
        const float* from = reinterpret_cast<const float*>(job.x_scale);
        for (uint32_t g = ptx::lane(); g < kXGroups; g += 32)
            to[g * block_m] = kBulkScales ? s_.pull_scale[buffer][g] : __ldcg(from + g);
    }
    // Rows before `limit` are in the ring.
    MEGAMOE_DEVICE void announce(uint32_t limit) {
        __syncwarp();
        for (; announced_ < limit; ++announced_) {
            const PullJob& job = s_.job[announced_];
            if (ptx::lane() != 0) continue;
            ptx::add_release_gpu(p_.word(Region::kL1Full, job.slot), job.weight);
            s_.call.trace.job_ready(announced_);
        }
    }
    MEGAMOE_DEVICE void drain() {
        while (out_ < in_) store_piece();
        if (ptx::lane() == 0) ptx::bulk_wait<0>();
        announce(out_ / kPieces);
    }

    const MoEParams& p_;
    SharedStorage& s_;
    uint32_t in_ = 0, out_ = 0, announced_ = 0;  // pieces asked for, stored; rows announced
    uint32_t phases_ = 0;                        // of pull_full, a bit each
};

// The math warps' first rows, by loads and stores of all lanes: fewer steps, one after the other,
// than bulk copies take, and these warps have the registers for a whole row on its way.
class FirstRows {
  public:
    MEGAMOE_DEVICE FirstRows(const MoEParams& p, SharedStorage& s) : p_(p), s_(s) {}

    MEGAMOE_DEVICE void run() {
        const uint32_t limit = first_rows(p_, s_);
        const uint32_t first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
        const uint32_t step = kMathWarps * gridDim.x;
        const uint64_t begin = kTrace ? ptx::now_ns() : 0;
        for (uint32_t row = first; row < limit; row += step) {
            const FoundRow found = find_row(p_, s_, row);
            copy(found.job);
            if (ptx::lane() != 0) continue;
            ptx::add_release_gpu(p_.word(Region::kL1Full, found.job.slot), found.job.weight);
            s_.call.trace.row_ready(found.block, found.job.weight, found.source);
        }
        if (kTrace && limit > 0) {
            ptx::named_barrier<kMathThreads>(kMathBarrier);  // the event holds all warps' rows
            if (threadIdx.x == 0 && limit > blockIdx.x)
                s_.call.trace.record(TraceRole::kMath, TraceKind::kPull, begin, ptx::now_ns(),
                                     blockIdx.x, ceil_div(limit - blockIdx.x, gridDim.x));
        }
    }

  private:
    static constexpr uint32_t kChunks = kXRowBytes / 16, kAtOnce = 16;
    static constexpr uint32_t kScales = ceil_div(kXGroups, 32);

    // Past L1, which may hold what a peer, or this rank, had there before.
    MEGAMOE_DEVICE void copy(const PullJob& job) {
        const uint32_t lane = ptx::lane(), block_m = p_.shape.block_m;
        const uint4* from = reinterpret_cast<const uint4*>(job.x);
        const float* from_scale = reinterpret_cast<const float*>(job.x_scale);
        const uint64_t row = uint64_t(job.slot) * block_m + job.in_block;
        uint4* to = reinterpret_cast<uint4*>(p_.at(p_.rank, Region::kL1Ring, row));
        float* to_scale = p_.ptr<float>(p_.rank, Region::kL1Scale) +
                          uint64_t(job.slot) * kXGroups * block_m + job.in_block;
        float scale[kScales];
#pragma unroll
        for (uint32_t i = 0; kFp8 && i < kScales; ++i)
            if (i * 32 + lane < kXGroups) scale[i] = __ldcg(from_scale + i * 32 + lane);
        for (uint32_t i0 = lane; i0 < kChunks; i0 += 32 * kAtOnce) {
            uint4 v[kAtOnce];
#pragma unroll
            for (uint32_t u = 0; u < kAtOnce; ++u)
                if (i0 + u * 32 < kChunks) v[u] = __ldcg(from + i0 + u * 32);
#pragma unroll
            for (uint32_t u = 0; u < kAtOnce; ++u)
                if (i0 + u * 32 < kChunks) to[i0 + u * 32] = v[u];
        }
#pragma unroll
        for (uint32_t i = 0; kFp8 && i < kScales; ++i)
            if (i * 32 + lane < kXGroups) to_scale[(i * 32 + lane) * block_m] = scale[i];
        __syncwarp();
    }

    const MoEParams& p_;
    SharedStorage& s_;
};

}  // namespace megamoe::moe
