// Many rows: tokens on the M side, 64 rows for each math warpgroup, weights on the N side.
//
// A warpgroup's 64 x 256 tile is two m64n128 chunks that share one temporary: 128 accumulators and
// 64 partial sums a thread. A row's 128 columns of the intermediate stay in one warpgroup, so its
// amax needs quad shuffles only. The next stage is awaited, and its scales are read, while the last
// wgmmas of this one run.
#pragma once

#include "device/wgmma.cuh"
#include "moe/shared.cuh"

namespace megamoe::moe {

inline constexpr int kChunkN = 128;
using ManyAccumulators = float[2][kChunkN / 2];

// acc[c][i]: row (i / 2) % 2 * 8 + lane / 4 of the warp's 16, weight row
// c * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2 of the tile.
class MainloopMany {
  public:
    MEGAMOE_DEVICE MainloopMany(SharedStorage& s, bool linear1, const float* w_scale,
                                uint32_t warpgroup)
        : s_(s),
          linear1_(linear1),
          num_blocks_(linear1 ? kKBlocks1 : kKBlocks2),
          w_scale_(ptx::shared_address(w_scale)),
          x_(wgmma::operand(kXAddress) + warpgroup * (8192 / 16)),
          x_scale_(ptx::shared_address(s.x_scale[0]) +
                   (warpgroup * 64 + threadIdx.x / 32 % 4 * 16 + ptx::lane() / 4) * 4) {}

    MEGAMOE_DEVICE void run(ManyAccumulators& acc, Cursor<kStages>& position) {
        Cursor<kStages> at = position;
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int i = 0; i < kChunkN / 2; ++i) acc[c][i] = 0.f;
        // When every task has an even number of blocks, each starts at stage 0 or 2, and two steps
        // make a loop body. (Four spill; one is 2 % slower.)
        constexpr bool kUnroll = kKBlocks1 % 2 == 0 && kKBlocks2 % 2 == 0;
        constexpr uint32_t kStep = kUnroll || !kFp8 ? 2 : 1;
        {
            TraceSpan span(s_.call.trace, kTraceTask, threadIdx.x == 0);
            wait_or_stop(s_.stage_full[at.slot], at.phase, s_.call);
        }
        load_scales(at.slot, 0);
#pragma unroll 1
        for (uint32_t kb = 0; kb < num_blocks_; kb += kStep) {
            const bool more = kb + kStep < num_blocks_;
            if constexpr (kUnroll) {
                static_assert(kStages == 4);
                const uint32_t st = at.slot;
                const uint32_t next = st ^ 2, next_phase = at.phase ^ (st == 2);
                if constexpr (kFp8) {
                    step(acc, st, st, kb + 1, true, st + 1, at.phase);
                    step(acc, st + 1, st + 1, kb + 2, more, next, next_phase);
                } else {
                    wait_or_stop(s_.stage_full[st + 1], at.phase, s_.call);
                    step(acc, st, st + 1, kb + 2, more, next, next_phase);
                }
                at = {next, next_phase};
            } else {
                const uint32_t first = at.slot;
                at.advance();
                uint32_t second = first;
                if constexpr (!kFp8) {
                    second = at.slot;
                    wait_or_stop(s_.stage_full[second], at.phase, s_.call);
                    at.advance();
                }
                step(acc, first, second, kb + kStep, more, at.slot, at.phase);
            }
        }
        __syncwarp();
        position = at;
    }

  private:
    MEGAMOE_DEVICE void load_scales(uint32_t stage, uint32_t kb) {
        if constexpr (!kFp8) return;
        row0_ = ptx::load_shared(x_scale_ + stage * (kMaxBlockM * 4));
        row1_ = ptx::load_shared(x_scale_ + stage * (kMaxBlockM * 4) + 32);
        const float2 w = ptx::load_shared2(w_scale_ + kb * 8);
        col0_ = w.x;
        col1_ = w.y;
    }
    // A 128-wide block of K: stage `first`, and for BF16 also `second`. Then the stage after it.
    MEGAMOE_DEVICE void step(ManyAccumulators& acc, uint32_t first, uint32_t second,
                             uint32_t next_kb, bool more, uint32_t next, uint32_t next_phase) {
        // Opaque, or the compiler computes every descriptor before the loop and spills them.
        asm volatile("" : "+r"(x_));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float part[kChunkN / 2];
            wgmma::pin(part);
            wgmma::fence();
            issue(part, c, first, false);
            if constexpr (!kFp8) issue(part, c, second, true);
            wgmma::commit();
            // Scale of the even and of the odd groups of 8 columns. Linear 1: gate and up.
            const float even = !linear1_ && c == 1 ? col1_ : col0_;
            const float odd = !linear1_ && c == 0 ? col0_ : col1_;
            const float scale[2][2] = {{__fmul_rn(row0_, even), __fmul_rn(row0_, odd)},
                                       {__fmul_rn(row1_, even), __fmul_rn(row1_, odd)}};
            if (c == 1 && more) {
                TraceSpan span(s_.call.trace, kTraceMath, threadIdx.x == 0);
                wait_or_stop(s_.stage_full[next], next_phase, s_.call);
                load_scales(next, next_kb);
            }
            wgmma::wait<0>();
            if (c == 1) {
                release(first);
                if constexpr (!kFp8) release(second);
            }
            wgmma::pin(part);
#pragma unroll
            for (int i = 0; i < kChunkN / 2; ++i)
                acc[c][i] = fmaf(part[i], scale[i / 2 % 2][i / 4 % 2], acc[c][i]);
            wgmma::pin(acc[c]);  // done before the next chunk's wgmmas want the registers
        }
    }
    MEGAMOE_DEVICE void issue(float (&part)[kChunkN / 2], int c, uint32_t stage, bool accumulate) {
        const uint32_t a = x_ + stage * (kMaxBlockM * kBlockBytes / 16);
        constexpr uint32_t kWeights = wgmma::operand(kWAddress);
        const uint32_t b = kWeights + (stage * kTileN + c * kChunkN) * (kBlockBytes / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma::Mma<kChunkN, kFp8>::template run<1024, 1024>(
                part, a + k * wgmma::kStepK, b + k * wgmma::kStepK, accumulate || k > 0);
    }
    MEGAMOE_DEVICE void release(uint32_t stage) {
        __syncwarp();  // after every lane's reads of scales; a NOP, since wgmma converges the warp
        if (ptx::lane() == 0) ptx::arrive(s_.stage_empty[stage]);
    }

    SharedStorage& s_;
    bool linear1_;
    uint32_t num_blocks_, w_scale_, x_, x_scale_;
    float row0_ = 1.f, row1_ = 1.f, col0_ = 1.f, col1_ = 1.f;
};

}  // namespace megamoe::moe
