// Checks, random problems and tile calls of gemm_test.
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "gemm_test.hpp"

namespace gemm_test {

using namespace megamoe::cpu;

namespace {

int num_failures = 0;

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};

// Aligned memory of exactly `bytes`, so that a sanitizer sees an overrun.
std::unique_ptr<uint8_t, Free> aligned(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlign, bytes) != 0) std::abort();
    std::memset(memory, 0xee, bytes);
    return std::unique_ptr<uint8_t, Free>(static_cast<uint8_t*>(memory));
}

void fill(std::vector<uint8_t>& matrix, size_t count, bool is_fp8, double magnitude,
          Random& random) {
    matrix.resize(count * (is_fp8 ? 1 : 2));
    for (size_t i = 0; i < count; ++i) {
        const auto value = static_cast<float>(random.normal() * magnitude);
        if (is_fp8) {
            matrix[i] = float_to_e4m3(value);
        } else {
            const uint16_t bits = float_to_bf16(value);
            std::memcpy(&matrix[i * 2], &bits, 2);
        }
    }
}

void fill_scales(std::vector<float>& scale, size_t count, double magnitude, Random& random) {
    scale.resize(count);
    for (auto& value : scale) value = static_cast<float>(magnitude * (0.5 + random.uniform()));
}

}  // namespace

int failures() { return num_failures; }

void check(bool ok, const char* format, ...) {
    if (ok) return;
    if (++num_failures > 20) return;
    std::printf("    ");
    va_list arguments;
    va_start(arguments, format);
    std::vprintf(format, arguments);
    va_end(arguments);
    std::printf("\n");
}

uint32_t Random::next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const auto mixed = static_cast<uint32_t>((state >> 18 ^ state) >> 27);
    const auto turn = static_cast<int>(state >> 59);
    return mixed >> turn | mixed << (-turn & 31);
}

double Random::uniform() { return (next() + 0.5) / 4294967296.0; }

double Random::normal() {
    return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform());
}

Problem::Problem(const GemmShape& of_shape, int of_rows, uint64_t seed)
    : shape(of_shape), num_rows(of_rows) {
    Random random(seed);
    const size_t rows = num_rows, hidden = shape.hidden, inter = shape.inter;
    // FP8 values use their whole range, denormals included; scales bring them to natural size.
    const double code = shape.is_fp8 ? 100 : 1;
    fill(x, rows * hidden, shape.is_fp8, code, random);
    fill(h, rows * inter, shape.is_fp8, code, random);
    const double weight = shape.is_fp8 ? 100 : std::sqrt(1.0 / static_cast<double>(hidden));
    fill(w1, 2 * inter * hidden, shape.is_fp8, weight, random);
    fill(w2, hidden * inter, shape.is_fp8, weight, random);
    for (size_t i = 0; shape.is_fp8 && i < w1.size(); i += 37) w1[i] &= 0x87;  // denormals
    if (!shape.is_fp8) return;
    fill_scales(x_scale, rows * hidden / 128, 0.01, random);
    fill_scales(h_scale, rows * inter / 128, 0.01, random);
    const double scale = 0.01 / std::sqrt(static_cast<double>(hidden));
    fill_scales(w1_scale, 2 * inter / 128 * hidden / 128, scale, random);
    fill_scales(w2_scale, hidden / 128 * inter / 128, scale, random);
}

Problem Problem::rows(int first, int count) const {
    Problem part = *this;
    part.num_rows = count;
    const auto cut = [&](auto& all, size_t width) {
        all = {all.begin() + first * width, all.begin() + (first + count) * width};
    };
    cut(part.x, shape.hidden * element());
    cut(part.h, shape.inter * element());
    if (shape.is_fp8) {
        cut(part.x_scale, shape.hidden / 128);
        cut(part.h_scale, shape.inter / 128);
    }
    return part;
}

void Problem::set_nan(std::vector<uint8_t>& matrix, size_t index) const {
    if (shape.is_fp8) {
        matrix[index] = 0xff;
    } else {
        matrix[index * 2] = 0xc0;
        matrix[index * 2 + 1] = 0x7f;
    }
}

