// Tests of what works element by element: conversions, input quantisation, top-k reduction.
#include <cmath>
#include <limits>

#include "gemm_test.hpp"

namespace gemm_test {

using namespace megamoe::cpu;

// The value of a code, from the definition of the format: independent of fp8.hpp.
double code_value(int code) {
    const int exponent = code >> 3 & 15;
    const double mantissa = (code & 7) / 8.0;
    if ((code & 127) == 127) return std::nan("");
    const double magnitude =
        exponent ? std::pow(2.0, exponent - 7) * (1 + mantissa) : std::pow(2.0, -6) * mantissa;
    return code & 128 ? -magnitude : magnitude;
}

namespace {

// The nearest code by search; a tie goes to the even code; beyond 448 the largest.
int nearest_code(double value) {
    if (std::isnan(value)) return 127;
    int best = 0;
    for (int code = 0; code < 127; ++code) {
        const double distance = std::fabs(code_value(code) - std::fabs(value));
        const double least = std::fabs(code_value(best) - std::fabs(value));
        if (distance < least || (distance == least && code % 2 == 0)) best = code;
    }
    return best | (std::signbit(value) ? 128 : 0);
}

}  // namespace

void test_scalar_conversions() {
    for (int code = 0; code < 256; ++code) {
        const float value = e4m3_to_float(static_cast<uint8_t>(code));
        if ((code & 127) == 127) {
            check(std::isnan(value), "code %d: %g, want NaN", code, value);
        } else {
            check(value == code_value(code), "code %d: %g, want %g", code, value, code_value(code));
        }
        const int back = float_to_e4m3(value);
        check(back == code, "round trip of code %d gave %d", code, back);
    }
    for (int bits = 0; bits < 65536; ++bits) {
        const float value = bf16_to_float(static_cast<uint16_t>(bits));
        if (std::isnan(value)) {
            check(std::isnan(bf16_to_float(float_to_bf16(value))), "BF16 NaN %x lost", bits);
            continue;
        }
        check(float_to_bf16(value) == bits, "BF16 %x came back as %x", bits, float_to_bf16(value));
        check(float_to_e4m3(value) == nearest_code(value), "%g: code %d, want %d", value,
              float_to_e4m3(value), nearest_code(value));
    }
}

// Every finite BF16 number up to 448, at scale 1: a group's first element is 448.
void test_quantize_every_value(const TileFns& fns) {
    std::vector<uint16_t> values;
    for (int bits = 0; bits < 65536; ++bits) {
        const float value = bf16_to_float(static_cast<uint16_t>(bits));
        if (std::isnan(value) || std::fabs(value) <= 448)
            values.push_back(static_cast<uint16_t>(bits));
    }
    for (size_t first = 0; first < values.size(); first += 127) {
        std::vector<uint16_t> x(128, 0);
        x[0] = float_to_bf16(448);
        for (size_t i = 0; i < 127 && first + i < values.size(); ++i) x[i + 1] = values[first + i];
        std::vector<uint8_t> q(128, 0xee);
        float scale = -1;
        fns.quantize_row(x.data(), 128, q.data(), &scale);
        check(scale == 1, "scale %g, want 1", scale);
        for (int i = 0; i < 128; ++i) {
            const float value = bf16_to_float(x[i]);
            const int want = nearest_code(value);
            check(q[i] == (want & 127) + (std::signbit(value) ? 128 : 0), "%g: code %d, want %d",
                  value, q[i], want);
        }
    }
}

void test_quantize_rows(const TileFns& fns) {
    Random random(3);
    const int hidden = 1024;
    for (int trial = 0; trial < 40; ++trial) {
        std::vector<uint16_t> x(hidden);
        for (int i = 0; i < hidden; ++i) {
            const int group = i / 128;
            double magnitude = std::ldexp(1.0, trial - 20);
            if (group == 1) magnitude = 0;         // an all-zero group
            if (group == 2) magnitude = 1e-36;     // below the floor of the scale
            if (group == 3) magnitude = 1e-40;     // BF16 denormals
            if (group == 4) magnitude = 3e38 / 6;  // near the largest
            x[i] = float_to_bf16(static_cast<float>(random.normal() * magnitude));
        }
        x[5 * 128 + trial] = 0x7fc0;  // NaN is ignored by the scale, and stays
        for (int i = 0; i < 128; ++i) x[6 * 128 + i] = 0xffc1;  // nothing but NaN
        std::vector<uint8_t> q(hidden, 0xee);
        std::vector<float> scale(hidden / 128, -1);
        fns.quantize_row(x.data(), hidden, q.data(), scale.data());
        for (int group = 0; group < hidden / 128; ++group) {
            float amax = 1e-30f;
            for (int i = 0; i < 128; ++i) {
                const float value = bf16_to_float(x[group * 128 + i]);
                if (std::fabs(value) > amax) amax = std::fabs(value);
            }
            const float want_scale = amax / 448.0f;
            check(scale[group] == want_scale, "group %d: scale %g, want %g", group, scale[group],
                  want_scale);
            const float inverse = 1.0f / want_scale;
            for (int i = 0; i < 128; ++i) {
                const int want = float_to_e4m3(bf16_to_float(x[group * 128 + i]) * inverse);
                check(q[group * 128 + i] == want, "group %d element %d: code %d, want %d", group, i,
                      q[group * 128 + i], want);
            }
        }
    }
}

void test_reduce(const TileFns& fns) {
    Random random(15);
    const int hidden = 384;
    for (int num_slots = 0; num_slots <= 9; ++num_slots) {
        std::vector<std::vector<uint16_t>> data(num_slots, std::vector<uint16_t>(hidden));
        std::vector<const uint16_t*> slots;
        std::vector<float> weights;
        for (auto& slot : data) {
            for (auto& value : slot) value = float_to_bf16(static_cast<float>(random.normal()));
            slots.push_back(slot.data());
            weights.push_back(static_cast<float>(random.uniform()));
        }
        if (num_slots == 3)
            data[1][5] = 0x7f81;  // a signalling NaN whose payload rounding could lose
        if (num_slots == 4) weights[2] = std::numeric_limits<float>::infinity();
        std::vector<uint16_t> y(hidden, 0xeeee);
        fns.reduce_token(slots.data(), weights.data(), num_slots, hidden, y.data());
        for (int i = 0; i < hidden; ++i) {
            float want = 0;
            for (int j = 0; j < num_slots; ++j) {
                want = std::fma(weights[j], bf16_to_float(slots[j][i]), want);
            }
            const bool ok =
                std::isnan(want) ? std::isnan(bf16_to_float(y[i])) : y[i] == float_to_bf16(want);
            check(ok, "reduce of %d slots, column %d: %g, want %g", num_slots, i,
                  bf16_to_float(y[i]), want);
        }
    }
}

}  // namespace gemm_test
