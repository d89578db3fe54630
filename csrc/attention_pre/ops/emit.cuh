// What follows a main loop: sums to memory as they lie in registers, or gathered into rows for a
// finisher; parts of a sum, and the sum of parts.
#pragma once

#include "attention_pre/ops/gemm.cuh"

namespace megamoe::attention {

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

// Parts of a sum that are asked for at once: more of them take registers.
#ifndef MEGAMOE_ATTENTION_SUMS_AT_ONCE
#define MEGAMOE_ATTENTION_SUMS_AT_ONCE 8
#endif

// The sum of all parts of the unit, in ascending order, handed to the finisher as rows. With
// `kEarly` its first loads have not been issued.
template <int N, int kMostParts = 8, bool kEarly = false, class Finisher>
MEGAMOE_DEVICE void emit_sums(const Task& t, const float* partials, uint32_t n,
                              Finisher& finisher) {
    constexpr int R = kRowsOfWarp<N>, kMost = MEGAMOE_ATTENTION_SUMS_AT_ONCE;
    constexpr int kAtOnce = kMostParts < kMost ? kMostParts : kMost;
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
