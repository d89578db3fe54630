// The 128x128 block product in FP32 FMA, for the vectors of gemm_math.hpp. Unnamed namespace, see
// there.
//
// A panel of NV * kW columns is decoded once into FP32 scratch that fits the L1 cache, then groups
// of up to kMaxRows rows are multiplied by it, their sums in registers; a single row is multiplied
// while decoding. No kernel splits K or sums over lanes, so that an output element sees the same
// operations in the same order whatever its row group.
//
// Packed block: [128 / kW column groups][128 / kStep k groups][kW columns][kStep k], so that one
// 32-bit lane holds kStep consecutive k of its column: 4 e4m3 codes or 2 BF16 numbers.
#pragma once

#include "cpu/gemm_tile.hpp"

namespace {

// Weights are read once, in order. The next panels are fetched by hand: column groups of 1 or 2 KB
// side by side are too short for a hardware prefetcher (8 rows: 42 without, 60 GFLOP/s with).
constexpr int kPrefetchBytes = 8192;

// Decoding one vector of lanes into kStep vectors of columns, k ascending.
template <class V>
struct Fp8Weights {
    static constexpr int kStep = 4, kElement = 1;

    // A code's 7 bits below the sign, shifted into place, are an FP32 number 2^-120 times too small
    // (denormals included: exact). NaN codes decode to 480; see the flags in gemm_tile.hpp.
    MM_INLINE static void decode(const uint8_t* from, typename V::F (&out)[4]) {
        using I = typename V::I;
        using F = typename V::F;
        using I16 = typename V::I16;
        constexpr int32_t kMask = static_cast<int32_t>(0x87f00000);
        const I16 codes = load<I16>(from);
        const I odd = (I)(codes >> 4), even = (I)(codes << 8 >> 4);
        out[0] = (F)(even << 16 & kMask) * 0x1p120f;
        out[1] = (F)(odd << 16 & kMask) * 0x1p120f;
        out[2] = (F)(even & kMask) * 0x1p120f;
        out[3] = (F)(odd & kMask) * 0x1p120f;
    }
};

template <class V>
struct Bf16Weights {
    static constexpr int kStep = 2, kElement = 2;

    MM_INLINE static void decode(const uint8_t* from, typename V::F (&out)[2]) {
        const auto pairs = load<typename V::I>(from);
        out[0] = (typename V::F)(pairs << 16);
        out[1] = (typename V::F)(pairs & static_cast<int32_t>(0xffff0000));
    }
};

template <class V, int MR, int NV>
MM_INLINE void promote(const typename V::F (&partial)[MR][NV], const float* scale, float* acc) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) {
            float* to = acc + r * kAccStride + v * V::kW;
            store(to, V::fma(partial[r][v], V::splat(scale[r]), load<typename V::F>(to)));
        }
    }
}

// acc[MR rows, NV * kW columns] += (x . panel over 128 of K) * scale[row].
template <class V, int MR, int NV>
__attribute__((noinline)) void multiply_rows(const float* x, const float* panel, const float* scale,
                                             float* acc) {
    using F = typename V::F;
    F partial[MR][NV] = {};
#pragma GCC unroll 4
    for (int k = 0; k < kGroup; ++k) {
        // The smaller side stays in registers.
        if constexpr (MR <= NV) {
            F row[MR];
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) row[r] = V::splat(x[r * kGroup + k]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) {
                const F column = load<F>(panel + v * V::kW);
#pragma GCC unroll 16
                for (int r = 0; r < MR; ++r) {
                    partial[r][v] = V::mul_add(row[r], column, partial[r][v]);
                }
            }
        } else {
            F column[NV];
#pragma GCC unroll 16
            for (int v = 0; v < NV; ++v) column[v] = load<F>(panel + v * V::kW);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const F row = V::splat(x[r * kGroup + k]);
#pragma GCC unroll 16
                for (int v = 0; v < NV; ++v) {
                    partial[r][v] = V::mul_add(row, column[v], partial[r][v]);
                }
            }
        }
        panel += NV * V::kW;
    }
    promote<V>(partial, scale, acc);
}

// The same for one row, straight from a packed block.
template <class V, class W, int NV>
__attribute__((noinline)) void multiply_one_row(const float* x, const uint8_t* w,
                                                const float* scale, float* acc) {
    using F = typename V::F;
    constexpr int kGroupBytes = V::kW * kGroup * W::kElement;
    F partial[1][NV] = {};
    for (int k = 0; k < kGroup; k += W::kStep, w += V::kW * 4) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) {
            F decoded[W::kStep];
            __builtin_prefetch(w + v * kGroupBytes + kPrefetchBytes);
            W::decode(w + v * kGroupBytes, decoded);
#pragma GCC unroll 4
            for (int i = 0; i < W::kStep; ++i) {
                partial[0][v] = V::mul_add(V::splat(x[k + i]), decoded[i], partial[0][v]);
            }
        }
    }
    promote<V>(partial, scale, acc);
}

