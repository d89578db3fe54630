// Many rows and a tail: 128 rows as in mainloop_many.cuh, and up to 16 more as in mainloop_few.cuh.
//
// The tail is a third step of each stage, in which a warpgroup multiplies 128 of the weight rows,
// as two m64n16 tiles, with the 16 rows. It costs less than a block of its own, which would fetch
// the weights again. FP8 weights come from registers here: wgmma takes as long to read 64 of their
// rows from shared memory as to multiply them with 64 tokens. BF16 would take 64 registers.
//
// 144 accumulators and 64 partial sums leave few registers: scales are read where they are wanted,
// positions are one word, and the wait for the next stage, which is a branch, keeps the compiler
// from putting off the second chunk's additions.
#pragma once

#include "moe/mainloop_many.cuh"

namespace megamoe::moe {

using TailAccumulators = float[2][kTailRows / 2];

// acc: as of MainloopMany; tail: as of mainloop_few, for the rows from kManyRows on.
class MainloopTail {
  public:
    MEGAMOE_DEVICE MainloopTail(bool linear1, const float* w_scale, uint32_t warpgroup)
        // By its constant address, which takes no register.
        : s_(*static_cast<SharedStorage*>(__cvta_shared_to_generic(kSharedBase))),
          linear1_(linear1),
          w_scale_(ptx::shared_address(w_scale)),
          x_(wgmma::operand(kXAddress) + warpgroup * (8192 / 16)) {}

    MEGAMOE_DEVICE void run(ManyAccumulators& acc, TailAccumulators& tail) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 0; i < kChunkN / 2; ++i) acc[c][i] = 0.f;
#pragma unroll
            for (uint32_t i = 0; i < kTailRows / 2; ++i) tail[c][i] = 0.f;
        }
        const Cursor<kStages> at = s_.math[ptx::thread_anew() / 32].stage;
        uint32_t fill = at.phase * kStages + at.slot;
        // Of a group of 128 of K: a stage of FP8 or two of BF16.
        const uint32_t end = w_scale_ + (linear1_ ? kKBlocks1 : kKBlocks2) / kPerGroup * 8;
        await(fill, kTraceTask);
#pragma unroll 1
        while (true) {
            const uint32_t first = fill % kStages;
            if constexpr (!kFp8) await(fill + 1);
            const uint32_t second = (fill + kPerGroup - 1) % kStages;
            fill += kPerGroup;
            chunk(acc, 0, first, second);
            chunk(acc, 1, first, second);
            if (w_scale_ + 8 != end) await(fill);
            tail_step(tail, first, second);
            w_scale_ += 8;
            if (w_scale_ == end) break;
        }
        __syncwarp();
        s_.math[ptx::thread_anew() / 32].stage = {fill % kStages, fill / kStages % 2};
    }

  private:
    static constexpr uint32_t kPerGroup = kFp8 ? 1 : 2;
    static constexpr uint32_t kXStage = kMaxBlockM * kBlockBytes, kWStage = kTileN * kBlockBytes;

    MEGAMOE_DEVICE void await(uint32_t fill, TraceSlot slot = kTraceMath) {
        TraceSpan span(s_.call.trace, slot, threadIdx.x == 0);
        wait_or_stop(s_.stage_full[fill % kStages], fill / kStages % 2, s_.call);
    }
    // The 128 rows against 128 weight rows.
    MEGAMOE_DEVICE void chunk(ManyAccumulators& acc, int c, uint32_t first, uint32_t second) {
        float part[kChunkN / 2];
        wgmma::pin(part);
        wgmma::fence();
        issue(part, c, first, false);
        if constexpr (!kFp8) issue(part, c, second, true);
        wgmma::commit();
        // Scale of the even and of the odd groups of 8 columns, for both rows of the thread.
        float scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};
        if constexpr (kFp8) {
            const uint32_t thread = ptx::thread_anew();
            const uint32_t x =
                ptx::shared_address(s_.x_scale[first]) + (thread / 32 * 16 + thread % 32 / 4) * 4;
            const float row0 = ptx::load_shared(x), row1 = ptx::load_shared(x + 32);
            const float2 w = ptx::load_shared2(w_scale_);
            const float even = !linear1_ && c == 1 ? w.y : w.x;
            const float odd = !linear1_ && c == 0 ? w.x : w.y;
            scale[0][0] = __fmul_rn(row0, even), scale[0][1] = __fmul_rn(row0, odd);
            scale[1][0] = __fmul_rn(row1, even), scale[1][1] = __fmul_rn(row1, odd);
        }
        wgmma::wait<0>();
        wgmma::pin(part);
