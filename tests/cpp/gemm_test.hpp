// Parts of gemm_test: checks, random problems with an FP64 reference, and calls of the tiles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/fp8.hpp"
#include "cpu/gemm.hpp"

namespace gemm_test {

using megamoe::cpu::GemmShape;
using megamoe::cpu::TileFns;

// Prints the first 20 failures of a program and counts all.
int failures();
__attribute__((format(printf, 2, 3))) void check(bool ok, const char* format, ...);

struct Random {
    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t next();
    double uniform();  // (0, 1)
    double normal();

    uint64_t state;
};

// A sum of products in FP64 and the sum of the products' magnitudes, for error bounds.
struct Sum {
    double value = 0, absolute = 0;
};

// One expert with random weights and some rows, in the layouts of gemm.hpp.
struct Problem {
    Problem(const GemmShape& shape, int num_rows, uint64_t seed);

    size_t element() const { return shape.is_fp8 ? 1 : 2; }
    Problem rows(int first, int count) const;  // the same expert, part of the rows
    void set_nan(std::vector<uint8_t>& matrix, size_t index) const;

    // Stored values without their scales.
    float x_at(int row, int k) const { return at(x, static_cast<size_t>(row) * shape.hidden + k); }
    float h_at(int row, int k) const { return at(h, static_cast<size_t>(row) * shape.inter + k); }
    float w1_at(int row, int k) const {
        return at(w1, static_cast<size_t>(row) * shape.hidden + k);
    }
    float w2_at(int row, int k) const { return at(w2, static_cast<size_t>(row) * shape.inter + k); }
    float h_scale_at(int row, int kb) const { return h_scale[row * (shape.inter / 128) + kb]; }
    float w2_scale_at(int row, int kb) const {
        return w2_scale[row / 128 * (shape.inter / 128) + kb];
    }

    Sum linear1(int row, int w1_row) const;
    Sum linear2(int row, int w2_row) const;

    GemmShape shape;
    int num_rows;
    std::vector<uint8_t> x, h, w1, w2;
    std::vector<float> x_scale, h_scale, w1_scale, w2_scale;

  private:
    float at(const std::vector<uint8_t>& matrix, size_t index) const;
};

// Output of all tiles of Linear 1. Poisoned before the run.
struct Intermediate {
    std::vector<uint8_t> data;
    std::vector<float> scale;
    double at(const GemmShape& shape, int row, int column) const;
};

Intermediate run_linear1(const TileFns& fns, const Problem& problem, int rows, float clamp);

// Tile n of Linear 2: BF16 [rows, 128]. Writes beyond the tile are failures.
std::vector<uint16_t> run_linear2(const TileFns& fns, const GemmShape& shape,
                                  const std::vector<uint8_t>& h, const std::vector<float>& h_scale,
                                  const std::vector<uint8_t>& w2,
                                  const std::vector<float>& w2_scale, int rows, int n);

// The value of an e4m3 code, from the definition of the format: independent of fp8.hpp.
double code_value(int code);

// gemm_elements.cpp
void test_scalar_conversions();
void test_quantize_every_value(const TileFns& fns);
void test_quantize_rows(const TileFns& fns);
void test_reduce(const TileFns& fns);

// The AMX tile functions on a model of the tile unit, for machines without it.
const TileFns& emulated_amx_tile_fns();

// Prints speeds of one Qwen3-30B-A3B-shaped layer for each available instruction set.
void bench(int num_experts, int num_threads);

}  // namespace gemm_test
