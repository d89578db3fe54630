// Linear 1: what happens to a tile of gate and up sums. SwiGLU, requantised into the L2 ring.
//
// The rows of a stored W1 tile are permuted so that both paths end with neighbouring columns in a
// thread: row 16 P + 8 u + i (u: 0 gate, 1 up) is column 16 (P / 2) + 4 (i / 2) + 2 (P % 2) + i % 2
// of the tile's 128. backends/cuda_pack.py permutes; hand-offs 6 and 7 of protocol.hpp.
#pragma once

#include "moe/mainloop_few.cuh"
#include "moe/mainloop_many.cuh"
#if MEGAMOE_TAIL_ROWS
#include "moe/mainloop_tail.cuh"
#endif

namespace megamoe::moe {

inline constexpr float kE4m3Max = 448.f, kTinyAmax = 1e-30f;

MEGAMOE_DEVICE float swiglu(float gate, float up, float clamp) {
    gate = ptx::min_nan(gate, clamp);
    up = ptx::max_nan(ptx::min_nan(up, clamp), -clamp);
    // exp(-gate) as __expf has it, but for results too small to change 1 + exp(-gate).
    const float exp = ptx::exp2_ftz(__fmul_rn(gate, -1.4426950408889634f));
    return __fmul_rn(__fdividef(gate, 1.f + exp), up);
}

struct Quantiser {
    float scale, inverse;
    MEGAMOE_DEVICE explicit Quantiser(float amax)
        : scale(__fdiv_rn(fmaxf(amax, kTinyAmax), kE4m3Max)), inverse(__frcp_rn(scale)) {}
    MEGAMOE_DEVICE uint32_t pack(float low, float high) const {
        return quantise(low, high, inverse);
    }
    MEGAMOE_DEVICE static uint32_t quantise(float low, float high, float inverse) {
        return ptx::pack_e4m3(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
    }
};

// Where a task's rows go in the L2 ring.
struct L2Rows {
    uint8_t* rows;  // first row, at the tile's first column
    float* scales;  // [I/128][block_m]: the tile's line
    MEGAMOE_DEVICE L2Rows(const MoEParams& p, const Task& task)
        : rows(p.at(p.rank, Region::kL2Ring, uint64_t(task.l2.slot) * p.shape.block_m) +
               task.n * kGroup * kElementBytes),
          scales(p.ptr<float>(p.rank, Region::kL2Scale) +
                 (uint64_t(task.l2.slot) * kL1Tiles + task.n) * p.shape.block_m) {}
};
inline constexpr uint32_t kHRowBytes = kInter * kElementBytes;

// The task's rows from `first` on. Of three amax arrays one is used now, one is cleared for the
// next tile, one may still be read.
template <int N>
MEGAMOE_DEVICE void linear1_few(const MoEParams& p, SharedStorage& s, const Task& task,
                                float (&acc)[2][N / 2], uint32_t first) {
    const uint32_t thread = ptx::thread_anew(), lane = thread & 31, quad = lane & 3;
    const uint32_t warp = thread / 32;
    const L2Rows to(p, task);
    const float clamp = p.swiglu_clamp;
    const uint32_t turn = s.math[warp].amax_turn, next = turn == 2 ? 0 : turn + 1;
    uint32_t* amax = s.amax[turn];
    __syncwarp();
    s.math[warp].amax_turn = next;
    if constexpr (kFp8) {
        // All of it: the next tile may have more tokens than this one.
        for (uint32_t i = thread; i < kFewRows; i += kMathThreads) s.amax[next][i] = 0;
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {  // token j * 8 + quad * 2 + c
            float most = 0.f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float& v = acc[0][j * 4 + h * 2 + c];
                v = swiglu(v, acc[1][j * 4 + h * 2 + c], clamp);
                most = fmaxf(most, fabsf(v));
            }
            if constexpr (kFp8) {
#pragma unroll
                for (int o = 4; o < 32; o <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
                if (lane < 4) atomicMax(&amax[j * 8 + quad * 2 + c], __float_as_uint(most));
            }
        }
    }
    // A token's scale is worked out by one lane of each warp, which tells the others: divisions are
    // slow.
    constexpr int kPerLane = int(ceil_div(N, 32));
    float inverse[kPerLane] = {};
    if constexpr (kFp8) {
        ptx::named_barrier<kMathThreads>(kMathBarrier);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const uint32_t token = i * 32 + lane;
            const Quantiser quantiser(__uint_as_float(amax[min(token, kFewRows - 1)]));
            inverse[i] = quantiser.inverse;
            if (warp == 0 && first + token < task.num_rows)
                to.scales[first + token] = quantiser.scale;
        }
    }

