// A0: residual sum, RMSNorm and quantisation of a row. And B0's finaliser, which needs a row of the
// projection too. All math threads share a row, 8 neighbouring columns a thread and pass.
#pragma once

#include "attention_pre/ops/rows.cuh"

namespace megamoe::attention {

inline constexpr int kPassColumns = int(kMathThreads) * 8;

// Sums of two values over the math threads.
MEGAMOE_DEVICE float2 sum_threads(SharedStorage& s, float a, float b) {
    a = sum_lanes(a);
    b = sum_lanes(b);
    ptx::named_barrier<kMathThreads>(kMathBarrier);  // the last sums have been read
    if (ptx::lane() == 0) s.sums[threadIdx.x / 32] = {a, b};
    ptx::named_barrier<kMathThreads>(kMathBarrier);
    float2 total = s.sums[0];
#pragma unroll
    for (uint32_t i = 1; i < kMathWarps; ++i) {
        total.x += s.sums[i].x;
        total.y += s.sums[i].y;
    }
    return total;
}

template <class S>
MEGAMOE_DEVICE void norm_quant(const Task& t) {
    namespace slots = operand::norm_quant;
    constexpr int kPasses = (S::kN + kPassColumns - 1) / kPassColumns;
    const bool has_residual = t.has(kHasResidual), has_normed = t.has(kHasNormed);
    const uint64_t row = t.inst().row, first = row * S::kN;
    auto* summed = t.operand<uint8_t>(slots::residual_out);
    auto* codes = t.operand<uint8_t>(slots::codes);
    uint32_t column[kPasses];
    bool mine[kPasses];  // known to be true where the columns fill the last pass
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        column[i] = i * kPassColumns + threadIdx.x * 8;
        mine[i] = S::kN % kPassColumns == 0 || column[i] < S::kN;
    }

    uint4 weight[kPasses], x[kPasses], residual[kPasses];
    float v[kPasses][8], squares = 0.f;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        weight[i] = {};
        // A load of a constant would be moved behind the barriers, and its latency with it.
        if (mine[i])
            weight[i] = ptx::load_l2(t.operand<const uint4>(slots::weight) + column[i] / 8);
    }
    if (t.has_producers()) t.wait_inputs();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        x[i] = residual[i] = {};
        if (!mine[i]) continue;
        x[i] = ptx::load_l2(t.operand<const uint4>(slots::x) + (first + column[i]) / 8);
        if (has_residual)
            residual[i] =
                ptx::load_l2(t.operand<const uint4>(slots::residual) + (first + column[i]) / 8);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        unpack8(x[i], v[i]);
        if (has_residual) {
            float r[8];
            unpack8(residual[i], r);
#pragma unroll
            for (int e = 0; e < 8; ++e) r[e] += v[i][e];
            const uint4 rounded = pack8(r);
            if (summed && mine[i])
                *reinterpret_cast<uint4*>(summed + (first + column[i]) * 2) = rounded;
            unpack8(rounded, v[i]);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) squares = fmaf(v[i][e], v[i][e], squares);
    }
    t.stamp(Stamp::kLoaded);
    const float factor = rsqrtf(sum_threads(t.s, squares, 0.f).x / S::kN + S::kEps);
    t.stamp(Stamp::kSummed);
    // Passes side by side, step by step: each alone is a chain of latencies.
    float amax[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        float w[8];
        unpack8(weight[i], w);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[i][e] = v[i][e] * factor * w[e];
        const uint4 normed = pack8(v[i]);
        unpack8(normed, v[i]);
        if (has_normed && mine[i])
            *reinterpret_cast<uint4*>(t.operand<uint8_t>(slots::normed) + (first + column[i]) * 2) =
                normed;
        amax[i] = mine[i] ? amax8(v[i]) : 0.f;
    }
    if (!codes) return;
