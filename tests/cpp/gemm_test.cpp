// Test and bench of the CPU tile functions, without Python. From the root of the repository:
//
//   mkdir -p build/gemm; have="-DMEGAMOE_HAVE_AVX2 -DMEGAMOE_HAVE_AVX512 -DMEGAMOE_HAVE_AMX"
//   cxx="g++ -std=c++20 -O3 -ffp-contract=off -Icsrc $have"; v2="-mavx2 -mfma -mf16c"
//   v4="$v2 -mavx512f -mavx512bw -mavx512vl -mavx512dq"
//   for f in csrc/cpu/gemm*.cpp csrc/cpu/isa.cpp tests/cpp/gemm_*.cpp; do case $f in
//     *_avx2.cpp) x=$v2;; *_avx512.cpp) x=$v4;; */gemm_amx.cpp)
//     x="$v4 -mavx512vbmi -mamx-tile -mamx-bf16";; *) x=;; esac
//     $cxx $x -c $f -o build/gemm/$(basename $f .cpp).o & done; wait
//   $cxx build/gemm/*.o -lpthread -o build/gemm/gemm_test
//   build/gemm/gemm_test          tests every instruction set of this machine; 1 after a failure
//   build/gemm/gemm_test --best   names the one that MEGAMOE_ISA or this machine gives
//   build/gemm/gemm_test --bench [experts [threads]]    prints a table of speeds
//
// tests/unit/test_cpp_gemm.py does the same.
#include "gemm_test.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

using namespace megamoe::cpu;
using namespace gemm_test;

