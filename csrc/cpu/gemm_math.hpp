// Element-wise vector code shared by the instruction sets: conversions, SwiGLU, quantisation.
//
// Included once by each gemm_<isa>.cpp. Everything lies in an unnamed namespace: an inline function
// with external linkage, compiled with AVX-512 flags, could be the copy that the linker keeps for
// the whole library. For the same reason no std templates are used here.
//
// V names the vectors of an instruction set: kW lanes, F (float), I (int32), I16 (twice as many),
//   splat(value)             every lane
//   fma(a, b, c)             a * b + c with one rounding
//   mul_add(a, b, c)         the same where a * b is exact in FP32
//   load_u8, load_u16        kW unsigned integers, widened to I
//   store_u8, store_u16      the lower bits of I, whose other bits are 0
// Vectors are GCC/Clang vector types: one text serves SSE2, NEON, AVX2 and AVX-512. A cast between
// F and I reinterprets bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define MM_INLINE inline __attribute__((always_inline))

namespace {

template <class T>
MM_INLINE T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
MM_INLINE void store(void* to, T value) {
    std::memcpy(to, &value, sizeof(T));
}

template <class V>
MM_INLINE typename V::F select(typename V::I mask, typename V::F yes, typename V::F no) {
    using I = typename V::I;
    return (typename V::F)((mask & (I)yes) | (~mask & (I)no));
}

// Round to nearest, denormals kept, nothing trapped, whatever the caller's thread does: results
// must not depend on a host that has set flush-to-zero.
class FloatEnvironment {
  public:
#if defined(__x86_64__)
    FloatEnvironment() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
    ~FloatEnvironment() { __builtin_ia32_ldmxcsr(saved_); }
#elif defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
    FloatEnvironment() : saved_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
    ~FloatEnvironment() { __builtin_aarch64_set_fpcr(saved_); }
#else
    FloatEnvironment() {}
#endif
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