#pragma unroll
    for (int o = 1; o < 16; o <<= 1)
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
            amax[i] = fmaxf(amax[i], __shfl_xor_sync(~0u, amax[i], o));
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const Quantiser quantiser(amax[i], t.has(kScalePow2));
        if (!mine[i]) continue;
        *reinterpret_cast<uint2*>(codes + first + column[i]) = quantiser.pack(v[i]);
        if (threadIdx.x % 16 == 0)
            t.operand<float>(slots::scales)[(first + column[i]) / kGroup] = quantiser.scale;
    }
}

// Parts of a row that are asked for at once: more of them take registers.
#ifndef MEGAMOE_ATTENTION_PARTS_AT_ONCE
#define MEGAMOE_ATTENTION_PARTS_AT_ONCE 6
#endif

// Eight columns of the sum of a row's parts, in ascending order. `meanwhile` runs once, when the
// first parts have been asked for.
template <int kPasses, class Meanwhile>
MEGAMOE_DEVICE void sum_row(float (&v)[kPasses][8], const float* row, uint32_t parts, uint32_t n,
                            const uint32_t (&column)[kPasses], const Meanwhile& meanwhile) {
    constexpr int kAtOnce = MEGAMOE_ATTENTION_PARTS_AT_ONCE;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) v[i][e] = 0.f;
#pragma unroll 1
    for (uint32_t first = 0; first < parts; first += kAtOnce) {
        float4 in[kPasses][kAtOnce][2] = {};
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
            for (int i = 0; i < kPasses; ++i)
                if (first + q < parts && column[i] < n) {
                    const auto* from =
                        reinterpret_cast<const float4*>(row + uint64_t(first + q) * n + column[i]);
                    in[i][q][0] = ptx::load_l2(from);
                    in[i][q][1] = ptx::load_l2(from + 1);
                }
        if (first == 0) meanwhile();
#pragma unroll
        for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                add(reinterpret_cast<float4&>(v[i][0]), in[i][q][0]);
                add(reinterpret_cast<float4&>(v[i][4]), in[i][q][1]);
            }
    }
}

// One row of [q_a | kv_a | k_pe]: both norms, e4m3 of the query latent, the row of the latent
// cache. `from` is operand::qkv_a's layout of both opcodes.
template <class S>
MEGAMOE_DEVICE void qkv_row(const Task& t, uint32_t row) {
    namespace slots = operand::qkv_a;
    constexpr int kQPasses = (S::kQLora + kPassColumns - 1) / kPassColumns;
    constexpr int kRope = S::kN - S::kQLora - S::kKvLora, kPasses = kQPasses + 1;
    static_assert(S::kN - S::kQLora <= kPassColumns && kRope % 8 == 0);
    constexpr uint32_t kRowBytes = S::kKvLora + 4 * (S::kKvLora / kGroup) + 2 * kRope;
    const uint32_t parts = t.inst().parts;
    // The last pass holds the latent and the rotary key; columns past n are idle.
    uint32_t column[kPasses];
#pragma unroll
    for (int i = 0; i < kQPasses; ++i) {
        column[i] = i * kPassColumns + threadIdx.x * 8;
        if (column[i] >= S::kQLora) column[i] = S::kN;
    }
    column[kQPasses] = S::kQLora + threadIdx.x * 8;
    const uint32_t at = threadIdx.x * 8;  // in the latent row
    const bool is_latent = at < S::kKvLora, is_rope = !is_latent && at < S::kKvLora + kRope;

    uint4 weight[kPasses] = {};
#pragma unroll
    for (int i = 0; i < kQPasses; ++i)
        if (column[i] < S::kQLora)
            weight[i] = load_early(t.operand<const uint4>(slots::q_norm) + column[i] / 8);
    if (is_latent) weight[kQPasses] = load_early(t.operand<const uint4>(slots::kv_norm) + at / 8);
    const int64_t slot = __ldg(t.operand<const int64_t>(slots::slots) + row);
    const uint32_t position =
        is_rope ? ptx::load_constant(t.operand<const uint32_t>(slots::positions) + row) : 0;
    t.wait_inputs();

    float v[kPasses][8];
    float4 cos = {}, sin = {};
    sum_row(v, t.operand<const float>(slots::partials) + uint64_t(row) * parts * S::kN, parts,
            S::kN, column, [&] {
                if (!is_rope) return;
                const float* table = t.operand<const float>(slots::rope) +
                                     uint64_t(position) * kRope + (at - S::kKvLora) / 2;
                cos = __ldg(reinterpret_cast<const float4*>(table));
                sin = __ldg(reinterpret_cast<const float4*>(table + kRope / 2));
            });
    float q_squares = 0.f, kv_squares = 0.f;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float& squares = i < kQPasses ? q_squares : kv_squares;
            if (i < kQPasses || is_latent) squares = fmaf(v[i][e], v[i][e], squares);
        }
    t.stamp(Stamp::kLoaded);
    const float2 total = sum_threads(t.s, q_squares, kv_squares);
    t.stamp(Stamp::kSummed);
    const float q_factor = rsqrtf(total.x / S::kQLora + S::kEps);
    const float kv_factor = rsqrtf(total.y / S::kKvLora + S::kEps);
    const bool pow2 = t.has(kScalePow2);
    uint8_t* cache = t.operand<uint8_t>(slots::cache) + slot * kRowBytes;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const bool query = i < kQPasses;
        const bool whole = S::kQLora % kPassColumns == 0;  // all threads have columns
        const bool mine = query ? whole || column[i] < S::kQLora : is_latent;
        float w[8], normed[8];
        unpack8(weight[i], w);
