// The 128x128 block product on AMX tiles in BF16 (e4m3 to BF16 is exact); the tile loop and the
// epilogues are those of gemm_tile.hpp. Unnamed namespace, see gemm_math.hpp.
//
// The including file provides the _tile_* intrinsics (a test replaces them by a model) and
// Expand::fp8_to_bf16, which turns 64 codes into two B rows.
//
// Order of one output element: the tile unit sums 32 of K per instruction, four instructions per
// 128 of K, from zero; then one FP32 promotion. It depends on neither the row nor `rows`.
//
// Packed block: [8 groups of 16 columns][...], per group
//   BF16: [64 k pairs][16 columns][2 k], which are B rows already;
//   FP8:  [32 k quads] of 64 bytes: 16-byte lane l holds columns 4l..4l+3 as (k0, k1) pairs, then
//         the same columns as (k2, k3), so that interleaving bytes within lanes gives B rows.
#pragma once

#include "cpu/gemm_tile.hpp"

namespace {

constexpr int kTileRows = 16, kTileRowBytes = 64, kTileBytes = kTileRows * kTileRowBytes;
constexpr int kTileK = 32;                                 // K per tile product, in BF16 values
constexpr int kColumnsPerTile = 16;                        // FP32 columns of a C tile
constexpr int kGroupBytes = kGroup / kTileK * kTileBytes;  // B rows of 16 columns, 128 of K
constexpr int kXRowBytes = kGroup * 2;
constexpr int kPrefetchBytes = 4096;  // hardware prefetchers stop at the end of a page

// LDTILECFG's operand, palette 1.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The tile instructions' memory operands are not visible to the compiler.
MM_INLINE void compiler_barrier() { asm volatile("" ::: "memory"); }

template <class V, class Expand>
struct AmxCore {
    using Vec = V;

    static void pack_block(uint8_t* dst, const uint8_t* src, size_t row_bytes, bool is_fp8) {
        if (!is_fp8) return pack_bf16(dst, src, row_bytes);
        for (int group = 0; group < kGroup; group += kColumnsPerTile) {
            for (int k = 0; k < kGroup; k += 4) {
                for (int lane = 0; lane < 4; ++lane) {
                    for (int pair = 0; pair < 4; pair += 2) {
                        for (int i = 0; i < 4; ++i, dst += 2) {
                            std::memcpy(dst, src + (group + 4 * lane + i) * row_bytes + k + pair,
                                        2);
                        }
                    }
                }
            }
        }
    }

    // Tiles 0-3 hold C, 4-5 A, 6-7 B. Fewer than 16 rows: smaller C and A tiles, which are faster.
    static void begin(int rows) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.row_bytes[tile] = kTileRowBytes;
            config.rows[tile] = static_cast<uint8_t>(tile < 6 && rows < 16 ? rows : 16);
        }
        // GCC's intrinsic tells the compiler of 8 of the 64 bytes that the instruction reads.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }

    static void end() { _tile_release(); }

    // 128 columns of `rows` rows to BF16 [rows, 128]; zero rows after more than 16, to a multiple.
    static void prepare_x(const uint8_t* src, size_t row_bytes, int rows, bool is_fp8,
                          Scratch& scratch) {
        auto* to = reinterpret_cast<uint8_t*>(scratch.x);
        for (int row = 0; row < rows; ++row, to += kXRowBytes, src += row_bytes) {
            if (!is_fp8) {
                std::memcpy(to, src, kXRowBytes);
                continue;
            }
            for (int i = 0; i < kGroup; i += V::kW) {
                store_bf16<V>(reinterpret_cast<uint16_t*>(to) + i, load_e4m3<V>(src + i));
            }
        }
        if (rows > kTileRows) {
            std::memset(to, 0, static_cast<size_t>((16 - rows % 16) % 16) * kXRowBytes);
        }
    }

