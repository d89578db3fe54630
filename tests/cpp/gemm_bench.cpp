// Speeds of the tile functions on a layer of Qwen3-30B-A3B's shape (2048 / 768).
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "gemm_test.hpp"

namespace gemm_test {

using namespace megamoe::cpu;

namespace {

constexpr int kHidden = 2048, kInter = 768, kMaxRows = 64;

double now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(time).count();
}

uint8_t* allocate(size_t bytes) {
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    if (memory == nullptr) std::abort();
    return memory;
}

struct Layer {
    const TileFns& fns;
    GemmShape shape;
    int num_experts;
    size_t w1_bytes, w2_bytes;
    uint8_t* weights;
    Problem rows;

    Layer(const TileFns& of_fns, bool is_fp8, int experts)
        : fns(of_fns),
          shape{kHidden, kInter, is_fp8},
          num_experts(experts),
          w1_bytes(fns.packed_w1_bytes(shape)),
          w2_bytes(fns.packed_w2_bytes(shape)),
          weights(allocate(experts * (w1_bytes + w2_bytes))),
          rows(shape, kMaxRows, 21) {
        fns.pack_w1(weights, rows.w1.data(), shape);
        fns.pack_w2(weights + w1_bytes, rows.w2.data(), shape);
        for (int i = 1; i < experts; ++i) {
            std::memcpy(weights + i * (w1_bytes + w2_bytes), weights, w1_bytes + w2_bytes);
        }
    }
    ~Layer() { std::free(weights); }

    // Experts `first`, first + step, ...; seconds of the fastest, which other processes on the same
    // cores disturb least.
    double run(int num_rows, int first, int step) const {
        uint8_t* scratch = allocate(scratch_bytes(shape, kMaxRows));
        uint8_t* h = allocate(static_cast<size_t>(kMaxRows) * kInter * 2);
        std::vector<float> h_scale(kMaxRows * kInter / 128);
        std::vector<uint16_t> out(kMaxRows * 128);
        double fastest = 1e9;
        for (int expert = first; expert < num_experts; expert += step) {
            const double start = now();
            const uint8_t* w1 = weights + expert * (w1_bytes + w2_bytes);
            for (int n = 0; n < kInter / kL1TileN; ++n) {
                fns.linear1_tile(
                    rows.x.data(), rows.x_scale.data(), num_rows, w1, rows.w1_scale.data(), shape,
                    n, std::numeric_limits<float>::infinity(), h, h_scale.data(), scratch);
            }
            for (int n = 0; n < kHidden / kL2TileN; ++n) {
                fns.linear2_tile(h, h_scale.data(), num_rows, w1 + w1_bytes, rows.w2_scale.data(),
                                 shape, n, out.data(), scratch);
            }
            fastest = std::fmin(fastest, now() - start);
        }
        std::free(scratch);
        std::free(h);
        return fastest;
    }
};

}  // namespace

void bench(int num_experts, int num_threads) {
    std::printf("\n%d experts, %d threads\n", num_experts, num_threads);
    std::printf(
        "isa       type rows      ms  GFLOP/s   GB/s  GFLOP/s of a thread's fastest expert\n");
    for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
        if (!isa_available(isa)) continue;
        for (const bool is_fp8 : {true, false}) {
            const Layer layer(tile_fns(isa), is_fp8, num_experts);
            for (const int rows : {1, 2, 4, 6, 8, 12, 16, 32, 64}) {
                double wall = 1e9, fastest = 1e9;
                for (int repeat = 0; repeat < 5; ++repeat) {
                    std::vector<double> seconds(num_threads);
                    std::vector<std::thread> threads;
                    const double start = now();
                    for (int i = 0; i < num_threads; ++i) {
                        threads.emplace_back(
                            [&, i] { seconds[i] = layer.run(rows, i, num_threads); });
                    }
                    for (auto& thread : threads) thread.join();
                    wall = std::fmin(wall, now() - start);
                    for (const double value : seconds) fastest = std::fmin(fastest, value);
                    if (now() - start > 0.5) break;
                }
                const double flop = 6.0 * kHidden * kInter * rows;
                const double bytes = 3.0 * kHidden * kInter * num_experts * (is_fp8 ? 1 : 2);
                std::printf("%-9s %-4s %4d %7.1f  %7.1f %6.1f  %7.1f\n", isa_name(isa),
                            is_fp8 ? "fp8" : "bf16", rows, wall * 1e3,
                            flop * num_experts / wall * 1e-9, bytes / wall * 1e-9,
                            flop / fastest * 1e-9);
            }
        }
    }
}

}  // namespace gemm_test
