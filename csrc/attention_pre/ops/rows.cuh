// What finishers do with a row: sums over its lanes, rotation, quantisation, stores.
#pragma once

#include "attention_pre/ops/emit.cuh"

namespace megamoe::attention {

// Of what nobody writes during the kernel, asked for where it stands: the compiler moves __ldg to
// the first use, behind barriers and waits, and its latency with it.
MEGAMOE_DEVICE uint4 load_early(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

template <int kLanes = 32>
MEGAMOE_DEVICE float sum_lanes(float v) {
#pragma unroll
    for (int o = 1; o < kLanes; o <<= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
template <int kLanes = 32>
MEGAMOE_DEVICE float max_lanes(float v) {
#pragma unroll
    for (int o = 1; o < kLanes; o <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

MEGAMOE_DEVICE float bf16_low(uint32_t v) { return __uint_as_float(v << 16); }
MEGAMOE_DEVICE float bf16_high(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }
MEGAMOE_DEVICE float4 unpack4(uint2 v) {
    return {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y)};
}
MEGAMOE_DEVICE uint2 pack4(const float4& v) {
    return {ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w)};
}
MEGAMOE_DEVICE void unpack8(const uint4& v, float (&f)[8]) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        f[2 * i] = bf16_low(word[i]);
        f[2 * i + 1] = bf16_high(word[i]);
    }
}
MEGAMOE_DEVICE uint4 pack8(const float (&f)[8]) {
    return {ptx::pack_bf16(f[0], f[1]), ptx::pack_bf16(f[2], f[3]), ptx::pack_bf16(f[4], f[5]),
            ptx::pack_bf16(f[6], f[7])};
}

// v / 448, correctly rounded for every finite v >= 1e-30: a product, then what it missed. A test
// goes through all mantissas.
MEGAMOE_DEVICE float over_448(float v) {
    constexpr float kInverse = 1.f / 448.f;
    const float q = __fmul_rn(v, kInverse);
    return v < __int_as_float(0x7f800000) ? fmaf(fmaf(-448.f, q, v), kInverse, q) : v;
}

// The scale of a group of 128 whose largest magnitude, NaN left out, is `amax`: amax / 448, or the
// next power of two.
struct Quantiser {
    float scale, inverse;
    MEGAMOE_DEVICE Quantiser(float amax, bool pow2) {
        scale = over_448(fmaxf(amax, 1e-30f));
        if (pow2) scale = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
        inverse = __frcp_rn(scale);
    }
    MEGAMOE_DEVICE uint32_t pack(float low, float high) const {
        return ptx::pack_e4m3(__fmul_rn(low, inverse), __fmul_rn(high, inverse));
    }
    MEGAMOE_DEVICE uint32_t pack(const float4& v) const {
        return pack(v.x, v.y) | pack(v.z, v.w) << 16;
    }
    MEGAMOE_DEVICE uint2 pack(const float (&f)[8]) const {
        return {pack(f[0], f[1]) | pack(f[2], f[3]) << 16, pack(f[4], f[5]) | pack(f[6], f[7])
                                                                                  << 16};
    }
};
MEGAMOE_DEVICE float amax4(const float4& v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
MEGAMOE_DEVICE float amax8(const float (&f)[8]) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(f[i]));
    return most;
}

// a * b + c * d. Written out, since the compiler fuses the one product or the other as it likes,
// and every build of a body is to give the same bits.
MEGAMOE_DEVICE float dot2(float a, float b, float c, float d) {
    return fmaf(a, b, __fmul_rn(c, d));
}

// Rotation of neighbouring pairs (2i, 2i+1). The table has rows of R/2 cosines, then R/2 sines.
struct Rotation {
    float2 cos, sin;  // of this lane's two pairs
    bool active;

    // `pair` is the first pair of the lane's four columns; lanes without rotated columns are idle.
    template <int kRope>
    MEGAMOE_DEVICE void load(const float* table, uint32_t position, int pair) {
        static_assert(kRope % 4 == 0);
        active = pair >= 0 && pair < kRope / 2;
        if (!active) return;
        const float* row = table + uint64_t(position) * kRope + pair;
        cos = __ldg(reinterpret_cast<const float2*>(row));
        sin = __ldg(reinterpret_cast<const float2*>(row + kRope / 2));
    }
    MEGAMOE_DEVICE float4 operator()(const float4& v) const {
        if (!active) return v;
        return {dot2(v.x, cos.x, -v.y, sin.x), dot2(v.y, cos.x, v.x, sin.x),
                dot2(v.z, cos.y, -v.w, sin.y), dot2(v.w, cos.y, v.z, sin.y)};
    }
};

// Rotations of the tokens that a warp finishes.
template <int N, int kRope>
struct RowRotations {
    Rotation of[kRowsOfWarp<N>];
    uint32_t position;  // of the warp's token number `lane`
    const float* table;
    int pair;
    uint32_t rows;

    MEGAMOE_DEVICE RowRotations(const Task& t, const uint32_t* positions, const float* table,
                                int pair)
        : position(0), table(table), pair(pair), rows(t.inst().rows) {
        const uint32_t token = token_of_lane<N>();
        if (token < rows) position = ptx::load_constant(positions + t.inst().row + token);
    }
    MEGAMOE_DEVICE void load(uint32_t chunk) {
#pragma unroll
        for (int i = 0; i < kRowsOfWarp<N>; ++i) {
            const uint32_t at = __shfl_sync(~0u, position, chunk * kRowsOfWarp<N> + i);
            of[i].active = false;
            if (token_of(chunk, i) < rows) of[i].template load<kRope>(table, at, pair);
        }
    }
};

}  // namespace megamoe::attention
