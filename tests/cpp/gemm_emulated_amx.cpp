// The AMX tile functions on a model of the tile unit, so that their packing, tiling and indexing
// are tested on machines without it. The model follows Intel's description of TDPBF16PS: even and
// odd k are summed apart, then added to C.
#include <cstring>

#include "cpu/fp8.hpp"
#include "gemm_test.hpp"

namespace {

struct Tile {
    int rows = 0, bytes = 0;
    uint8_t data[16][64];
};
thread_local Tile tiles[8];

void tile_config(const void* memory) {
    const auto* config = static_cast<const uint8_t*>(memory);
    gemm_test::check(config[0] == 1, "palette %d", config[0]);
    for (int i = 0; i < 8; ++i) {
        uint16_t bytes = 0;
        std::memcpy(&bytes, config + 16 + 2 * i, 2);
        tiles[i].rows = config[48 + i];
        tiles[i].bytes = bytes;
        std::memset(tiles[i].data, 0, sizeof(tiles[i].data));
    }
}

void tile_zero(int dst) { std::memset(tiles[dst].data, 0, sizeof(tiles[dst].data)); }

void tile_load(int dst, const void* from, long stride) {
    Tile& tile = tiles[dst];
    tile_zero(dst);
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(tile.data[row], static_cast<const uint8_t*>(from) + row * stride, tile.bytes);
    }
}

void tile_store(int src, void* to, long stride) {
    const Tile& tile = tiles[src];
    for (int row = 0; row < tile.rows; ++row) {
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.data[row], tile.bytes);
    }
}

float bf16_at(const Tile& tile, int row, int index) {
    uint16_t bits = 0;
    std::memcpy(&bits, tile.data[row] + 2 * index, 2);
    return megamoe::cpu::bf16_to_float(bits);
}

void tile_dpbf16ps(int dst, int left, int right) {
    Tile &c = tiles[dst], &a = tiles[left], &b = tiles[right];
    gemm_test::check(c.rows == a.rows && a.bytes == 4 * b.rows && b.bytes == c.bytes,
                     "tile shapes: C %dx%d, A %dx%d, B %dx%d", c.rows, c.bytes, a.rows, a.bytes,
                     b.rows, b.bytes);
    for (int m = 0; m < a.rows; ++m) {
        for (int n = 0; n < c.bytes / 4; ++n) {
            float even = 0, odd = 0, sum = 0;
            for (int k = 0; k < a.bytes / 4; ++k) {
                even += bf16_at(a, m, 2 * k) * bf16_at(b, k, 2 * n);
                odd += bf16_at(a, m, 2 * k + 1) * bf16_at(b, k, 2 * n + 1);
            }
            std::memcpy(&sum, c.data[m] + 4 * n, 4);
            sum += even + odd;
            std::memcpy(c.data[m] + 4 * n, &sum, 4);
        }
    }
}

}  // namespace

#define _tile_loadconfig(memory) tile_config(memory)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(dst) tile_zero(dst)
#define _tile_loadd(dst, from, stride) tile_load(dst, from, stride)
#define _tile_stored(src, to, stride) tile_store(src, to, stride)
#define _tile_dpbf16ps(dst, left, right) tile_dpbf16ps(dst, left, right)

#include "cpu/gemm_amx_core.hpp"
#include "cpu/gemm_math.hpp"
#include "cpu/gemm_tile.hpp"
#include "cpu/gemm_vec4.hpp"

namespace {

struct ExpandScalar {
    static void fp8_to_bf16(const uint8_t* from, uint8_t* to) {
        for (int lane = 0; lane < 4; ++lane) {
            for (int i = 0; i < 16; ++i) {
                const float value = megamoe::cpu::e4m3_to_float(from[lane * 16 + i]);
                const uint16_t bits = megamoe::cpu::float_to_bf16(value);
                std::memcpy(to + i / 8 * 64 + lane * 16 + i % 8 * 2, &bits, 2);
            }
        }
    }
};

}  // namespace

namespace gemm_test {

const TileFns& emulated_amx_tile_fns() {
    static constexpr TileFns fns =
        make_tile_fns<AmxCore<Vec4, ExpandScalar>>(megamoe::cpu::Isa::kAmx);
    return fns;
}

}  // namespace gemm_test
