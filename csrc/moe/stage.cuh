// Staging: a call's tokens into this rank's window, quantised on the way if they are BF16.
//
// Lanes take 8 neighbouring columns each, so 16 lanes hold one group of 128 and a warp two.
#pragma once

#include "moe/linear1.cuh"

namespace megamoe::moe {

struct StageParams {
    const void* x;         // BF16 [T, H], or e4m3 [T, H]
    const float* x_scale;  // FP32 [T, H/128] with e4m3, else null
    uint8_t* input;        // window: rows of x
    float* input_scale;    // window: [T, H/128]
    uint32_t num_tokens;
    uint32_t is_bf16;
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

MEGAMOE_DEVICE void stage_bf16(const StageParams& p, uint64_t thread, uint64_t threads) {
    const uint64_t count = uint64_t(p.num_tokens) * kHidden / 8;  // a multiple of 16
    const uint4* x = static_cast<const uint4*>(p.x);
    for (uint64_t i = thread; i / 32 * 32 < count; i += threads) {
        const uint4 v = i < count ? __ldg(x + i) : uint4{};
        float scale;
        const uint2 q = quantise8(v, scale);
        if (i >= count) continue;
        reinterpret_cast<uint2*>(p.input)[i] = q;
        if (i % 16 == 0) p.input_scale[i / 16] = scale;
    }
}

template <class T>
MEGAMOE_DEVICE void copy(T* to, const T* from, uint64_t count, uint64_t thread, uint64_t threads) {
    for (uint64_t i = thread; i < count; i += threads) to[i] = __ldg(from + i);
}

}  // namespace megamoe::moe

extern "C" __global__ void __launch_bounds__(256)
    megamoe_stage(const __grid_constant__ megamoe::moe::StageParams p) {
    using namespace megamoe;
    using namespace megamoe::moe;
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    if (kFp8 && p.is_bf16) return stage_bf16(p, thread, threads);
    copy(reinterpret_cast<uint4*>(p.input), static_cast<const uint4*>(p.x),
         uint64_t(p.num_tokens) * kHidden * kElementBytes / 16, thread, threads);
    if (kFp8)
        copy(p.input_scale, p.x_scale, uint64_t(p.num_tokens) * (kHidden / kGroup), thread,
             threads);
}
