// The expert GEMM tiles over FP32 vector FMA, shared by portable, AVX2 and AVX-512.
//
// Included once by each gemm_<isa>.cpp, after gemm_math.hpp; unnamed namespace, see there.
//
// A tile is a loop over K in blocks of 128. Per block: the rows' 128 values become FP32
// (`Core::prepare_x`), then one or two 128x128 weight blocks are multiplied (`Core::multiply`):
// 128 of K are summed in registers and promoted into `acc` with the block's scale.
// Weights are decoded once per row group, in registers; a micro kernel never splits K and never
// sums over lanes, so an output element sees the same operations whatever its row group.
//
// Packed weights: [tile][K block][half][128x128 block], halves gate and up for W1, one for W2; then
// one byte per row of W (in packed order), non-zero if that row holds a NaN code. Those columns
// are set to NaN at the end, which spares the decoder the test.
// A block: [128 / kW column groups][64 k pairs][kW columns][2 k].
#pragma once

#include "cpu/gemm.hpp"
#include "cpu/gemm_math.hpp"

namespace {

using megamoe::cpu::GemmShape;
using megamoe::cpu::kGroup;

constexpr int kAccStride = 2 * kGroup;  // gate columns, then up columns

// A worker's scratch. `rows` padded to 16, the rows of an AMX tile.
struct Scratch {
    float* acc;       // [rows, 256]
    float* x;         // [rows, 128] activations of the current K block
    float* scale;     // [rows] x_scale * w_scale of the current block
    uint8_t* blocks;  // kScratchBlocks bytes for the instruction set

    Scratch(void* memory, int rows) {
        const size_t padded = static_cast<size_t>(rows + 15) / 16 * 16;
        acc = static_cast<float*>(memory);
        x = acc + padded * kAccStride;
        scale = x + padded * kGroup;
        blocks = reinterpret_cast<uint8_t*>(scale + padded);
    }
};

// ------------------------------------------------------------------ packed layout

MM_INLINE size_t block_bytes(const GemmShape& shape) {
    return static_cast<size_t>(kGroup) * kGroup * (shape.is_fp8 ? 1 : 2);
}

// Bytes of packed [n, k] weights, then of their NaN flags.
MM_INLINE size_t packed_bytes(const GemmShape& shape, size_t n, size_t k) {
    return n * k * (shape.is_fp8 ? 1 : 2) + n;
}

size_t packed_w1_bytes(const GemmShape& shape) {
    return packed_bytes(shape, size_t{2} * shape.inter, shape.hidden);
}

size_t packed_w2_bytes(const GemmShape& shape) {
    return packed_bytes(shape, shape.hidden, shape.inter);
}

inline bool has_nan(const uint8_t* codes, int count) {
    uint8_t found = 0;
    for (int i = 0; i < count; ++i) found |= (codes[i] & 0x7f) == 0x7f;
    return found != 0;
}

// Packs a row-major matrix [n, k]; with two halves, a tile takes 128 rows of either half.
template <class Core>
void pack_matrix(uint8_t* dst, const void* weights, const GemmShape& shape, int n, int k,
                 int halves) {
    const size_t element = shape.is_fp8 ? 1 : 2;
    const auto* src = static_cast<const uint8_t*>(weights);
    uint8_t* flags = dst + static_cast<size_t>(n) * k * element;
    const int tiles = n / (kGroup * halves);
    for (int tile = 0; tile < tiles; ++tile) {
        for (int kb = 0; kb < k / kGroup; ++kb) {
            for (int half = 0; half < halves; ++half) {
                const size_t row = (static_cast<size_t>(half) * tiles + tile) * kGroup;
                const uint8_t* from = src + (row * k + static_cast<size_t>(kb) * kGroup) * element;
                Core::pack_block(dst, from, k * element, shape.is_fp8);
                dst += block_bytes(shape);
            }
        }
    }
    for (int tile = 0; tile < tiles; ++tile) {
        for (int half = 0; half < halves; ++half) {
            for (int i = 0; i < kGroup; ++i) {
                const size_t row = (static_cast<size_t>(half) * tiles + tile) * kGroup + i;
                *flags++ = shape.is_fp8 && has_nan(src + row * k, k);
            }
        }
    }
}

template <class Core>
void pack_w1(uint8_t* dst, const void* w1, const GemmShape& shape) {
    pack_matrix<Core>(dst, w1, shape, 2 * shape.inter, shape.hidden, 2);
}

template <class Core>
void pack_w2(uint8_t* dst, const void* w2, const GemmShape& shape) {
    pack_matrix<Core>(dst, w2, shape, shape.hidden, shape.inter, 1);
}

// ------------------------------------------------------------------ tiles

// acc[rows, halves * 128] of one tile.
//   w_scale[half]  scales of the half's blocks, K ascending
template <class Core>
MM_INLINE void accumulate(const void* x, const float* x_scale, int rows, const uint8_t* packed,
                          const float* const* w_scale, int n, int k, int halves, int tile,
                          const GemmShape& shape, Scratch& scratch) {
    using V = typename Core::Vec;
    const size_t element = shape.is_fp8 ? 1 : 2;
    const int num_blocks = k / kGroup;
    const uint8_t* w =
        packed + static_cast<size_t>(tile) * num_blocks * halves * block_bytes(shape);
    std::memset(scratch.acc, 0, sizeof(float) * rows * kAccStride);
    for (int row = 0; row < rows; ++row) scratch.scale[row] = 1.0f;
    Core::begin(rows);
    for (int kb = 0; kb < num_blocks; ++kb) {
        Core::prepare_x(static_cast<const uint8_t*>(x) + kb * kGroup * element, k * element, rows,
                        shape.is_fp8, scratch);
        for (int half = 0; half < halves; ++half, w += block_bytes(shape)) {
            for (int row = 0; shape.is_fp8 && row < rows; ++row) {
                scratch.scale[row] =
                    x_scale[static_cast<size_t>(row) * num_blocks + kb] * w_scale[half][kb];
            }
            Core::multiply(w, rows, shape.is_fp8, scratch, scratch.acc + half * kGroup);
        }
    }
    Core::end();
    const uint8_t* flags =
        packed + static_cast<size_t>(n) * k * element + static_cast<size_t>(tile) * halves * kGroup;
    if (!shape.is_fp8 || std::memchr(flags, 1, halves * kGroup) == nullptr) return;
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < halves * kGroup; i += V::kW) {
            float* to = scratch.acc + static_cast<size_t>(row) * kAccStride + i;
            const auto flag = V::load_u8(flags + i);
            store(to, (typename V::F)(load<typename V::I>(to) | -flag));  // all ones is a NaN
        }
    }
}

