// GEMM main loops for every opcode: weights on the M side of wgmma, tokens on the N side, so that 8
// to 128 tokens cost no padding to 64.
//
// A weight page is 128 output columns x 128 bytes of K; each of the two math warpgroups takes 64 of
// the columns. A task has one or two sub-tiles of 128 columns, whose pages alternate.
//
// acc[tile][i]: column (warp of 8) * 16 + i / 2 % 2 * 8 + lane / 4 of the sub-tile, token
// i / 4 * 8 + lane % 4 * 2 + i % 2. `emit_rows` (emit.cuh) gathers the columns of a token through
// shared memory and hands them to one warp: lane l holds columns 4 l ... 4 l + 3. So finishers see
// rows.
#pragma once

#include "attention_pre/vm.cuh"
#include "device/wgmma_transposed.cuh"

namespace megamoe::attention {

template <class S>
inline constexpr int kAccumulators = S::kBand / 2;
template <class S>
using Tiles = float[S::kTiles][kAccumulators<S>];

// The most blocks of K whose wgmmas are in flight at once: a divisor of all, as registers allow.
MEGAMOE_HD constexpr int blocks_at_once(int blocks, int most) {
    for (int d = most; d > 1; --d)
        if (blocks % d == 0) return d;
    return 1;
}

MEGAMOE_DEVICE void wait_pending(int groups) {  // a constant after unrolling
    switch (groups) {
        case 0:
            return wgmma::wait<0>();
        case 1:
            return wgmma::wait<1>();
        case 2:
            return wgmma::wait<2>();
        default:
            return wgmma::wait<3>();
    }
}

struct Nothing {
    MEGAMOE_DEVICE void operator()() const {}
};

// The same for all lanes, and known to be.
MEGAMOE_DEVICE uint32_t warpgroup() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// The most blocks in flight of a main loop. A body waits for all of them before it releases the
// first one's pages, so few of them let pages flow, and many hide the latency of wgmma.
#ifndef MEGAMOE_ATTENTION_BLOCKS_AT_ONCE
#define MEGAMOE_ATTENTION_BLOCKS_AT_ONCE 4
#endif
inline constexpr int kBlocksAtOnce = MEGAMOE_ATTENTION_BLOCKS_AT_ONCE;
// Of an FP8 task whose sums take `width` columns: tokens x sub-tiles.
MEGAMOE_HD constexpr int most_at_once(int width, int tiles) {
    const int most = width <= 32 ? 4 / tiles : width <= 64 ? 2 : 1;
    return most < kBlocksAtOnce ? most : kBlocksAtOnce;
}

// FP8: each block of 128 of K is summed by wgmma, then scaled and added in FP32. `U` blocks are in
// flight. `meanwhile` runs once, when the first of them have been issued. Not unrolled further: the
// code of a kernel with many bodies must fit into the instruction cache, or every body is slower.
template <int N, int T, class Meanwhile = Nothing>
MEGAMOE_DEVICE void gemm_fp8(const Task& t, uint32_t blocks, float (&acc)[T][N / 2],
                             const Meanwhile& meanwhile = {}) {
    constexpr int kGroupBlocks = kTileRows / N, U = most_at_once(N * T, T);
    SharedStorage& s = t.s;
    // Set although wgmma overwrites it: registers that look read before they are written would be
    // kept free through all other bodies.
    float part[U][T][N / 2];
#pragma unroll
    for (int tile = 0; tile < T; ++tile)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            acc[tile][i] = 0.f;
#pragma unroll
            for (int u = 0; u < U; ++u) part[u][tile][i] = 0.f;
        }
    t.wait_scales();
    const uint32_t weights =
        wgmma::operand(ptx::shared_address(s.weights[0]) + warpgroup() * (kPageBytes / 2));
    const uint32_t inputs = wgmma::operand(ptx::shared_address(s.inputs[0]));
    const uint32_t token_scales = ptx::shared_address(s.input_scale[0]) + (ptx::lane() & 3) * 8;
    const uint32_t w_scales = ptx::shared_address(t.slot.w_scale);
    // Pages of the next block to issue and of the next to add up.
    WeightPage weight(t.weight_page()), added_weight = weight;
    InputPage input(t.input_page()), added_input = input;