    // After the 8x8 transposes, lane = token (of 8) * 4 + quad, and a quad has 4 neighbours.
    uint8_t* row =
        to.rows + uint64_t(first + lane / 4) * kHRowBytes + (warp * 16 + quad * 4) * kElementBytes;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const bool mine = first + j * 8 + lane / 4 < task.num_rows;
        if constexpr (kFp8) {
            uint32_t v = 0;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float scale = __shfl_sync(~0u, inverse[j / 4], j % 4 * 8 + quad * 2 + c);
                v |= Quantiser::quantise(acc[0][j * 4 + c], acc[0][j * 4 + 2 + c], scale)
                     << (16 * c);
            }
            v = __byte_perm(ptx::transpose_8x8(v), 0, 0x3120);
            if (mine) ptx::store_u32(row, v);
        } else {
            uint32_t v[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                v[h] = ptx::transpose_8x8(
                    ptx::pack_bf16(acc[0][j * 4 + h * 2], acc[0][j * 4 + h * 2 + 1]));
            if (mine) *reinterpret_cast<uint2*>(row) = make_uint2(v[0], v[1]);
        }
        row += 8 * kHRowBytes;
    }
}

// 4x4 transpose over a quad: in r[i] = part `quad` of piece i; out r[j] = part j of piece `quad`.
MEGAMOE_DEVICE void quad_transpose(uint32_t (&r)[4], uint32_t quad) {
    const bool b0 = quad & 1, b1 = quad & 2;
    const uint32_t t0 = __shfl_xor_sync(~0u, b0 ? r[0] : r[1], 1);
    const uint32_t t1 = __shfl_xor_sync(~0u, b0 ? r[2] : r[3], 1);
    const uint32_t a0 = b0 ? t0 : r[0], a1 = b0 ? r[1] : t0;
    const uint32_t c0 = b0 ? t1 : r[2], c1 = b0 ? r[3] : t1;
    const uint32_t u0 = __shfl_xor_sync(~0u, b1 ? a0 : c0, 2);
    const uint32_t u1 = __shfl_xor_sync(~0u, b1 ? a1 : c1, 2);
    r[0] = b1 ? u0 : a0;
    r[1] = b1 ? u1 : a1;
    r[2] = b1 ? c0 : u0;
    r[3] = b1 ? c1 : u1;
}

MEGAMOE_DEVICE void linear1_many(const MoEParams& p, const Task& task, ManyAccumulators& acc) {
    const uint32_t thread = ptx::thread_anew(), lane = thread & 31, quad = lane & 3;
    const uint32_t first = thread / 32 * 16 + lane / 4;  // and first + 8
    const L2Rows to(p, task);
    const float clamp = p.swiglu_clamp;
    float amax[2] = {0.f, 0.f};
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int j = 0; j < kChunkN / 16; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& v = acc[c][j * 8 + e];
                v = swiglu(v, acc[c][j * 8 + 4 + e], clamp);
                amax[e / 2] = fmaxf(amax[e / 2], fabsf(v));
            }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t row = first + h * 8;
        uint8_t* out = to.rows + uint64_t(row) * kHRowBytes;
        if constexpr (kFp8) {
#pragma unroll
            for (int o = 1; o < 4; o <<= 1)
                amax[h] = fmaxf(amax[h], __shfl_xor_sync(~0u, amax[h], o));
            const Quantiser quantiser(amax[h]);
            if (quad == 0 && row < task.num_rows) to.scales[row] = quantiser.scale;
#pragma unroll
            for (int c = 0; c < 2; ++c) {  // 64 columns: four pieces of 16
                uint32_t w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* v = &acc[c][i * 16 + h * 2];
                    w[i] = quantiser.pack(v[0], v[1]) | quantiser.pack(v[8], v[9]) << 16;
                }
                quad_transpose(w, quad);
                if (row < task.num_rows) ptx::store_u128(out + c * 64 + quad * 16, w);
            }
        } else {
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* v = &acc[c][i * 16 + h * 2];
                    const uint2 w = {ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[8], v[9])};
                    const uint32_t column = c * 64 + i * 16 + quad * 4;
                    if (row < task.num_rows) *reinterpret_cast<uint2*>(out + column * 2) = w;
                }
        }
    }
}

}  // namespace megamoe::moe
