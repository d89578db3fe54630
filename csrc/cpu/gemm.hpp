// Tile functions of the CPU backend: the two expert GEMMs with their epilogues, input
// quantisation and the top-k reduction, once per instruction set.
//
// Worker threads call them; nothing here starts a thread, allocates, or keeps state between calls.
//
// Numerics (the contract of the layer):
//   partial = sum over 128 of K in FP32, k ascending; acc = fma(partial, x_scale * w_scale, acc),
//   blocks of K ascending; SwiGLU in FP32; requantisation per 1x128 group.
// Invariants:
//   - Batch invariance: the bits of an output row depend on that row and the weights alone, never
//     on `rows` or on the row's position. Every micro kernel of one instruction set uses the same
//     order of operations per output element.
//   - kPortable, kAvx2 and kAvx512 give equal bits (products of two e4m3 or two BF16 values are
//     exact in FP32). kAmx sums the 128 of K in the order of the tile unit.
//   - The packed layout belongs to the instruction set: pack and run with the same TileFns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/isa.hpp"

namespace megamoe::cpu {

inline constexpr int kGroup = 128;    // K of one scale group and of one FP32 partial sum
inline constexpr int kL1TileN = 128;  // intermediate columns of a Linear 1 tile
inline constexpr int kL2TileN = 128;  // output columns of a Linear 2 tile
inline constexpr size_t kAlign = 64;  // alignment of packed weights and scratch, in bytes
inline constexpr size_t kScratchBlocks =
    64 << 10;  // scratch of an instruction set for one weight block

// One expert. `hidden` and `inter` are positive multiples of 128.
struct GemmShape {
    int hidden;   // H
    int inter;    // I
    bool is_fp8;  // e4m3 weights and activations with FP32 scales, or BF16 without scales
};

struct TileFns {
    Isa isa;

    // Bytes of one expert's packed W1 [2I, H] (gate rows, then up rows) or W2 [H, I]: the size of
    // the weights plus one byte per row; a multiple of 64.
    size_t (*packed_w1_bytes)(const GemmShape& shape);
    size_t (*packed_w2_bytes)(const GemmShape& shape);
    // `dst` is kAlign-aligned; `w1`, `w2` row-major e4m3 or BF16.
    void (*pack_w1)(uint8_t* dst, const void* w1, const GemmShape& shape);
    void (*pack_w2)(uint8_t* dst, const void* w2, const GemmShape& shape);

    // Linear 1 with SwiGLU: intermediate columns [128 n, 128 n + 128) of `rows` tokens.
    //   x         e4m3 or BF16 [rows, H], row stride H elements
    //   x_scale   FP32 [rows, H/128] (FP8 only, else null)
    //   w1_scale  FP32 [2I/128, H/128] (FP8 only, else null)
    //   clamp     gate <= clamp, |up| <= clamp; +inf for none
    //   out       the row block's column 0: e4m3 or BF16 [rows, I], row stride I elements
    //   out_scale FP32 [rows, I/128]; column n is written (FP8 only, else null)
    //   scratch   scratch_bytes(shape, >= rows) bytes, kAlign-aligned, private to the caller
    void (*linear1_tile)(const void* x, const float* x_scale, int rows, const uint8_t* packed_w1,
                         const float* w1_scale, const GemmShape& shape, int n, float clamp,
                         void* out, float* out_scale, void* scratch);

    // Linear 2: output columns [128 n, 128 n + 128) of `rows` rows.
    //   h, h_scale  as x, x_scale with I for H
    //   w2_scale    FP32 [H/128, I/128]
    //   out         BF16 [rows, 128], contiguous
    void (*linear2_tile)(const void* h, const float* h_scale, int rows, const uint8_t* packed_w2,
                         const float* w2_scale, const GemmShape& shape, int n, uint16_t* out,
                         void* scratch);

    // One BF16 token row of `hidden` columns to e4m3 [hidden] and FP32 scales [hidden/128].
    void (*quantize_row)(const uint16_t* x, int hidden, uint8_t* q, float* scale);

    // y = BF16(fma chain over slots in the given order, from 0): `slots[j]` BF16 [hidden].
    // num_slots = 0 gives zeros. `y` may not overlap a slot.
    void (*reduce_token)(const uint16_t* const* slots, const float* weights, int num_slots,
                         int hidden, uint16_t* y);
};

// The functions of one instruction set; throws std::runtime_error if this build or machine lacks
// it.
const TileFns& tile_fns(Isa isa);

// Scratch of one worker for tiles of at most `max_rows` rows; enough for every instruction set.
size_t scratch_bytes(const GemmShape& shape, int max_rows);

}  // namespace megamoe::cpu