#pragma unroll
        for (int e = 0; e < 8; ++e) normed[e] = v[i][e] * (query ? q_factor : kv_factor) * w[e];
        const Quantiser quantiser(max_lanes<16>(mine ? amax8(normed) : 0.f), pow2);
        if (!mine) continue;
        const uint2 packed = quantiser.pack(normed);
        if (query) {
            auto* codes = t.operand<uint8_t>(slots::codes) + uint64_t(row) * S::kQLora + column[i];
            *reinterpret_cast<uint2*>(codes) = packed;
            if (threadIdx.x % 16 == 0)
                t.operand<float>(slots::scales)[row * (S::kQLora / kGroup) + column[i] / kGroup] =
                    quantiser.scale;
        } else {  // rows of the cache are multiples of 4 bytes, no more
            auto* codes = reinterpret_cast<uint32_t*>(cache + at);
            codes[0] = packed.x;
            codes[1] = packed.y;
            if (threadIdx.x % 16 == 0)
                *reinterpret_cast<float*>(cache + S::kKvLora + at / kGroup * 4) = quantiser.scale;
        }
    }
    if (is_rope) {
        const float (&k)[8] = v[kQPasses];
        const float c[4] = {cos.x, cos.y, cos.z, cos.w}, d[4] = {sin.x, sin.y, sin.z, sin.w};
        auto* key = reinterpret_cast<uint32_t*>(cache + S::kKvLora + 4 * (S::kKvLora / kGroup) +
                                                2 * (at - S::kKvLora));
#pragma unroll
        for (int e = 0; e < 4; ++e)
            key[e] = ptx::pack_bf16(dot2(k[2 * e], c[e], -k[2 * e + 1], d[e]),
                                    dot2(k[2 * e + 1], c[e], k[2 * e], d[e]));
    }
}

template <class S>
MEGAMOE_DEVICE void qkv_a_final(const Task& t) {
    for (uint32_t i = 0; i < t.inst().rows; ++i) qkv_row<S>(t, t.inst().row + i);
}

template <class S>
MEGAMOE_DEVICE void qkv_a(const Task& t) {
    Tiles<S> acc;
    gemm_fp8<S>(t, acc);
    store_partial<S::kBand>(t, acc[0], t.operand<float>(operand::qkv_a::partials), S::kN);
    if (last_of_unit(t)) qkv_a_final<S>(t);
}

}  // namespace megamoe::attention
