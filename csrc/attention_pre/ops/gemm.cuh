// GEMM main loops and what follows them for every opcode: weights on the M side of wgmma, tokens on
// the N side, so that 8 to 128 tokens cost no padding to 64.
//
// A weight page is 128 output columns x 128 bytes of K; each of the two math warpgroups takes 64 of
// the columns. A task has one or two sub-tiles of 128 columns, whose pages alternate.
//
// acc[tile][i]: column (warp of 8) * 16 + i / 2 % 2 * 8 + lane / 4 of the sub-tile, token
// i / 4 * 8 + lane % 4 * 2 + i % 2. `emit_rows` gathers the columns of a token through shared
// memory and hands them to one warp: lane l holds columns 4 l ... 4 l + 3. So finishers see rows.
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
    WeightPage weight(t.slot.weight_page), added_weight = weight;
    InputPage input(t.slot.input_page), added_input = input;

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
    uint32_t weight_use = t.slot.weight_page;
    const uint32_t input_use = t.slot.input_page;
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

// ---------------------------------------------------------------- rows

// Tokens of a chunk that one warp finishes: `warp`, `warp` + 8.
template <int N>
inline constexpr int kChunk = N < int(kChunkTokens) ? N : int(kChunkTokens);
template <int N>
inline constexpr int kRowsOfWarp = kChunk<N> / int(kMathWarps);
MEGAMOE_DEVICE uint32_t token_of(uint32_t chunk, uint32_t i) {
    return chunk * kChunkTokens + i * kMathWarps + threadIdx.x / 32;
}
// The warp's tokens by number, a lane each: number chunk * kRowsOfWarp + i; past the band's, none.
template <int N>
MEGAMOE_DEVICE uint32_t token_of_lane() {
    const uint32_t lane = ptx::lane();
    return lane < N / kMathWarps ? token_of(lane / kRowsOfWarp<N>, lane % kRowsOfWarp<N>) : ~0u;
}

// A finisher has
//   early(chunk)        loads that need no event, for the tokens `token_of(chunk, i)` of this warp.
//                       Chunk 0's are issued behind the main loop's first wgmmas. Their addresses
//                       were asked for when it was made
//   late(chunk)         loads of what other tasks stored
//   row(i, token, v)    columns 4 l ... 4 l + 3 of token `token_of(chunk, i)` in lane l
struct NoLoads {
    MEGAMOE_DEVICE void early(uint32_t) {}
    MEGAMOE_DEVICE void late(uint32_t) {}
};

template <int N, class Finisher>
MEGAMOE_DEVICE void emit_rows(const Task& t, const float (&acc)[N / 2], Finisher& finisher) {
    constexpr int kAcc = N / 2;
    const uint32_t lane = ptx::lane(), rows = t.inst().rows;
    float (&gather)[kChunkTokens][kPitch] = t.s.gather;
    const uint32_t column = threadIdx.x / 32 * 16 + lane / 4, token = (lane & 3) * 2;
    constexpr int kChunks = N / kChunk<N>, kPerChunk = kAcc / kChunks;
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
        ptx::named_barrier<kMathThreads>(kMathBarrier);  // the last rows have been read
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {  // accumulators need constant indices
            if (kChunks > 1 && c != chunk) continue;
#pragma unroll
            for (int i = 0; i < kPerChunk; ++i)
                gather[i / 4 * 8 + token + i % 2][column + i / 2 % 2 * 8] = acc[c * kPerChunk + i];
        }
        finisher.late(chunk);
        ptx::named_barrier<kMathThreads>(kMathBarrier);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp<N>; ++i) {
            const float4 v = *reinterpret_cast<const float4*>(
                &gather[i * kMathWarps + threadIdx.x / 32][lane * 4]);
            if (token_of(chunk, i) < rows) finisher.row(i, token_of(chunk, i), v);
        }
        if (chunk + 1 < kChunks) finisher.early(chunk + 1);
    }
}

// A part of a split-K sum, from registers to the workspace [M, parts, N]: of each token the eight
// lanes of a column group store a whole sector.
template <int N>
MEGAMOE_DEVICE void store_partial(const Task& t, const float (&acc)[N / 2], float* partials,
                                  uint32_t n) {
    const Instruction& inst = t.inst();
    const uint32_t lane = ptx::lane(), rows = inst.rows, first = (lane & 3) * 2;
    const uint32_t column = threadIdx.x / 32 * 16 + lane / 4, pitch = inst.parts * n;
    const bool mine[2] = {column < inst.cols, column + 8 < inst.cols};
    float* to = partials + uint64_t(inst.row + first) * pitch + inst.part * n + inst.col + column;
#pragma unroll
    for (int i = 0; i < N / 2; i += 4)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const uint32_t token = i / 4 * 8 + odd;
            float* at = to + token * pitch;
            if (first + token >= rows) continue;
            if (mine[0]) at[0] = acc[i + odd];
            if (mine[1]) at[8] = acc[i + 2 + odd];
        }
}