namespace {

const float kInf = std::numeric_limits<float>::infinity();
const double kEps = std::ldexp(1.0, -24);  // half a unit in the last place of FP32, relative

// ------------------------------------------------------------------ GEMM, values of codes

// All 256 codes as weights, then as activations, against one-hot partners.
void test_decode_every_code(const TileFns& fns) {
    const GemmShape shape{256, 128, true};  // W2 is [256, 128]
    for (const bool as_weight : {true, false}) {
        std::vector<uint8_t> w2(256 * 128, 0), h(256 * 128, 0);
        std::vector<uint8_t>&codes = as_weight ? w2 : h, &ones = as_weight ? h : w2;
        for (int i = 0; i < 256; ++i) {
            codes[i * 128 + i % 128] = static_cast<uint8_t>(i);
            ones[i * 128 + i % 128] = 0x38;  // 1.0
        }
        const std::vector<float> scale(256, 1.0f);
        for (int n = 0; n < 2; ++n) {
            const auto out = run_linear2(fns, shape, h, scale, w2, scale, 256, n);
            for (int row = 0; row < 256; ++row) {
                for (int i = 0; i < 128; ++i) {
                    const int code = as_weight ? n * 128 + i : row;
                    const bool same = row % 128 == i;
                    const float got = bf16_to_float(out[row * 128 + i]);
                    if ((code & 127) == 127) {  // NaN times the zeros of every other row, too
                        check(std::isnan(got), "code %d [%d, %d]: %g, want NaN", code, row, i, got);
                    } else {
                        const double want = same ? code_value(code) : 0;
                        check(got == want, "code %d [%d, %d]: %g, want %g", code, row, i, got,
                              want);
                    }
                }
            }
        }
    }
}

// ------------------------------------------------------------------ GEMM against FP64

// Linear 2 in the contract's own operations: FP32, k ascending, one promotion per 128.
float contract_linear2(const Problem& p, int row, int column) {
    float acc = 0;
    for (int kb = 0; kb < p.shape.inter / 128; ++kb) {
        float partial = 0;
        for (int k = kb * 128; k < kb * 128 + 128; ++k) {
            partial = std::fma(p.h_at(row, k), p.w2_at(column, k), partial);
        }
        const float scale = p.shape.is_fp8 ? p.h_scale_at(row, kb) * p.w2_scale_at(column, kb) : 1;
        acc = std::fma(partial, scale, acc);
    }
    return acc;
}

void test_linear2(const TileFns& fns, const Problem& p, int rows) {
    for (int n = 0; n < p.shape.hidden / 128; ++n) {
        const auto out = run_linear2(fns, p.shape, p.h, p.h_scale, p.w2, p.w2_scale, rows, n);
        for (int row = 0; row < rows; ++row) {
            for (int i = 0; i < 128; ++i) {
                const int column = n * 128 + i;
                const uint16_t got = out[row * 128 + i];
                if (fns.isa != Isa::kAmx) {
                    const uint16_t want = float_to_bf16(contract_linear2(p, row, column));
                    check(got == want, "linear2 [%d, %d]: %g, want exactly %g", row, column,
                          bf16_to_float(got), bf16_to_float(want));
                }
                const Sum want = p.linear2(row, column);
                const double tolerance = want.absolute * (130 + p.shape.inter / 128) * kEps +
                                         std::fabs(want.value) / 256;
                check(std::fabs(bf16_to_float(got) - want.value) <= tolerance,
                      "linear2 [%d, %d]: %.9g, want %.9g +- %.2g", row, column, bf16_to_float(got),
                      want.value, tolerance);
            }
        }
    }
}

void test_linear1(const TileFns& fns, const Problem& p, int rows, float clamp) {
    const int inter = p.shape.inter, groups = inter / 128;
    const Intermediate out = run_linear1(fns, p, rows, clamp);
    for (int row = 0; row < rows; ++row) {
        for (int group = 0; group < groups; ++group) {
            double amax = 1e-30, worst = 0;
            std::vector<double> want(128), error(128);
            for (int i = 0; i < 128; ++i) {
                const int column = group * 128 + i;
                const Sum gate = p.linear1(row, column), up = p.linear1(row, inter + column);
                const double rounding = (130 + p.shape.hidden / 128) * kEps;
                const double g = std::fmin(gate.value, clamp);
                const double u = std::fmax(std::fmin(up.value, clamp), -clamp);
                const double silu = g / (1 + std::exp(-g));
                want[i] = silu * u;
                // |silu'| <= 1.1; 8 roundings of SwiGLU, of which the exponential counts 4.
                error[i] = 1.1 * gate.absolute * rounding * std::fabs(u) +
                           std::fabs(silu) * up.absolute * rounding + 8 * kEps * std::fabs(want[i]);
                amax = std::fmax(amax, std::fabs(want[i]));
                worst = std::fmax(worst, error[i]);
            }
            double step = 0;
            if (p.shape.is_fp8) {
                const double scale = out.scale[row * groups + group];
                check(std::fabs(scale - amax / 448) <= worst / 448 + 2 * kEps * amax / 448,
                      "linear1 scale [%d, %d]: %.9g, want %.9g", row, group, scale, amax / 448);
                step = scale * std::ldexp(1.0, -10);
            }
            for (int i = 0; i < 128; ++i) {
                const double got = out.at(p.shape, row, group * 128 + i);
                // Half a step of the stored format: 4 bits of e4m3 or 8 of BF16.
                const double relative = p.shape.is_fp8 ? 1.0 / 16 : 1.0 / 256;
                const double tolerance =
                    error[i] + std::fmax(step, relative * 1.001 * (std::fabs(want[i]) + error[i]));
                check(std::fabs(got - want[i]) <= tolerance,
                      "linear1 [%d, %d]: %.9g, want %.9g +- %.2g", row, group * 128 + i, got,
                      want[i], tolerance);
            }
        }
    }
}

// ------------------------------------------------------------------ invariance

void test_batch_invariance(const TileFns& fns, const Problem& p, int max_rows) {
    const Intermediate all = run_linear1(fns, p, max_rows, 5.0f);
    const auto all2 = run_linear2(fns, p.shape, p.h, p.h_scale, p.w2, p.w2_scale, max_rows, 0);
    for (int count = 1; count <= max_rows; ++count) {
        for (const int first : {0, (max_rows - count) / 2, max_rows - count}) {
            const Problem part = p.rows(first, count);
            const Intermediate some = run_linear1(fns, part, count, 5.0f);
            const size_t row_bytes = p.shape.inter * p.element();
            const size_t groups = p.shape.inter / 128;
            check(std::memcmp(some.data.data(), all.data.data() + first * row_bytes,
                              count * row_bytes) == 0,
                  "linear1: rows %d..%d alone differ from the same rows of %d", first,
                  first + count, max_rows);
            for (size_t i = 0; i < some.scale.size(); ++i) {
                check(some.scale[i] == all.scale[first * groups + i],
                      "linear1 scales: rows %d..%d alone differ from the same rows of %d", first,
                      first + count, max_rows);
            }
            const auto some2 =
                run_linear2(fns, p.shape, part.h, part.h_scale, p.w2, p.w2_scale, count, 0);
            check(std::memcmp(some2.data(), all2.data() + first * 128, count * 256) == 0,
                  "linear2: rows %d..%d alone differ from the same rows of %d", first,
                  first + count, max_rows);
        }
    }
}

// Portable, AVX2 and AVX-512 agree in bits.
void test_equal_bits(const TileFns& fns, const TileFns& portable, const Problem& p, int rows) {
    const Intermediate a = run_linear1(fns, p, rows, kInf),
                       b = run_linear1(portable, p, rows, kInf);
    check(a.data == b.data && a.scale == b.scale, "linear1 differs in bits from portable");
}

// ------------------------------------------------------------------ special values

void test_nan(const TileFns& fns, bool is_fp8) {
    Problem p({256, 256, is_fp8}, 9, 11);
    const Intermediate clean = run_linear1(fns, p, 9, kInf);
    p.set_nan(p.x, 4 * 256 + 130);             // row 4 of the input
    p.set_nan(p.w1, (256 + 200) * 256 + 255);  // up row 200: intermediate column 200
    const Intermediate out = run_linear1(fns, p, 9, kInf);
    for (int row = 0; row < 9; ++row) {
        for (int column = 0; column < 256; ++column) {
            const double got = out.at(p.shape, row, column);
            const bool want_nan = row == 4 || column == 200;
            check(std::isnan(got) == want_nan, "NaN: [%d, %d] is %g", row, column, got);
            // The other group keeps its bits; NaN counts for nothing in the scale of its own.
            if (row != 4 && column < 128) {
                check(got == clean.at(p.shape, row, column), "NaN changed [%d, %d]", row, column);
            }
        }
        if (is_fp8) check(std::isfinite(out.scale[row * 2]), "scale of row %d is not finite", row);
    }
    p.set_nan(p.h, 2 * 256 + 7);
    p.set_nan(p.w2, 100 * 256 + 3);
    const auto out2 = run_linear2(fns, p.shape, p.h, p.h_scale, p.w2, p.w2_scale, 9, 0);
    for (int row = 0; row < 9; ++row) {
        for (int column = 0; column < 128; ++column) {
            const float got = bf16_to_float(out2[row * 128 + column]);
            check(std::isnan(got) == (row == 2 || column == 100), "NaN: linear2 [%d, %d] is %g",
                  row, column, got);
        }
    }
}

// A zero row gives zeros and the floor scale; a tiny group keeps its precision.
void test_zero_and_tiny(const TileFns& fns) {
    Problem p({256, 128, true}, 3, 12);
    std::memset(p.x.data(), 0, 256);                            // row 0
    for (int kb = 0; kb < 2; ++kb) p.x_scale[2 + kb] = 1e-12f;  // row 1
    const Intermediate out = run_linear1(fns, p, 3, kInf);
    check(out.scale[0] == 1e-30f / 448.0f, "scale of a zero group is %g", out.scale[0]);
    for (int i = 0; i < 128; ++i) check(out.at(p.shape, 0, i) == 0, "zero row, column %d", i);
    test_linear1(fns, p, 3, kInf);
}

// A caller's flush-to-zero and rounding mode change nothing, and are still set afterwards.
void test_float_environment(const TileFns& fns) {
#if defined(__x86_64__)
    const Problem p({128, 128, false}, 2, 16);
    Problem tiny = p;  // BF16 denormals in, normal numbers out
    for (size_t i = 1; i < tiny.x.size(); i += 2) tiny.x[i] &= 0x80;
    for (size_t i = 0; i < tiny.w1.size(); i += 2) tiny.w1[i + 1] = 0x7e, tiny.w1[i] = 0;
    const Intermediate want = run_linear1(fns, tiny, 2, kInf),
                       ordinary = run_linear1(fns, p, 2, kInf);
    constexpr unsigned kFlushAndRoundDown = 0x1f80 | 0x8040 | 0x2000;
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(kFlushAndRoundDown);
    const Intermediate got = run_linear1(fns, tiny, 2, kInf), other = run_linear1(fns, p, 2, kInf);
    const unsigned after = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before);
    check((after & 0xffc0) == kFlushAndRoundDown, "MXCSR came back as %x", after);
    check(got.data == want.data && other.data == ordinary.data, "MXCSR changed the result");
#else
    static_cast<void>(fns);
#endif
}

