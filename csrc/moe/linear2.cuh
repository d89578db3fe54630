// Linear 2: a tile of output sums, as BF16, straight into the source ranks' combine slots.
//
// The rows of a stored W2 tile are permuted so that a thread ends with 8 neighbouring columns: row
// 32 s + 8 i + k is column 32 s + 8 (k / 2) + 2 i + k % 2. A quad then stores 64 bytes of a row.
#pragma once

#include "moe/mainloop_few.cuh"
#include "moe/mainloop_many.cuh"

namespace megamoe::moe {

// The last tile of a row may have 128 columns instead of 256.
MEGAMOE_DEVICE bool has_columns(const Task& task, uint32_t half) {
    return kHidden % kTileN == 0 || half == 0 || task.n + 1 < kL2Tiles;
}

// The task's rows from `first` on.
template <int N>
MEGAMOE_DEVICE void linear2_few(SharedStorage& s, const Task& task, float (&acc)[2][N / 2],
                                uint32_t first) {
    const uint32_t thread = ptx::thread_anew(), lane = thread & 31, quad = lane & 3;
    const uint32_t warp = thread / 32;
    const uint32_t column = task.n * kTileN + warp * 32 + quad * 8;
    const bool have = has_columns(task, warp / 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = ptx::transpose_8x8(
                ptx::pack_bf16(acc[i & 1][j * 4 + i / 2 * 2], acc[i & 1][j * 4 + i / 2 * 2 + 1]));
        const uint32_t row = first + j * 8 + lane / 4;
        if (have && row < task.num_rows)
            ptx::store_u128(reinterpret_cast<uint8_t*>(s.row_target[row]) + column * 2, v);
    }
}

MEGAMOE_DEVICE void linear2_many(SharedStorage& s, const Task& task, ManyAccumulators& acc) {
    const uint32_t thread = ptx::thread_anew(), lane = thread & 31, quad = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t row = thread / 32 * 16 + lane / 4 + h * 8;
        if (row >= task.num_rows) continue;
        uint8_t* out =
            reinterpret_cast<uint8_t*>(s.row_target[row]) + (task.n * kTileN + quad * 8) * 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (!has_columns(task, c)) continue;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                uint32_t v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    v[i] = ptx::pack_bf16(acc[c][(g * 4 + i) * 4 + h * 2],
                                          acc[c][(g * 4 + i) * 4 + h * 2 + 1]);
                ptx::store_u128(out + (c * kChunkN + g * 32) * 2, v);
            }
        }
    }
}

}  // namespace megamoe::moe