  private:
    [[maybe_unused]] unsigned saved_ = 0;
};

// ------------------------------------------------------------------ BF16 and e4m3

template <class V>
MM_INLINE typename V::F load_bf16(const uint16_t* from) {
    return (typename V::F)(V::load_u16(from) << 16);
}

// Round to nearest even; NaN stays NaN.
template <class V>
MM_INLINE void store_bf16(uint16_t* to, typename V::F value) {
    using I = typename V::I;
    const I bits = (I)value;
    const I nan = (bits & 0x7fffffff) > 0x7f800000;
    const I rounded = (~nan & bits) + 0x7fff + ((bits >> 16) & 1);
    const I result = (nan & (bits | 0x400000)) | (~nan & rounded);
    V::store_u16(to, result >> 16 & 0xffff);
}

// e4m3 codes to FP32: a code's 7 bits, shifted, are an FP32 number 2^-120 times too small.
template <class V>
MM_INLINE typename V::F load_e4m3(const uint8_t* from) {
    using I = typename V::I;
    using F = typename V::F;
    const I code = V::load_u8(from);
    const I magnitude = code & 0x7f;
    const I nan = (magnitude == 0x7f) & 0x7fc00000;
    return (F)((I)((F)(magnitude << 20) * 0x1p120f) | nan | (code & 0x80) << 24);
}

// Round to nearest even, saturating; NaN becomes 0x7f with the sign kept.
template <class V>
MM_INLINE void store_e4m3(uint8_t* to, typename V::F value) {
    using I = typename V::I;
    using F = typename V::F;
    const I sign = ((I)value >> 24) & 0x80;
    const F magnitude = (F)((I)value & 0x7fffffff);
    const F limited = select<V>(magnitude <= 448.0f, magnitude, V::splat(448.0f));
    // Adding 2^14 leaves the multiple of 2^-9 in the last bits of the sum.
    const I denormal = (I)(limited + 0x1p14f) - (I)V::splat(0x1p14f);
    const I bits = (I)limited;
    const I normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const I small = limited < 0x1p-6f;
    const I nan = magnitude != magnitude;
    const I code = (small & denormal) | (~small & normal);
    V::store_u8(to, (nan & 0x7f) | (~nan & code) | sign);
}

// ------------------------------------------------------------------ SwiGLU

// e^x to 2 ulp for x <= 88.72, infinity above, a tiny positive number below -87; NaN stays NaN.
// x = n ln 2 + r with ln 2 in two parts, |r| <= 0.35; a degree-6 polynomial (Cephes expf) for e^r.
template <class V>
MM_INLINE typename V::F exp_f32(typename V::F x) {
    using I = typename V::I;
    using F = typename V::F;
    const I large = x > 88.722839f;
    F z = select<V>(x < -87.0f, V::splat(-87.0f), x);
    z = select<V>(large, V::splat(0.0f), z);
    const F kRound = V::splat(0x1.8p23f);  // adding it rounds to an integer, kept in the last bits
    const F shifted = V::fma(z, V::splat(1.44269504f), kRound);
    const F n = shifted - kRound;
    F r = V::fma(n, V::splat(-0.693359375f), z);
    r = V::fma(n, V::splat(2.12194440e-4f), r);
    F p = V::splat(1.9875691500e-4f);
    p = V::fma(p, r, V::splat(1.3981999507e-3f));
    p = V::fma(p, r, V::splat(8.3334519073e-3f));
    p = V::fma(p, r, V::splat(4.1665795894e-2f));
    p = V::fma(p, r, V::splat(1.6666665459e-1f));
    p = V::fma(p, r, V::splat(5.0000001201e-1f));
    p = V::fma(p, r * r, r) + 1.0f;
    // 2^n in two factors: n = 128 overflows one exponent field.
    const I exponent = (I)shifted - (I)kRound;
    const I half = exponent >> 1;
    const F scale_a = (F)((half + 127) << 23), scale_b = (F)((exponent - half + 127) << 23);
    return select<V>(large, (F)(I{} + 0x7f800000), p * scale_a * scale_b);
}

// h = g / (1 + exp(-g)) * u after the clamp (g <= c, |u| <= c; c = +inf for none). NaN stays NaN.
template <class V>
MM_INLINE typename V::F swiglu(typename V::F gate, typename V::F up, float clamp) {
    using F = typename V::F;
    const F c = V::splat(clamp);
    gate = select<V>(gate > c, c, gate);
    up = select<V>(up > c, c, up);
    up = select<V>(up < -c, -c, up);
    return gate / (exp_f32<V>(-gate) + 1.0f) * up;
}

// ------------------------------------------------------------------ quantisation

// One group of 128: e4m3 codes, and the scale as result.
//   scale = max(amax, 1e-30) / 448 with amax over what is not NaN; q = e4m3(v * (1 / scale)).
template <class V>
MM_INLINE float quantize_group(const float* values, uint8_t* q) {
    using F = typename V::F;
    using I = typename V::I;
    F most = V::splat(0.0f);
    for (int i = 0; i < 128; i += V::kW) {
        const F magnitude = (F)(load<I>(values + i) & 0x7fffffff);
        most = select<V>(magnitude > most, magnitude, most);  // false for NaN
    }
    float amax = 1e-30f;
    for (int i = 0; i < V::kW; ++i) amax = most[i] > amax ? most[i] : amax;
    const float scale = amax / 448.0f;
    const F inverse = V::splat(1.0f / scale);
    for (int i = 0; i < 128; i += V::kW) store_e4m3<V>(q + i, load<F>(values + i) * inverse);
    return scale;
}

template <class V>
void quantize_row(const uint16_t* x, int hidden, uint8_t* q, float* scale) {
    const FloatEnvironment environment;
    alignas(64) float values[128];
    for (int group = 0; group < hidden / 128; ++group) {
        for (int i = 0; i < 128; i += V::kW) {
            store(values + i, load_bf16<V>(x + group * 128 + i));
        }
        scale[group] = quantize_group<V>(values, q + group * 128);
    }
}

// ------------------------------------------------------------------ top-k reduction

template <class V>
void reduce_token(const uint16_t* const* slots, const float* weights, int num_slots, int hidden,
                  uint16_t* y) {
    using F = typename V::F;
    const FloatEnvironment environment;
    constexpr int kUnroll = 4;  // independent chains, to hide the latency of the FMA
    for (int column = 0; column < hidden; column += kUnroll * V::kW) {
        F acc[kUnroll] = {};
        for (int slot = 0; slot < num_slots; ++slot) {
            const F weight = V::splat(weights[slot]);
            for (int i = 0; i < kUnroll; ++i) {
                acc[i] = V::fma(weight, load_bf16<V>(slots[slot] + column + i * V::kW), acc[i]);
            }
        }
        for (int i = 0; i < kUnroll; ++i) store_bf16<V>(y + column + i * V::kW, acc[i]);
    }
}

}  // namespace