// g / (1 + exp(-g)) to 4 units of FP32's last place, read from the scale of a group whose only
// value it is: x_scale of K block 0 carries g, K block 1 gives up = 1.
void test_silu_accuracy(const TileFns& fns) {
    const int rows = 128;
    const GemmShape shape{256, 128, true};
    for (const float sign : {1.0f, -1.0f}) {
        Problem p(shape, rows, 13);
        std::fill(p.w1.begin(), p.w1.end(), 0);
        std::fill(p.x.begin(), p.x.end(), 0);
        std::fill(p.w1_scale.begin(), p.w1_scale.end(), 1.0f);
        p.w1[0] = sign > 0 ? 0x38 : 0xb8;  // gate row 0, k 0: +-1
        p.w1[128 * 256 + 128] = 0x38;      // up row 0, k 128: 1
        Random random(14);
        double worst = 0;
        for (int trial = 0; trial < 80; ++trial) {
            for (int row = 0; row < rows; ++row) {
                p.x[row * 256] = p.x[row * 256 + 128] = 0x38;
                p.x_scale[row * 2] = static_cast<float>(
                    trial < 40 ? random.uniform() * 69 : std::exp(random.uniform() * 80 - 60));
                if (p.x_scale[row * 2] > 69 && sign < 0) p.x_scale[row * 2] = 69;
                p.x_scale[row * 2 + 1] = 1;
            }
            const Intermediate out = run_linear1(fns, p, rows, kInf);
            for (int row = 0; row < rows; ++row) {
                const double g = static_cast<double>(sign) * p.x_scale[row * 2];
                const double want = std::fabs(g / (1 + std::exp(-g)));
                if (want < 2e-30) continue;  // the floor of the scale
                const double got = 448.0 * out.scale[row];
                worst = std::fmax(worst, std::fabs(got - want) / want);
                check(std::fabs(got - want) <= 8 * kEps * want, "silu(%.9g): %.9g, want %.9g", g,
                      got, want);
            }
        }
        std::printf("    silu, %s: largest error %.2f units of 2^-23\n",
                    sign > 0 ? "g > 0" : "g < 0", worst / (2 * kEps));
    }
}