    auto issue = [&](uint32_t block, float (&d)[T][N / 2]) {
        const uint32_t in_page = block % kGroupBlocks;
        if (in_page == 0) wait_or_stop(s, s.input_full[input.index], input.phase);
        const uint32_t b =
            inputs + input.index * (kPageBytes / 16) + in_page * (N * kBlockBytes / 16);
        if (in_page == kGroupBlocks - 1) input.advance();
#pragma unroll
        for (int tile = 0; tile < T; ++tile, weight.advance()) {
            wait_or_stop(s, s.weight_full[weight.index], weight.phase);
            if (block + tile == 0) t.stamp(Stamp::kLoaded);
            const uint32_t a = weights + weight.index * (kPageBytes / 16);
            wgmma::pin(d[tile]);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < 4; ++k)
                wgmma::Mma<N, true>::template run<1024, 1024>(d[tile], a + k * wgmma::kStepK,
                                                              b + k * wgmma::kStepK, k > 0);
            wgmma::commit();
        }
    };
    // `later` groups of wgmmas have been issued after this block's.
    auto add_up = [&](uint32_t block, float (&d)[T][N / 2], int later) {
        const uint32_t in_page = block % kGroupBlocks;
        const uint32_t scales =
            token_scales + added_input.index * (kTileRows * 4) + in_page * (N * 4);
        constexpr bool kEarly = N <= 32;  // registers for the scales before the sums are there
        float2 scale[N / 8];
        float w[T];
#pragma unroll
        for (int j = 0; j < N / 8 && kEarly; ++j) scale[j] = ptx::load_shared2(scales + j * 32);
#pragma unroll
        for (int tile = 0; tile < T; ++tile)
            w[tile] = ptx::load_shared(w_scales + (tile * blocks + block) * 4);
#pragma unroll
        for (int tile = 0; tile < T; ++tile, added_weight.advance()) {
            wait_pending(later + T - 1 - tile);
            wgmma::pin(d[tile]);
            arrive_warp(s.weight_free[added_weight.index]);
#pragma unroll
            for (int j = 0; j < N / 8; ++j) {
                const float2 v = kEarly ? scale[j] : ptx::load_shared2(scales + j * 32);
                const float x = __fmul_rn(v.x, w[tile]), y = __fmul_rn(v.y, w[tile]);
                acc[tile][j * 4] = fmaf(d[tile][j * 4], x, acc[tile][j * 4]);
                acc[tile][j * 4 + 1] = fmaf(d[tile][j * 4 + 1], y, acc[tile][j * 4 + 1]);
                acc[tile][j * 4 + 2] = fmaf(d[tile][j * 4 + 2], x, acc[tile][j * 4 + 2]);
                acc[tile][j * 4 + 3] = fmaf(d[tile][j * 4 + 3], y, acc[tile][j * 4 + 3]);
            }
        }
        if (in_page == kGroupBlocks - 1 || block == blocks - 1) {
            arrive_warp(s.input_free[added_input.index]);
            added_input.advance();
        }
    };
    uint32_t first = 0;
#pragma unroll 1
    for (; first + U <= blocks; first += U) {
#pragma unroll
        for (int u = 0; u < U; ++u) issue(first + u, part[u]);
        if (first == 0) meanwhile();
#pragma unroll
        for (int u = 0; u < U; ++u) add_up(first + u, part[u], (U - 1 - u) * T);
    }
    if constexpr (U > 1) {
#pragma unroll 1
        for (; first < blocks; ++first) {
            issue(first, part[0]);
            if (first == 0) meanwhile();
            add_up(first, part[0], 0);
        }
    }
    t.stamp(Stamp::kSummed);
}
template <class S, class Meanwhile = Nothing>
MEGAMOE_DEVICE void gemm_fp8(const Task& t, Tiles<S>& acc, const Meanwhile& meanwhile = {}) {
    gemm_fp8<S::kBand, S::kTiles>(t, S::kBlocks, acc, meanwhile);
}

// BF16: wgmma adds over all of K.
template <class S>
MEGAMOE_DEVICE void gemm_bf16(const Task& t, Tiles<S>& acc) {
    constexpr int N = S::kBand, T = S::kTiles, kGroupBlocks = kTileRows / N;
    constexpr int U = blocks_at_once(S::kBlocks, kBlocksAtOnce);
    constexpr bool kByHead = S::kLoads == Loads::kBf16ByHead;
    SharedStorage& s = t.s;
    const uint32_t weights =
        wgmma::operand(ptx::shared_address(s.weights[0]) + warpgroup() * (kPageBytes / 2));
    const uint32_t inputs = wgmma::operand(ptx::shared_address(s.inputs[0]));
    uint32_t weight_use = t.weight_page();
    const uint32_t input_use = t.input_page();
#pragma unroll
    for (int tile = 0; tile < T; ++tile)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[tile][i] = 0.f;
    static_assert(U * T <= int(kWeightPages));
    static_assert(ceil_div(U, kGroupBlocks) + 1 <= kInputPages || S::kBlocks <= kGroupBlocks);

#pragma unroll 1
    for (uint32_t first = 0; first < S::kBlocks; first += U) {
        uint32_t weight_index[U][T], input_index[U];
#pragma unroll
        for (int tile = 0; tile < T; ++tile) wgmma::pin(acc[tile]);
        wgmma::fence();
#pragma unroll
        for (int u = 0; u < U; ++u) {
            const InputPage input(input_use + (first + u) / kGroupBlocks);
            input_index[u] = input.index;
            wait_or_stop(s, s.input_full[input.index], input.phase);
            const uint32_t b = inputs + input.index * (kPageBytes / 16) +
                               (first + u) % kGroupBlocks * (N * kBlockBytes / 16);
#pragma unroll
            for (int tile = 0; tile < T; ++tile) {
                const WeightPage weight(weight_use++);
                weight_index[u][tile] = weight.index;
                wait_or_stop(s, s.weight_full[weight.index], weight.phase);
                if (first + u + tile == 0) t.stamp(Stamp::kLoaded);
                const uint32_t a = weights + weight.index * (kPageBytes / 16);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint32_t tokens = b + k * wgmma::kStepK;
                    if constexpr (kByHead)
                        wgmma::MmaTransposed<N>::template run<1024, 1024>(
                            acc[tile], a + k * wgmma::kStepKTransposed, tokens, 1);
                    else
                        wgmma::Mma<N, false>::template run<1024, 1024>(
                            acc[tile], a + k * wgmma::kStepK, tokens, 1);
                }
            }
        }
        wgmma::commit();
        wgmma::wait<0>();
#pragma unroll
        for (int tile = 0; tile < T; ++tile) wgmma::pin(acc[tile]);
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int tile = 0; tile < T; ++tile) arrive_warp(s.weight_free[weight_index[u][tile]]);
            const uint32_t block = first + u;
            if (block % kGroupBlocks == kGroupBlocks - 1 || block == S::kBlocks - 1)
                arrive_warp(s.input_free[input_index[u]]);
        }
    }
    t.stamp(Stamp::kSummed);
}

}  // namespace megamoe::attention