template <class V, class W, int NV>
__attribute__((noinline)) void decode_panel(const uint8_t* w, float* panel) {
    using F = typename V::F;
    constexpr int kGroupBytes = V::kW * kGroup * W::kElement;
#pragma GCC unroll 2
    for (int k = 0; k < kGroup; k += W::kStep, w += V::kW * 4) {
#pragma GCC unroll 16
        for (int v = 0; v < NV; ++v) {
            F decoded[W::kStep];
            __builtin_prefetch(w + v * kGroupBytes + kPrefetchBytes);
            W::decode(w + v * kGroupBytes, decoded);
#pragma GCC unroll 4
            for (int i = 0; i < W::kStep; ++i) {
                store(panel + ((k + i) * NV + v) * V::kW, decoded[i]);
            }
        }
    }
}

template <class V>
struct VectorCore {
    using Vec = V;

    static void pack_block(uint8_t* dst, const uint8_t* src, size_t row_bytes, bool is_fp8) {
        const int k_bytes = kGroup * (is_fp8 ? 1 : 2);
        for (int group = 0; group < kGroup; group += V::kW) {
            for (int k = 0; k < k_bytes; k += 4) {
                for (int i = 0; i < V::kW; ++i, dst += 4) {
                    std::memcpy(dst, src + (group + i) * row_bytes + k, 4);
                }
            }
        }
    }

    static void begin(int) {}
    static void end() {}

    // 128 columns of `rows` rows to FP32.
    static void prepare_x(const uint8_t* src, size_t row_bytes, int rows, bool is_fp8,
                          Scratch& scratch) {
        float* to = scratch.x;
        for (int row = 0; row < rows; ++row, to += kGroup, src += row_bytes) {
            for (int i = 0; i < kGroup; i += V::kW) {
                if (is_fp8) {
                    store(to + i, load_e4m3<V>(src + i));
                } else {
                    store(to + i, load_bf16<V>(reinterpret_cast<const uint16_t*>(src) + i));
                }
            }
        }
    }

    static void multiply(const uint8_t* w, int rows, bool is_fp8, Scratch& scratch, float* acc) {
        if (is_fp8) {
            multiply_as<Fp8Weights<V>>(w, rows, scratch, acc);
        } else {
            multiply_as<Bf16Weights<V>>(w, rows, scratch, acc);
        }
    }

  private:
    template <class W>
    static void multiply_as(const uint8_t* w, int rows, Scratch& scratch, float* acc) {
        constexpr int kNV = V::kSums;  // one row needs as many independent sums
        if (rows == 1) {
            for (int column = 0; column < kGroup; column += kNV * V::kW) {
                multiply_one_row<V, W, kNV>(scratch.x, w + column * kGroup * W::kElement,
                                            scratch.scale, acc + column);
            }
        } else if (rows <= V::kFewRows) {
            multiply_panels<W, V::kFewRows, V::kFewVectors>(w, rows, scratch, acc);
        } else {
            multiply_panels<W, V::kMaxRows, V::kVectors>(w, rows, scratch, acc);
        }
    }

    template <class W, int kMaxRows, int NV>
    static void multiply_panels(const uint8_t* w, int rows, Scratch& scratch, float* acc) {
        auto* panel = reinterpret_cast<float*>(scratch.blocks);
        static_assert(sizeof(float) * kGroup * NV * V::kW <= megamoe::cpu::kScratchBlocks);
        for (int column = 0; column < kGroup; column += NV * V::kW) {
            decode_panel<V, W, NV>(w + column * kGroup * W::kElement, panel);
            // As few row groups as possible, of nearly equal size.
            int groups = (rows + kMaxRows - 1) / kMaxRows;
            for (int row = 0; row < rows; --groups) {
                const int count = (rows - row + groups - 1) / groups;
                dispatch<kMaxRows, NV>(count, scratch.x + row * kGroup, panel, scratch.scale + row,
                                       acc + static_cast<size_t>(row) * kAccStride + column);
                row += count;
            }
        }
    }

    template <int MR, int NV>
    static void dispatch(int count, const float* x, const float* panel, const float* scale,
                         float* acc) {
        if constexpr (MR > 1) {
            if (count != MR) return dispatch<MR - 1, NV>(count, x, panel, scale, acc);
        }
        multiply_rows<V, MR, NV>(x, panel, scale, acc);
    }
};

}  // namespace