// BF16 [tokens][128 columns] from registers; `to` is token 0's first column, `pitch` in bytes.
template <int N>
MEGAMOE_DEVICE void store_bf16(const Task& t, const float (&acc)[N / 2], uint8_t* to,
                               uint64_t pitch) {
    const uint32_t lane = ptx::lane(), rows = t.inst().rows, token = lane / 4;
    to += token * pitch + (threadIdx.x / 32 * 16 + (lane & 3) * 2) * 2;
    uint32_t packed[N / 4];  // of eight columns each, now a token's neighbours in one lane
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
        packed[i] = ptx::transpose_8x8(ptx::pack_bf16(acc[i * 2], acc[i * 2 + 1]));
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        auto* at = reinterpret_cast<uint32_t*>(to + j * 8 * pitch);
        if (j * 8 + token < rows) {
            at[0] = packed[j * 2];
            at[4] = packed[j * 2 + 1];
        }
    }
}

MEGAMOE_DEVICE void add(float4& a, const float4& b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
}

// The sum of all parts of the unit, in ascending order, handed to the finisher as rows. With
// `kEarly` its first loads have not been issued.
template <int N, int kMostParts = 8, bool kEarly = false, class Finisher>
MEGAMOE_DEVICE void emit_sums(const Task& t, const float* partials, uint32_t n,
                              Finisher& finisher) {
    constexpr int R = kRowsOfWarp<N>, kAtOnce = kMostParts < 8 ? kMostParts : 8;
    const Instruction& inst = t.inst();
    const uint32_t parts = inst.parts, rows = inst.rows;
    const float* from =
        partials + uint64_t(inst.row) * parts * n + inst.col + min(ptx::lane() * 4, inst.cols - 4);
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < N / kChunk<N> && chunk * kChunkTokens < rows; ++chunk) {
        finisher.late(chunk);
        float4 sum[R] = {};
#pragma unroll 1
        for (uint32_t first = 0; first < parts; first += kAtOnce) {
            float4 v[R][kAtOnce];
#pragma unroll
            for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
                for (int i = 0; i < R; ++i) {
                    const uint32_t token = token_of(chunk, i), part = first + q;
                    v[i][q] = token < rows && part < parts
                                  ? ptx::load_l2(reinterpret_cast<const float4*>(
                                        from + (uint64_t(token) * parts + part) * n))
                                  : float4{};
                }
            if (first == 0 && (kEarly || chunk > 0)) finisher.early(chunk);
#pragma unroll
            for (int q = 0; q < kAtOnce; ++q)
#pragma unroll
                for (int i = 0; i < R; ++i) add(sum[i], v[i][q]);
        }
#pragma unroll
        for (int i = 0; i < R; ++i)
            if (token_of(chunk, i) < rows) finisher.row(i, token_of(chunk, i), sum[i]);
    }
}

// The main loop, with the finisher's first loads.
template <class S, class Finisher>
MEGAMOE_DEVICE void gemm_before(const Task& t, Tiles<S>& acc, Finisher& finisher) {
    if constexpr (S::kBand <= 32) {
        gemm_fp8<S>(t, acc, [&] { finisher.early(0); });
    } else {  // no registers to spare inside the loop
        finisher.early(0);
        gemm_fp8<S>(t, acc);
    }
}

// An FP8 GEMM that may be split along K: one part finishes in registers, several go through the
// workspace and the last to arrive finishes.
template <class S, class Finisher>
MEGAMOE_DEVICE void reduced_gemm(const Task& t, float* partials, Finisher& finisher) {
    Tiles<S> acc;
    gemm_before<S>(t, acc, finisher);
    if (t.inst().parts == 1) return emit_rows<S::kBand>(t, acc[0], finisher);
    store_partial<S::kBand>(t, acc[0], partials, S::kN);
    if (last_of_unit(t)) emit_sums<S::kBand, S::kParts>(t, partials, S::kN, finisher);
}

// A task that sums the parts of others.
template <class S, class Finisher>
MEGAMOE_DEVICE void finish_parts(const Task& t, const float* partials, Finisher& finisher) {
    t.wait_inputs();
    emit_sums<S::kBand, S::kParts, true>(t, partials, S::kN, finisher);
}

// A part of a sum that tasks of their own finish.
template <int N>
MEGAMOE_DEVICE void partial_gemm(const Task& t, uint32_t n, uint32_t blocks) {
    static_assert(operand::index_key::partials == operand::qkv_a::partials &&
                  operand::index_query::partials == operand::qkv_a::partials);
    float acc[1][N / 2];
    gemm_fp8<N, 1>(t, blocks, acc);
    store_partial<N>(t, acc[0], t.operand<float>(operand::qkv_a::partials), n);
}

}  // namespace megamoe::attention