void test_isa(const TileFns& fns, const char* name) {
    std::printf("%s\n", name);
    const auto run = [&](const char* test, auto&& body) {
        const int before = failures();
        body();
        std::printf("  %-28s %s\n", test, failures() == before ? "ok" : "FAILED");
    };
    run("quantize, every value", [&] { test_quantize_every_value(fns); });
    run("quantize, rows", [&] { test_quantize_rows(fns); });
    run("decode, every code", [&] { test_decode_every_code(fns); });
    for (const bool is_fp8 : {true, false}) {
        const std::string suffix = is_fp8 ? " fp8" : " bf16";
        run(("linear1, linear2" + suffix).c_str(), [&] {
            const Problem p({384, 256, is_fp8}, 40, 1);
            for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 40}) {
                test_linear2(fns, p, rows);
                test_linear1(fns, p, rows, kInf);
            }
            test_linear1(fns, p, 7, 0.75f);  // a clamp that bites
        });
        run(("batch invariance" + suffix).c_str(),
            [&] { test_batch_invariance(fns, Problem({256, 128, is_fp8}, 66, 2), 66); });
        run(("bits of portable" + suffix).c_str(), [&] {
            if (fns.isa == Isa::kAmx) return;
            test_equal_bits(fns, tile_fns(Isa::kPortable), Problem({256, 256, is_fp8}, 33, 3), 33);
        });
        run(("NaN" + suffix).c_str(), [&] { test_nan(fns, is_fp8); });
    }
    run("zero and tiny groups", [&] { test_zero_and_tiny(fns); });
    run("float environment", [&] { test_float_environment(fns); });
    run("silu accuracy", [&] { test_silu_accuracy(fns); });
    run("reduce", [&] { test_reduce(fns); });
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::strcmp(argv[1], "--best") == 0) {
        try {
            std::printf("%s\n", isa_name(best_isa()));
            return 0;
        } catch (const std::runtime_error& error) {
            std::fprintf(stderr, "%s\n", error.what());
            return 2;
        }
    }
    if (argc > 1 && std::strcmp(argv[1], "--bench") == 0) {
        bench(argc > 2 ? std::atoi(argv[2]) : 32, argc > 3 ? std::atoi(argv[3]) : 2);
        return 0;
    }
    const int before = failures();
    test_scalar_conversions();
    std::printf("scalar conversions %s\n", failures() == before ? "ok" : "FAILED");
    for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
        if (isa_available(isa)) {
            test_isa(tile_fns(isa), isa_name(isa));
        } else {
            std::printf("%s: not available here\n", isa_name(isa));
        }
    }
    test_isa(emulated_amx_tile_fns(), "amx, emulated tiles");
    std::printf("best: %s; %d failures\n", isa_name(best_isa()), failures());
    return failures() == 0 ? 0 : 1;
}