float Problem::at(const std::vector<uint8_t>& matrix, size_t index) const {
    if (shape.is_fp8) return e4m3_to_float(matrix[index]);
    return bf16_to_float(static_cast<uint16_t>(matrix[index * 2] | matrix[index * 2 + 1] << 8));
}

Sum Problem::linear1(int row, int w1_row) const {
    Sum sum;
    const int blocks = shape.hidden / 128;
    for (int k = 0; k < shape.hidden; ++k) {
        double term = static_cast<double>(x_at(row, k)) * w1_at(w1_row, k);
        if (shape.is_fp8) {
            term *= x_scale[row * blocks + k / 128];
            term *= w1_scale[w1_row / 128 * blocks + k / 128];
        }
        sum.value += term;
        sum.absolute += std::fabs(term);
    }
    return sum;
}

Sum Problem::linear2(int row, int w2_row) const {
    Sum sum;
    for (int k = 0; k < shape.inter; ++k) {
        double term = static_cast<double>(h_at(row, k)) * w2_at(w2_row, k);
        if (shape.is_fp8) {
            term *= h_scale_at(row, k / 128);
            term *= w2_scale_at(w2_row, k / 128);
        }
        sum.value += term;
        sum.absolute += std::fabs(term);
    }
    return sum;
}

double Intermediate::at(const GemmShape& shape, int row, int column) const {
    const size_t index = static_cast<size_t>(row) * shape.inter + column;
    if (!shape.is_fp8) {
        return bf16_to_float(static_cast<uint16_t>(data[index * 2] | data[index * 2 + 1] << 8));
    }
    return static_cast<double>(e4m3_to_float(data[index])) * scale[index / 128];
}

Intermediate run_linear1(const TileFns& fns, const Problem& p, int rows, float clamp) {
    const int groups = p.shape.inter / 128;
    Intermediate out{
        std::vector<uint8_t>(static_cast<size_t>(rows) * p.shape.inter * p.element(), 0xee),
        std::vector<float>(p.shape.is_fp8 ? rows * groups : 0, -1.0f)};
    const auto packed = aligned(fns.packed_w1_bytes(p.shape));
    const auto scratch = aligned(scratch_bytes(p.shape, rows));
    fns.pack_w1(packed.get(), p.w1.data(), p.shape);
    const bool fp8 = p.shape.is_fp8;
    for (int n = 0; n < groups; ++n) {
        fns.linear1_tile(p.x.data(), fp8 ? p.x_scale.data() : nullptr, rows, packed.get(),
                         fp8 ? p.w1_scale.data() : nullptr, p.shape, n, clamp, out.data.data(),
                         fp8 ? out.scale.data() : nullptr, scratch.get());
    }
    return out;
}

std::vector<uint16_t> run_linear2(const TileFns& fns, const GemmShape& shape,
                                  const std::vector<uint8_t>& h, const std::vector<float>& h_scale,
                                  const std::vector<uint8_t>& w2,
                                  const std::vector<float>& w2_scale, int rows, int n) {
    std::vector<uint16_t> out(static_cast<size_t>(rows) * 128 + 64, 0xeeee);
    const auto packed = aligned(fns.packed_w2_bytes(shape));
    const auto scratch = aligned(scratch_bytes(shape, rows));
    fns.pack_w2(packed.get(), w2.data(), shape);
    fns.linear2_tile(h.data(), shape.is_fp8 ? h_scale.data() : nullptr, rows, packed.get(),
                     shape.is_fp8 ? w2_scale.data() : nullptr, shape, n, out.data(), scratch.get());
    for (size_t i = static_cast<size_t>(rows) * 128; i < out.size(); ++i) {
        check(out[i] == 0xeeee, "linear2 wrote beyond its %d rows", rows);
    }
    out.resize(static_cast<size_t>(rows) * 128);
    return out;
}

}  // namespace gemm_test