    static void multiply(const uint8_t* w, int rows, bool is_fp8, Scratch& scratch, float* acc) {
        constexpr int kPass = 4;  // column groups decoded at once: 16 KB of BF16, within L1
        constexpr int kPassColumns = kPass * kColumnsPerTile;
        const size_t group_bytes = is_fp8 ? kGroupBytes / 2 : kGroupBytes;
        auto* sums = reinterpret_cast<float*>(scratch.blocks);
        uint8_t* decoded = scratch.blocks + 2 * kTileRows * kPassColumns * sizeof(float);
        const auto* x = reinterpret_cast<const uint8_t*>(scratch.x);
        for (int column = 0; column < kGroup; column += kPassColumns, w += kPass * group_bytes) {
            const uint8_t* b = w;
            if (is_fp8) {
                for (int i = 0; i < kPass * kGroupBytes; i += 2 * kTileRowBytes) {
                    __builtin_prefetch(w + i / 2 + kPrefetchBytes);
                    Expand::fp8_to_bf16(w + i / 2, decoded + i);
                }
                b = decoded;
            }
            for (int row = 0; row < rows;) {
                const uint8_t* a = x + row * kXRowBytes;
                const int count = rows - row > kTileRows ? 2 * kTileRows : kTileRows;
                compiler_barrier();
                if (count == kTileRows) {
                    product_1x4(a, b, sums);
                } else {
                    product_2x2(a, b, sums);
                    product_2x2(a, b + 2 * kGroupBytes, sums + 2 * kColumnsPerTile);
                }
                compiler_barrier();
                const int end = row + count < rows ? row + count : rows;
                promote(sums, scratch.scale, row, end, acc + column);
                row = end;
            }
        }
    }

  private:
    static constexpr int kSumStride = 4 * kColumnsPerTile * static_cast<int>(sizeof(float));

    static void pack_bf16(uint8_t* dst, const uint8_t* src, size_t row_bytes) {
        for (int group = 0; group < kGroup; group += kColumnsPerTile) {
            for (int k = 0; k < kGroup; k += 2) {
                for (int i = 0; i < kColumnsPerTile; ++i, dst += 4) {
                    std::memcpy(dst, src + (group + i) * row_bytes + k * 2, 4);
                }
            }
        }
    }

    // sums[16 rows, 64 columns] = x [16, 128] . w
    static void product_1x4(const uint8_t* a, const uint8_t* b, float* sums) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < kGroup / kTileK; ++k, a += kTileRowBytes, b += kTileBytes) {
            _tile_loadd(4, a, kXRowBytes);
            _tile_loadd(6, b, kTileRowBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + kGroupBytes, kTileRowBytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, b + 2 * kGroupBytes, kTileRowBytes);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, b + 3 * kGroupBytes, kTileRowBytes);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, sums, kSumStride);
        _tile_stored(1, sums + 16, kSumStride);
        _tile_stored(2, sums + 32, kSumStride);
        _tile_stored(3, sums + 48, kSumStride);
    }

    // sums[32 rows, 32 columns], row stride 64 columns
    static void product_2x2(const uint8_t* a, const uint8_t* b, float* sums) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < kGroup / kTileK; ++k, a += kTileRowBytes, b += kTileBytes) {
            _tile_loadd(4, a, kXRowBytes);
            _tile_loadd(6, b, kTileRowBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + kGroupBytes, kTileRowBytes);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + kTileRows * kXRowBytes, kXRowBytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float* lower = sums + kTileRows * kSumStride / sizeof(float);
        _tile_stored(0, sums, kSumStride);
        _tile_stored(1, sums + 16, kSumStride);
        _tile_stored(2, lower, kSumStride);
        _tile_stored(3, lower + 16, kSumStride);
    }

    // acc[row, 64 columns] += sums * scale[row]
    static void promote(const float* sums, const float* scale, int row, int end, float* acc) {
        using F = typename V::F;
        for (; row < end; ++row, sums += kSumStride / sizeof(float)) {
            const F s = V::splat(scale[row]);
            float* to = acc + static_cast<size_t>(row) * kAccStride;
            for (int i = 0; i < 4 * kColumnsPerTile; i += V::kW) {
                store(to + i, V::fma(load<F>(sums + i), s, load<F>(to + i)));
            }
        }
    }
};

}  // namespace
