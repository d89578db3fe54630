// Pull: one warp of each CTA copies rows from peers' inputs into the L1 ring, in ticket order.
//
// A row travels as pieces of at most 4 KB, peer -> shared memory -> ring, with three pieces
// on their way in while a fourth is on its way out. Rows are announced a few pieces later, when
// their last piece has been written; all are announced before the warp blocks on a ring slot,
// because that slot may depend on them.
#pragma once

#include "moe/dispatch.cuh"

namespace megamoe::moe {

class Puller {
  public:
    MEGAMOE_DEVICE Puller(const MoEParams& p, SharedStorage& s) : p_(p), s_(s) {}

    // The rows of the call, in the order of the walks, are dealt to the CTAs in turn.
    MEGAMOE_DEVICE void run() {
        ptx::fence_proxy_async();  // peers' rows, acquired with their counts: hand-off 3
        const uint32_t rows = s_.row_begin[p_.shape.total_experts()];
        bool ok = true;
        for (uint32_t first = blockIdx.x; ok && first < rows; first += kPullJobs * gridDim.x)
            ok = copy(first, min(kPullJobs, ceil_div(rows - first, gridDim.x)));
        if (ptx::lane() == 0) s_.call.trace.stamp(kTracePulled);
    }

  private:
    // Finds a row of the call: its expert, by bisection, and its place in the ring.
    MEGAMOE_DEVICE PullJob find(uint32_t row) {
        uint32_t low = 0, high = p_.shape.total_experts();  // row_begin[low] <= row < [high]
        while (high - low > 1) {
            const uint32_t middle = (low + high) / 2;
            if (s_.row_begin[middle] <= row)
                low = middle;
            else
                high = middle;
        }
        const uint32_t expert = expert_at(p_, low), block_m = p_.shape.block_m;
        const uint32_t of_expert = row - s_.row_begin[low], block = of_expert / block_m;
        const RowSource from = row_source(p_, s_, expert, of_expert);
        const L1Slot slot = l1_slot(p_.shape, s_.call.block_base + s_.block_begin[low] + block);
        const uint32_t in_block = of_expert % block_m;
        s_.call.trace.note_job(ptx::lane(), s_.block_begin[low] + block, from.rank);
        const bool last = of_expert + 1 == s_.rows[expert];  // brings the block's padding with it
        return {p_.at(from.rank, Region::kInput, from.token),
                p_.at(from.rank, Region::kInputScale, from.token),
                in_block,
                last ? block_m - in_block : 1,
                slot.slot,
                slot.free_target};
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

}  // namespace megamoe::moe
