// Staging: a call's tokens into this rank's window, quantised on the way if they are BF16. A call
// begins with it.
//
// Lanes take 8 neighbouring columns each, so 16 lanes hold one group of 128 and a warp two.
#pragma once

#include "moe/linear1.cuh"

namespace megamoe::moe {

struct RowsToStage {
    const void* x;         // BF16 [T, H], or e4m3 [T, H]
    const float* x_scale;  // FP32 [T, H/128] with e4m3, else null
    uint8_t* input;        // window: rows of x
    float* input_scale;    // window: [T, H/128]
    uint32_t num_tokens;
};

// Eight BF16 columns: their e4m3 values and the scale of the group of 128 they belong to.
MEGAMOE_DEVICE uint2 quantise8(uint4 v, float& scale) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
    float f[8], amax = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f[2 * i] = __uint_as_float(word[i] << 16);
        f[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        amax = fmaxf(amax, fmaxf(fabsf(f[2 * i]), fabsf(f[2 * i + 1])));
    }
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, o));
    const Quantiser quantiser(amax);
    scale = quantiser.scale;
    return {quantiser.pack(f[0], f[1]) | quantiser.pack(f[2], f[3]) << 16,
            quantiser.pack(f[4], f[5]) | quantiser.pack(f[6], f[7]) << 16};
}

// Loads of a thread that are on their way at once.
inline constexpr uint32_t kStageAhead = 4;

MEGAMOE_DEVICE void stage_bf16(const RowsToStage& p, uint64_t thread, uint64_t threads) {
    const uint64_t count = uint64_t(p.num_tokens) * kHidden / 8;  // a multiple of 16
    const uint4* x = static_cast<const uint4*>(p.x);
    for (uint64_t i0 = thread; i0 / 32 * 32 < count; i0 += kStageAhead * threads) {
        uint4 v[kStageAhead];
#pragma unroll
        for (uint32_t u = 0; u < kStageAhead; ++u)
            v[u] = i0 + u * threads < count ? __ldg(x + i0 + u * threads) : uint4{};
#pragma unroll
        for (uint32_t u = 0; u < kStageAhead; ++u) {
            const uint64_t i = i0 + u * threads;
            float scale;
            const uint2 q = quantise8(v[u], scale);
            if (i >= count) continue;
            reinterpret_cast<uint2*>(p.input)[i] = q;
            if (i % 16 == 0) p.input_scale[i / 16] = scale;
        }
    }
}

template <class T>
MEGAMOE_DEVICE void copy(T* to, const T* from, uint64_t count, uint64_t thread, uint64_t threads) {
    for (uint64_t i0 = thread; i0 < count; i0 += kStageAhead * threads) {
        T v[kStageAhead];
#pragma unroll
        for (uint32_t u = 0; u < kStageAhead; ++u)
            if (i0 + u * threads < count) v[u] = __ldg(from + i0 + u * threads);
#pragma unroll
        for (uint32_t u = 0; u < kStageAhead; ++u)
            if (i0 + u * threads < count) to[i0 + u * threads] = v[u];
    }
}

// Warps of all CTAs in turn, so that few tokens are spread over all SMs.
MEGAMOE_DEVICE uint64_t thread_of_call() {
    const uint32_t local = ptx::thread_anew();
    return (uint64_t(local / 32) * gridDim.x + blockIdx.x) * 32 + local % 32;
}

// Of a call. Told to peers with the routes: hand-off 3.
MEGAMOE_DEVICE void stage_call(const MoEParams& p) {
    if (p.stage_x == nullptr) return;  // the caller has written the window
    const RowsToStage rows{p.stage_x, p.stage_scale, p.at(p.rank, Region::kInput),
                           p.ptr<float>(p.rank, Region::kInputScale), p.num_tokens};
    const uint64_t thread = thread_of_call();
    const uint64_t threads = uint64_t(gridDim.x) * kThreads;
    if (kFp8 && p.stage_is_bf16) return stage_bf16(rows, thread, threads);
    copy(reinterpret_cast<uint4*>(rows.input), static_cast<const uint4*>(rows.x),
         uint64_t(rows.num_tokens) * kHidden * kElementBytes / 16, thread, threads);
    if (kFp8)
        copy(rows.input_scale, rows.x_scale, uint64_t(rows.num_tokens) * (kHidden / kGroup), thread,
             threads);
}

}  // namespace megamoe::moe
