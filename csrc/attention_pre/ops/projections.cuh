// B1, C0, D0, D1, D2: projections and their finishers, a row of 128 columns at a time. And the two
// GEMMs of a dense block: SwiGLU, and the sum with a residual.
#pragma once

#include "attention_pre/ops/rows.cuh"

namespace megamoe::attention {

template <class S>
MEGAMOE_DEVICE void head_gate(const Task& t) {
    Tiles<S> acc;
    gemm_bf16<S>(t, acc);
    store_partial<S::kBand>(t, acc[0], t.operand<float>(operand::head_gate::partials), S::kN);
}

// LayerNorm, rotation, e4m3, and the write into the paged cache.
template <class S>
struct IndexKeyRow {
    const Task& t;
    RowRotations<S::kBand, S::kRope> rotations;
    int64_t slot = 0;  // of the warp's token number `lane`
    float4 weight, bias;

    MEGAMOE_DEVICE explicit IndexKeyRow(const Task& t)
        : t(t),
          rotations(t, t.operand<const uint32_t>(operand::index_key::positions),
                    t.operand<const float>(operand::index_key::rope), int(ptx::lane() * 2)) {
        namespace slots = operand::index_key;
        weight = unpack4(__ldg(t.operand<const uint2>(slots::norm_weight) + ptx::lane()));
        bias = unpack4(__ldg(t.operand<const uint2>(slots::norm_bias) + ptx::lane()));
        const uint32_t token = token_of_lane<S::kBand>();
        if (token < t.inst().rows)
            slot = __ldg(t.operand<const int64_t>(slots::slots) + t.inst().row + token);
    }
    MEGAMOE_DEVICE void early(uint32_t chunk) { rotations.load(chunk); }
    MEGAMOE_DEVICE void late(uint32_t) {}
    MEGAMOE_DEVICE void row(int i, uint32_t token, float4 v) const {
        const uint64_t at =
            __shfl_sync(~0u, slot, token / kChunkTokens * kRowsOfWarp<S::kBand> + uint32_t(i));
        const float mean = sum_lanes(v.x + v.y + v.z + v.w) / kGroup;
        v = {v.x - mean, v.y - mean, v.z - mean, v.w - mean};
        const float squares = dot2(v.x, v.x, v.y, v.y) + dot2(v.z, v.z, v.w, v.w);
        const float variance = sum_lanes(squares) / kGroup;
        const float f = rsqrtf(variance + S::kEps);
        v = {fmaf(v.x * f, weight.x, bias.x), fmaf(v.y * f, weight.y, bias.y),
             fmaf(v.z * f, weight.z, bias.z), fmaf(v.w * f, weight.w, bias.w)};
        v = rotations.of[i](v);
        const Quantiser quantiser(max_lanes(amax4(v)), t.has(kScalePow2));
        const uint64_t place = at % kCacheKeys;
        uint8_t* page =
            t.operand<uint8_t>(operand::index_key::cache) + at / kCacheKeys * kCachePageBytes;
        reinterpret_cast<uint32_t*>(page + place * kGroup)[ptx::lane()] = quantiser.pack(v);
        if (ptx::lane() == 0)
            reinterpret_cast<float*>(page + kCacheCodeBytes)[place] = quantiser.scale;
    }
};

template <class S>
MEGAMOE_DEVICE void index_key(const Task& t) {
    IndexKeyRow<S> finisher(t);
    reduced_gemm<S>(t, t.operand<float>(operand::index_key::partials), finisher);
}
template <class S>
MEGAMOE_DEVICE void index_key_final(const Task& t) {
    IndexKeyRow<S> finisher(t);
    finish_parts<S>(t, t.operand<float>(operand::index_key::partials), finisher);
}

// Rotation, e4m3; the head's weight takes the query's scale, and the gate is summed here.
template <class S>
struct IndexQueryRow {
    const Task& t;
    RowRotations<S::kBand, S::kRope> rotations;
    float gate[kRowsOfWarp<S::kBand>];