#pragma unroll
        for (int i = 0; i < kChunkN / 2; ++i)
            acc[c][i] = fmaf(part[i], scale[i / 2 % 2][i / 4 % 2], acc[c][i]);
        wgmma::pin(acc[c]);
    }
    MEGAMOE_DEVICE void issue(float (&part)[kChunkN / 2], int c, uint32_t stage, bool accumulate) {
        const uint32_t a = x_ + stage * (kXStage / 16);
        const uint32_t b =
            wgmma::operand(kWAddress) + stage * (kWStage / 16) + c * (kChunkN * kBlockBytes / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma::Mma<kChunkN, kFp8>::template run<1024, 1024>(
                part, a + k * wgmma::kStepK, b + k * wgmma::kStepK, accumulate || k > 0);
    }
    MEGAMOE_DEVICE void tail_step(TailAccumulators& tail, uint32_t first, uint32_t second) {
        TailAccumulators part;
        uint32_t weights[2][4][4];
        if constexpr (kFp8) load_weights(weights, first);
#pragma unroll
        for (int t = 0; t < 2; ++t) wgmma::pin(part[t]);
        wgmma::fence();
        issue_tail(part, weights, first, false);
        if constexpr (!kFp8) issue_tail(part, weights, second, true);
        wgmma::commit();
        float w[2] = {1.f, 1.f};  // scales of the two tiles
        float2 x[kTailRows / 8];  // and of the rows, two of each eight
        if constexpr (kFp8) {
            const uint32_t half = linear1_ ? 0 : (x_ - wgmma::operand(kXAddress)) / 512 * 4;
            w[0] = ptx::load_shared(w_scale_ + half);
            w[1] = ptx::load_shared(w_scale_ + (linear1_ ? 4 : half));
            const uint32_t rows =
                ptx::shared_address(&s_.x_scale[first][kManyRows]) + (ptx::thread_anew() & 3) * 8;
#pragma unroll
            for (uint32_t j = 0; j < kTailRows / 8; ++j) x[j] = ptx::load_shared2(rows + j * 32);
        }
        wgmma::wait<0>();
        // Registers that wgmma reads are in use till here.
#pragma unroll
        for (uint32_t i = 0; i < 32; ++i)
            if constexpr (kFp8)
                asm volatile("" : "+r"(weights[i / 16][i / 4 % 4][i % 4])::"memory");
        release(first);
        if constexpr (!kFp8) release(second);
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t) {
            wgmma::pin(part[t]);
#pragma unroll
            for (uint32_t i = 0; i < kTailRows / 2; ++i) {
                const float scale = kFp8 ? __fmul_rn(i % 2 ? x[i / 4].y : x[i / 4].x, w[t]) : 1.f;
                tail[t][i] = fmaf(part[t][i], scale, tail[t][i]);
            }
            wgmma::pin(tail[t]);
        }
    }
    // [tile][step of K]: of weight rows 8 t … 8 t + 7 of each 16 of this warpgroup's 128.
    MEGAMOE_DEVICE void load_weights(uint32_t (&to)[2][4][4], uint32_t stage) {
        const uint32_t thread = ptx::thread_anew(), lane = thread % 32;
        const uint32_t row = thread / 32 * 32 + lane / 8 % 2 * 16 + lane % 8;
        // 16 bytes of a row are where the swizzle of 128 bytes puts them.
        const uint32_t at =
            kWAddress + stage * kWStage + row * kBlockBytes + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
        for (uint32_t t = 0; t < 2; ++t)
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k)
                ptx::load_matrices(to[t][k], (at ^ k << 5) + t * (8 * kBlockBytes));
    }
    MEGAMOE_DEVICE void issue_tail(TailAccumulators& part, const uint32_t (&weights)[2][4][4],
                                   uint32_t stage, bool accumulate) {
        const uint32_t b =
            wgmma::operand(kXAddress + kManyRows * kBlockBytes) + stage * (kXStage / 16);
        const uint32_t a = wgmma::operand(kWAddress) + stage * (kWStage / 16) +
                           (x_ - wgmma::operand(kXAddress)) / 512 * (16384 / 16);
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
            for (uint32_t t = 0; t < 2; ++t)
                if constexpr (kFp8)
                    wgmma::mma_from_registers<1024>(part[t], weights[t][k], b + k * wgmma::kStepK,
                                                    accumulate || k > 0);
                else
                    wgmma::Mma<kTailRows, kFp8>::template run<2048, 1024>(
                        part[t], a + t * (1024 / 16) + k * wgmma::kStepK, b + k * wgmma::kStepK,
                        accumulate || k > 0);
    }
    MEGAMOE_DEVICE void release(uint32_t stage) {
        __syncwarp();
        if (ptx::lane() == 0) ptx::arrive(s_.stage_empty[stage]);
    }

    SharedStorage& s_;
    bool linear1_;
    uint32_t w_scale_, x_;
};

}  // namespace megamoe::moe