template <class Core>
void linear1_tile(const void* x, const float* x_scale, int rows, const uint8_t* packed_w1,
                  const float* w1_scale, const GemmShape& shape, int n, float clamp, void* out,
                  float* out_scale, void* scratch_memory) {
    using V = typename Core::Vec;
    using F = typename V::F;
    const int groups = shape.inter / kGroup;  // of an output row; also the up rows' scale offset
    const int num_blocks = shape.hidden / kGroup;
    const FloatEnvironment environment;
    Scratch scratch(scratch_memory, rows);
    const float* scales[2] = {nullptr, nullptr};
    for (int half = 0; shape.is_fp8 && half < 2; ++half) {
        scales[half] = w1_scale + static_cast<size_t>(half * groups + n) * num_blocks;
    }
    accumulate<Core>(x, x_scale, rows, packed_w1, scales, 2 * shape.inter, shape.hidden, 2, n,
                     shape, scratch);
    for (int row = 0; row < rows; ++row) {
        float* gate = scratch.acc + static_cast<size_t>(row) * kAccStride;
        const size_t at = static_cast<size_t>(row) * shape.inter + static_cast<size_t>(n) * kGroup;
        for (int i = 0; i < kGroup; i += V::kW) {
            const F h = swiglu<V>(load<F>(gate + i), load<F>(gate + kGroup + i), clamp);
            if (shape.is_fp8) {
                store(gate + i, h);
            } else {
                store_bf16<V>(static_cast<uint16_t*>(out) + at + i, h);
            }
        }
        if (shape.is_fp8) {
            out_scale[static_cast<size_t>(row) * groups + n] =
                quantize_group<V>(gate, static_cast<uint8_t*>(out) + at);
        }
    }
}

template <class Core>
void linear2_tile(const void* h, const float* h_scale, int rows, const uint8_t* packed_w2,
                  const float* w2_scale, const GemmShape& shape, int n, uint16_t* out,
                  void* scratch_memory) {
    using V = typename Core::Vec;
    const FloatEnvironment environment;
    Scratch scratch(scratch_memory, rows);
    const size_t first = static_cast<size_t>(n) * (shape.inter / kGroup);
    const float* scale = shape.is_fp8 ? w2_scale + first : nullptr;
    accumulate<Core>(h, h_scale, rows, packed_w2, &scale, shape.hidden, shape.inter, 1, n, shape,
                     scratch);
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < kGroup; i += V::kW) {
            store_bf16<V>(out + row * kGroup + i,
                          load<typename V::F>(scratch.acc + row * kAccStride + i));
        }
    }
}

template <class Core>
constexpr megamoe::cpu::TileFns make_tile_fns(megamoe::cpu::Isa isa) {
    using V = typename Core::Vec;
    return {isa,
            packed_w1_bytes,
            packed_w2_bytes,
            pack_w1<Core>,
            pack_w2<Core>,
            linear1_tile<Core>,
            linear2_tile<Core>,
            quantize_row<V>,
            reduce_token<V>};
}

}  // namespace
