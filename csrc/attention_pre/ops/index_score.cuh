// E1: paged scores. Keys on the M side of wgmma, queries (tokens x heads) on the N side, so that
// the sum over heads of weight * relu(q . k) stays within the four lanes that share a key.
#pragma once

#include "attention_pre/ops/rows.cuh"

namespace megamoe::attention {

template <class S>
MEGAMOE_DEVICE void index_score(const Task& t) {
    namespace slots = operand::index_score;
    constexpr int N = S::kRows, kTokens = S::kBand, kHeadBlocks = S::kHeads / 8;
    static_assert(S::kHeads % 8 == 0 && N <= int(kTileRows));
    SharedStorage& s = t.s;
    const Instruction& inst = t.inst();
    const uint32_t lane = ptx::lane(), quad = lane & 3;
    // Fields in registers: shared memory would be read again after every barrier and store.
    const uint32_t rows = inst.rows, stride = inst.stride, kv = inst.kv;
    const uint32_t num_pages = inst.kv_len / kTileRows;
    const uint32_t length = __ldg(t.operand<const uint32_t>(slots::context_lens) + inst.item);
    const uint32_t visible = length - inst.aux + 1;  // to token 0 of the task
    float* logits = t.operand<float>(slots::logits) + uint64_t(inst.row) * stride + kv;

    const InputPage queries(t.input_page());
    wait_or_stop(s, s.input_full[queries.index], queries.phase);
    // Weights of this thread's queries: columns j * 8 + quad * 2 and the next.
    const uint32_t weights = ptx::shared_address(&s.input_scale[queries.index][quad * 2]);
    const uint32_t b = wgmma::operand(ptx::shared_address(s.inputs[queries.index]));
    const uint32_t keys =
        wgmma::operand(ptx::shared_address(s.weights[0]) + warpgroup() * (kPageBytes / 2));
    const uint32_t first_key = threadIdx.x / 32 * 16 + lane / 4;  // and first_key + 8

    float dot[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) dot[i] = 0.f;  // see gemm_fp8

#pragma unroll 1
    for (uint32_t i = 0; i < num_pages; ++i) {
        const WeightPage page(t.weight_page() + i);
        wait_or_stop(s, s.weight_full[page.index], page.phase);
        if (i == 0) t.stamp(Stamp::kLoaded);
        const uint32_t a = keys + page.index * (kPageBytes / 16);
        wgmma::pin(dot);
        wgmma::fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma::Mma<N, true>::template run<1024, 1024>(dot, a + k * wgmma::kStepK,
                                                          b + k * wgmma::kStepK, k > 0);
        wgmma::commit();
        const float scale[2] = {s.key_scale[page.index][first_key],
                                s.key_scale[page.index][first_key + 8]};
        wgmma::wait<0>();
        wgmma::pin(dot);
        arrive_warp(s.weight_free[page.index]);
        float sum[kTokens][2] = {};
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 weight = ptx::load_shared2(weights + j * 32);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& v = sum[j / kHeadBlocks][h];
                v = fmaf(fmaxf(dot[j * 4 + h * 2], 0.f), weight.x, v);
                v = fmaf(fmaxf(dot[j * 4 + h * 2 + 1], 0.f), weight.y, v);
            }
        }
#pragma unroll
        for (int token = 0; token < kTokens; ++token)
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[token][h] = sum_lanes<4>(sum[token][h]);
        // Of every four tokens a lane stores one.
#pragma unroll
        for (int four = 0; four < kTokens; four += 4) {
            const uint32_t token = four + quad;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float v = sum[four][h];
#pragma unroll
                for (int q = 1; q < 4 && four + q < kTokens; ++q)
                    if (quad == q) v = sum[four + q][h];
                const uint32_t key = i * kTileRows + first_key + h * 8;
                v = kv + key < visible + token ? v * scale[h] : __int_as_float(0xff800000);
                if (token < rows) logits[token * stride + key] = v;
            }
        }
    }
    arrive_warp(s.input_free[queries.index]);
    t.stamp(Stamp::kSummed);
}

}  // namespace megamoe::attention