    MEGAMOE_DEVICE explicit IndexQueryRow(const Task& t)
        : t(t),
          rotations(t, t.operand<const uint32_t>(operand::index_query::positions),
                    t.operand<const float>(operand::index_query::rope), int(ptx::lane() * 2)) {}
    MEGAMOE_DEVICE void early(uint32_t chunk) { rotations.load(chunk); }
    // A lane per part. Loads of every token are under way before the first is looked at: in order,
    // as a GPU issues, one sum would hold up the next token's loads.
    MEGAMOE_DEVICE void late(uint32_t chunk) {
        const uint32_t rows = t.inst().rows, parts = t.inst().aux;
        const float* from = t.operand<const float>(operand::index_query::gate) + t.inst().item;
        auto at = [&](uint32_t token, uint32_t part) {
            const float* p =
                from + (uint64_t(t.inst().row + token) * parts + part) * uint64_t(S::kHeads);
            return token < rows && part < parts ? ptx::load_l2(p) : 0.f;
        };
#pragma unroll
        for (int i = 0; i < kRowsOfWarp<S::kBand>; ++i)
            gate[i] = at(token_of(chunk, i), ptx::lane());
        for (uint32_t part = ptx::lane() + 32; part - ptx::lane() < parts; part += 32)
#pragma unroll
            for (int i = 0; i < kRowsOfWarp<S::kBand>; ++i) gate[i] += at(token_of(chunk, i), part);
    }
    MEGAMOE_DEVICE void row(int i, uint32_t token, float4 v) const {
        namespace slots = operand::index_query;
        v = rotations.of[i](v);
        const Quantiser quantiser(max_lanes(amax4(v)), t.has(kScalePow2));
        const uint64_t head = uint64_t(t.inst().row + token) * S::kHeads + t.inst().item;
        t.operand<uint32_t>(slots::codes)[head * (kGroup / 4) + ptx::lane()] = quantiser.pack(v);
        const float sum = sum_lanes(gate[i]);
        if (ptx::lane() == 0)
            t.operand<float>(slots::weights)[head] = sum * (quantiser.scale * S::kFactor);
    }
};

template <class S>
MEGAMOE_DEVICE void index_query(const Task& t) {
    IndexQueryRow<S> finisher(t);
    reduced_gemm<S>(t, t.operand<float>(operand::index_query::partials), finisher);
}
template <class S>
MEGAMOE_DEVICE void index_query_final(const Task& t) {
    IndexQueryRow<S> finisher(t);
    finish_parts<S>(t, t.operand<float>(operand::index_query::partials), finisher);
}

// BF16 rows of `out`, of `pitch` elements, from column `column` on.
struct StoreBf16 : NoLoads {
    uint8_t* to;
    uint64_t pitch;
    MEGAMOE_DEVICE StoreBf16(const Task& t, uint8_t* out, uint64_t pitch, uint64_t column)
        : to(out + (t.inst().row * pitch + column + ptx::lane() * 4) * 2), pitch(pitch) {}
    MEGAMOE_DEVICE void row(int, uint32_t token, float4 v) const {
        *reinterpret_cast<uint2*>(to + token * pitch * 2) = pack4(v);
    }
};

// A tile of a main head; its last columns are rotated where it ends the head.
template <class S>
struct MainQueryRow : StoreBf16 {
    RowRotations<S::kBand, S::kRope> rotations;
    MEGAMOE_DEVICE explicit MainQueryRow(const Task& t)
        : StoreBf16(t, t.operand<uint8_t>(operand::main_query::out), S::kN, t.inst().col),
          rotations(
              t, t.operand<const uint32_t>(operand::main_query::positions),
              t.operand<const float>(operand::main_query::rope),
              t.has(kHasRope) ? (int(ptx::lane() * 4) - (int(kTileRows) - S::kRope)) / 2 : -1) {}
    MEGAMOE_DEVICE void early(uint32_t chunk) { rotations.load(chunk); }
    MEGAMOE_DEVICE void row(int i, uint32_t token, float4 v) const {
        StoreBf16::row(i, token, rotations.of[i](v));
    }
};

template <class S>
MEGAMOE_DEVICE void main_query(const Task& t) {
    MainQueryRow<S> finisher(t);
    Tiles<S> acc;
    gemm_before<S>(t, acc, finisher);
    emit_rows<S::kBand>(t, acc[0], finisher);
}

template <class S>
MEGAMOE_DEVICE void absorb_query(const Task& t) {
    Tiles<S> acc;
    gemm_bf16<S>(t, acc);
#pragma unroll
    for (int tile = 0; tile < S::kTiles; ++tile) {
        const uint64_t pitch = uint64_t(S::kHeads) * S::kN * 2;
        const uint32_t column = t.inst().item * S::kN + t.inst().col + tile * kTileRows;
        store_bf16<S::kBand>(
            t, acc[tile],
            t.operand<uint8_t>(operand::absorb_query::out) + t.inst().row * pitch + column * 2,
            pitch);
    }
}

// Sub-tile 0 holds gate columns, sub-tile 1 the up columns of the same outputs.
template <class S>
struct SwigluRow : NoLoads {
    const Task& t;
    MEGAMOE_DEVICE explicit SwigluRow(const Task& t) : t(t) {}
    MEGAMOE_DEVICE void row(int, uint32_t token, float4 v) const {
        namespace slots = operand::gemm_swiglu;
        const Quantiser quantiser(max_lanes(amax4(v)), t.has(kScalePow2));
        const uint64_t at = uint64_t(t.inst().row + token) * S::kN + t.inst().col;
        t.operand<uint32_t>(slots::codes)[at / 4 + ptx::lane()] = quantiser.pack(v);
        if (ptx::lane() == 0) t.operand<float>(slots::scales)[at / kGroup] = quantiser.scale;
    }
};

template <class S>
MEGAMOE_DEVICE void gemm_swiglu(const Task& t) {
    Tiles<S> acc;
    gemm_fp8<S>(t, acc);
#pragma unroll
    for (int i = 0; i < kAccumulators<S>; ++i)
        acc[0][i] = __fdividef(acc[0][i], 1.f + __expf(-acc[0][i])) * acc[1][i];
    SwigluRow<S> finisher(t);
    emit_rows<S::kBand>(t, acc[0], finisher);
}

template <class S>
struct SumRow : StoreBf16 {
    const uint8_t* residual;
    float4 addend[kRowsOfWarp<S::kBand>];
    uint32_t rows;
    MEGAMOE_DEVICE explicit SumRow(const Task& t)
        : StoreBf16(t, t.operand<uint8_t>(operand::gemm_store::out), S::kN, t.inst().col),
          residual(nullptr),
          rows(t.inst().rows) {
        if (t.has(kHasResidual))
            residual = t.operand<const uint8_t>(operand::gemm_store::residual) +
                       (t.inst().row * pitch + t.inst().col + ptx::lane() * 4) * 2;
    }
    MEGAMOE_DEVICE void late(uint32_t chunk) {
#pragma unroll
        for (int i = 0; i < kRowsOfWarp<S::kBand>; ++i) {
            const uint32_t token = token_of(chunk, i);
            addend[i] = {};
            if (residual && token < rows)
                addend[i] = unpack4(
                    ptx::load_l2(reinterpret_cast<const uint2*>(residual + token * pitch * 2)));
        }
    }
    MEGAMOE_DEVICE void row(int i, uint32_t token, float4 v) const {
        add(v, addend[i]);
        StoreBf16::row(i, token, v);
    }
};

template <class S>
MEGAMOE_DEVICE void gemm_store(const Task& t) {
    static_assert(S::kN % kTileRows == 0, "rows are stored 128 columns at a time");
    SumRow<S> finisher(t);
    reduced_gemm<S>(t, t.operand<float>(operand::gemm_store::partials), finisher);
}

}  // namespace megamoe::attention
