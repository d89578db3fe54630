// Few rows: weights on the M side of wgmma, tokens on the N side.
//
// Both math warpgroups share a stage: each takes 128 of the 256 weight rows as two m64 tiles.
// Groups of 8 rows alternate between the tiles (stride 2048), so for Linear 1, whose rows are
// stored as alternating groups of gate and up, tile 0 is gate and tile 1 is up, in the same thread.
#pragma once

#include "device/wgmma.cuh"
#include "moe/shared.cuh"

namespace megamoe::moe {

// acc[tile][i]: row (i / 2) % 2 * 8 + lane / 4 of the warp's 16, token i / 4 * 8 + lane % 4 * 2 + i
// % 2.
template <int N>
MEGAMOE_DEVICE void mainloop_few(float (&acc)[2][N / 2], SharedStorage& s,
                                 Cursor<kStages>& position, bool linear1, const float* w_scale,
                                 uint32_t warpgroup) {
    // A block of 128 of K is one stage of FP8 or two of BF16: its partial sum is promoted once.
    constexpr uint32_t kPerGroup = kFp8 ? 1 : 2;
    float part[2][N / 2];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[t][i] = 0.f;

    const uint32_t num_groups = (linear1 ? kKBlocks1 : kKBlocks2) / kPerGroup;
    Cursor<kStages> at = position;
    const uint32_t scales = ptx::shared_address(w_scale);
    const uint32_t x_lane = (ptx::lane() & 3) * 8;
    const uint32_t weights = wgmma::operand(kWAddress) + warpgroup * (16384 / 16);
    constexpr uint32_t tokens = wgmma::operand(kXAddress);

    auto issue = [&](float (&d)[N / 2], uint32_t stage, uint32_t tile, bool accumulate) {
        const uint32_t a = weights + stage * (kTileN * kBlockBytes / 16) + tile * (1024 / 16);
        const uint32_t b = tokens + stage * (kMaxBlockM * kBlockBytes / 16);
        wgmma::pin(d);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma::Mma<N, kFp8>::template run<2048, 1024>(
                d, a + k * wgmma::kStepK, b + k * wgmma::kStepK, accumulate || k > 0);
        wgmma::commit();
    };
    auto promote = [&](float (&sum)[N / 2], float (&d)[N / 2], uint32_t stage, float w) {
        wgmma::pin(d);
        const uint32_t x_scale = ptx::shared_address(s.x_scale[stage]) + x_lane;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float2 v = make_float2(1.f, 1.f);
            if constexpr (kFp8) {
                v = ptx::load_shared2(x_scale + j * 32);
                v.x = __fmul_rn(v.x, w);
                v.y = __fmul_rn(v.y, w);
            }
            sum[j * 4] = fmaf(d[j * 4], v.x, sum[j * 4]);
            sum[j * 4 + 1] = fmaf(d[j * 4 + 1], v.y, sum[j * 4 + 1]);
            sum[j * 4 + 2] = fmaf(d[j * 4 + 2], v.x, sum[j * 4 + 2]);
            sum[j * 4 + 3] = fmaf(d[j * 4 + 3], v.y, sum[j * 4 + 3]);
        }
    };
    auto release = [&](uint32_t stage) {
        __syncwarp();
        if (ptx::lane() == 0) ptx::arrive(s.stage_empty[stage]);
    };

#pragma unroll 1
    for (uint32_t g = 0; g < num_groups; ++g) {
        const uint32_t first = at.slot;
        {
            TraceSpan span(s.call.trace, g == 0 ? kTraceTask : kTraceMath, threadIdx.x == 0);
            wait_or_stop(s.stage_full[first], at.phase, s.call);
        }
        issue(part[0], first, 0, false);
        issue(part[1], first, 1, false);
        float w0 = 1.f, w1 = 1.f;
        if constexpr (kFp8) {
            const float2 w = ptx::load_shared2(scales + g * 8);
            w0 = !linear1 && warpgroup ? w.y : w.x;
            w1 = linear1 ? w.y : w0;
        }
        if constexpr (!kFp8) {
            at.advance();
            wait_or_stop(s.stage_full[at.slot], at.phase, s.call);
            issue(part[0], at.slot, 0, true);
            issue(part[1], at.slot, 1, true);
        }
        wgmma::wait<1>();
        promote(acc[0], part[0], first, w0);
        wgmma::wait<0>();
        promote(acc[1], part[1], first, w1);
        release(first);
        if constexpr (!kFp8) release(at.slot);
        at.advance();
    }
    __syncwarp();
    position = at;
}

}  // namespace megamoe::moe
