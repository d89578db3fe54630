// Scalar e4m3 (OCP FP8, "fn": no infinities) and BF16 conversions. Plain C++, for hosts and tests;
// the vector code in gemm_math.hpp gives the same bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace megamoe::cpu {

inline constexpr float kE4m3Max = 448.0f;

inline float e4m3_to_float(uint8_t code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u | (code & 0x80u) << 24);
    const float magnitude = exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (code & 0x80) ? -magnitude : magnitude;
}

// Round to nearest even, saturating to +-448; NaN becomes 0x7f with the sign kept.
inline uint8_t float_to_e4m3(float value) {
    const uint8_t sign = static_cast<uint8_t>(std::bit_cast<uint32_t>(value) >> 24 & 0x80u);
    if (std::isnan(value)) return sign | 0x7f;
    const float magnitude = std::fmin(std::fabs(value), kE4m3Max);
    if (magnitude < 0x1p-6f) {  // denormals: multiples of 2^-9; 8 of them are the first normal
        return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
    }
    uint32_t bits = std::bit_cast<uint32_t>(magnitude);
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return sign | static_cast<uint8_t>((bits >> 20) - (120u << 3));
}

inline float bf16_to_float(uint16_t value) {
    return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Round to nearest even; NaN stays NaN (quiet, the upper payload bits kept).
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace megamoe::cpu
