// The two loader warps of a standalone kernel. Weights, their scales and old keys never wait for
// the producers; inputs do. Both fill the pages that the task bodies of csrc/attention_pre read.
//
// Each warp makes the barriers of its own pages and begins; math learns of them by a barrier that
// loaders pass without waiting.
#pragma once

#include "attention_pre/loaders.cuh"
#include "cmp/params.cuh"

namespace megamoe::attention {

inline constexpr int kStartBarrier = 2;

// A loader warp: its barriers may be used.
MEGAMOE_DEVICE void pages_made() {
    __syncwarp();
    asm volatile("bar.arrive %0, %1;" ::"n"(kStartBarrier), "n"(kMathThreads + 64) : "memory");
}
// Math.
MEGAMOE_DEVICE void wait_pages_made() { ptx::named_barrier<kMathThreads + 64>(kStartBarrier); }

MEGAMOE_DEVICE void make_weight_pages(SharedStorage& s) {
    if (ptx::lane() == 0) {
#pragma unroll
        for (uint32_t i = 0; i < kWeightPages; ++i) {
            ptx::barrier_init(s.weight_full[i], 1);
            ptx::barrier_init(s.weight_free[i], kMathWarps);
        }
        ptx::barrier_init(s.scales_ready[0], 1);
        ptx::barrier_init_fence();
        s.stop = 0;
    }
    pages_made();
}
MEGAMOE_DEVICE void make_input_pages(SharedStorage& s) {
    if (ptx::lane() == 0) {
#pragma unroll
        for (uint32_t i = 0; i < kInputPages; ++i) {
            ptx::barrier_init(s.input_full[i], 2);  // bytes, and the scales' ordinary stores
            ptx::barrier_init(s.input_free[i], kMathWarps);
        }
        ptx::barrier_init_fence();
    }
    pages_made();
}

// Weight page `use`, of a task that counts them from 0: waits until math has released it.
MEGAMOE_DEVICE void wait_free(SharedStorage& s, uint32_t use) {
    const WeightPage page(use);
    if (use >= kWeightPages) wait_always(s.weight_free[page.index], page.phase ^ 1);
}

// One lane: page `use`, [block][tile].
template <class S>
MEGAMOE_DEVICE void load_weight_page(const CmpParams& p, const Instruction& inst, SharedStorage& s,
                                     uint32_t use) {
    constexpr uint32_t kElements = S::kLoads == Loads::kFp8 ? kBlockBytes : kBlockBytes / 2;
    constexpr uint32_t kTileStep = S::kOpcode == Opcode::kGemmSwiglu ? S::kN : kTileRows;
    const uint32_t block = use / S::kTiles, tile = use % S::kTiles;
    const WeightPage page(use);
    uint64_t& full = s.weight_full[page.index];
    uint8_t* to = s.weights[page.index];
    wait_free(s, use);
    if (use >= p.in_flight) {
        const WeightPage landing(use - p.in_flight);
        wait_always(s.weight_full[landing.index], landing.phase);
    }
    ptx::arrive_expect(full, kPageBytes);
    const int32_t k = inst.k + block * kElements;
    if constexpr (S::kLoads == Loads::kBf16ByHead) {  // two boxes of 64 columns x 64 of K
        const int32_t row = inst.item * S::kK + k, col = inst.col + tile * kTileRows;
        ptx::load_box(to, p.maps.weights, col, row, full);
        ptx::load_box(to + kPageBytes / 2, p.maps.weights, col + 64, row, full);
    } else {
        ptx::load_box(to, p.maps.weights, k, int32_t(inst.col + tile * kTileStep), full);
    }
}

// The scales of the task's weights, asked for by all lanes before anything else: math waits for all
// of them before its first block.
template <class S>
struct WeightScales {
    static constexpr uint32_t kUses = S::kBlocks * S::kTiles;
    float scale[ceil_div(kUses, 32u)];

    MEGAMOE_DEVICE WeightScales(const CmpParams& p, const Instruction& inst) {
        if constexpr (S::kLoads != Loads::kFp8) return;
        const auto* from = reinterpret_cast<const float*>(p.operands[operand::qkv_a::w_scales]);
        constexpr uint32_t kTileStep = S::kOpcode == Opcode::kGemmSwiglu ? S::kN : kTileRows;
#pragma unroll
        for (uint32_t at = 0; at < kUses; at += 32) {
            const uint32_t i = at + ptx::lane(), tile = i / S::kBlocks, block = i % S::kBlocks;
            const uint32_t row = (inst.col + tile * kTileStep) / kGroup;
            if (i < kUses)
                scale[at / 32] = __ldg(from + row * (S::kK / kGroup) + inst.k / kGroup + block);
        }
    }
    MEGAMOE_DEVICE void store(SharedStorage& s) const {
#pragma unroll
        for (uint32_t at = 0; at < kUses; at += 32)
            if (at + ptx::lane() < kUses) s.slot[0].w_scale[at + ptx::lane()] = scale[at / 32];
        arrive_warp(s.scales_ready[0]);
    }
};

// Scales are handed on as soon as the pages that may be on their way at once have been asked for:
// the next ones wait for these.
template <class S>
MEGAMOE_DEVICE void load_weights(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    constexpr bool kScaled = S::kLoads == Loads::kFp8;
    constexpr uint32_t kUses = S::kBlocks * S::kTiles;
    constexpr uint32_t kFit = kUses < kWeightPages ? kUses : kWeightPages;
    const uint32_t lane = ptx::lane(), first = min(kFit, p.in_flight);
    const WeightScales<S> scales(p, inst);
#pragma unroll 1
    for (uint32_t use = 0; use <= kUses; ++use) {
        if (kScaled && use == first) scales.store(s);
        if (use == kFit && p.trigger == Trigger::kWeights && lane == 0) ptx::launch_dependents();
        if (use < kUses && lane == 0) load_weight_page<S>(p, inst, s, use);
    }
}

// Pages of 128 keys, two of the cache. Keys that a producer may write wait for it; pages past the
// request's length are not read, since the block table may not name them. It has entries for them,
// so these are asked for beside the length.
MEGAMOE_DEVICE void load_keys(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    namespace slots = operand::index_score;
    const uint32_t lane = ptx::lane();
    const auto* cache = reinterpret_cast<const uint8_t*>(p.operands[slots::cache]);
    const auto* table = reinterpret_cast<const int32_t*>(p.operands[slots::block_table]);
    const uint32_t length =
        __ldg(reinterpret_cast<const uint32_t*>(p.operands[slots::context_lens]) + inst.item);
    const uint32_t num_pages = inst.kv_len / kCacheKeys;
    bool waited = false;
    uint32_t entry = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < num_pages; i += 2) {
        if (i % 32 == 0)
            entry = i + lane < num_pages ? uint32_t(__ldg(table + inst.page + i + lane)) : 0;
        const uint32_t first = inst.kv + i * kCacheKeys;
        const uint32_t count = first >= length ? 0 : first + kCacheKeys >= length ? 1 : 2;
        const bool maybe_new = first + count * kCacheKeys + p.num_tokens > length;
        if ((inst.flags & kHasNewKeys) && count > 0 && maybe_new && !waited) {
            wait_producers();
            waited = true;
        }
        const WeightPage page(i / 2);
        wait_free(s, i / 2);
        load_key_pages(s, page.index, p.maps.weights, cache, entry, i, count);
    }
    if (p.trigger == Trigger::kWeights && lane == 0) ptx::launch_dependents();
}

// Blocks of K of the task's tokens, `kPerPage` to a page, each [tokens][128 bytes]; FP8 scales
// beside them. The producers are done.
template <class S>
MEGAMOE_DEVICE void load_inputs(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    constexpr uint32_t kPerPage = kTileRows / S::kRows, kLoads = kTileRows / 32;
    constexpr uint32_t kElements = S::kLoads == Loads::kFp8 ? kBlockBytes : kBlockBytes / 2;
    const uint32_t lane = ptx::lane();
    const auto* scales = reinterpret_cast<const float*>(p.operands[operand::qkv_a::a_scales]);
    constexpr uint32_t kBox = (kPerPage < S::kBlocks ? kPerPage : S::kBlocks) * S::kRows;
    const uint32_t column =
        (inst.k + (S::kLoads == Loads::kBf16ByHead ? inst.item * S::kPitch : 0)) / kElements;
#pragma unroll 1
    for (uint32_t first = 0, use = 0; first < S::kBlocks; first += kPerPage, ++use) {
        const InputPage page(use);
        uint64_t& full = s.input_full[page.index];
        const uint32_t count = min(kPerPage, S::kBlocks - first);
        if (use >= kInputPages) wait_always(s.input_free[page.index], page.phase ^ 1);
        float scale[kLoads] = {};
        if constexpr (S::kLoads == Loads::kFp8) {
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {  // neighbours share a line
                const uint32_t token = (i * 32 + lane) / kPerPage,
                               block = (i * 32 + lane) % kPerPage;
                if (token < inst.rows && block < count)
                    scale[i] = ptx::load_l2(scales + uint64_t(inst.row + token) * (S::kK / kGroup) +
                                            inst.k / kGroup + first + block);
            }
        }
        if (lane == 0) {  // a last box may reach beyond the task's blocks
            ptx::arrive_expect(full, kBox * kBlockBytes);
            ptx::load_box(s.inputs[page.index], p.maps.inputs, 0, int32_t(inst.row),
                          int32_t(column + first), full);
        }
        if constexpr (S::kLoads == Loads::kFp8) {
#pragma unroll
            for (uint32_t i = 0; i < kLoads; ++i) {
                const uint32_t token = (i * 32 + lane) / kPerPage,
                               block = (i * 32 + lane) % kPerPage;
                s.input_scale[page.index][block * S::kRows + token] = scale[i];
            }
        }
        arrive_warp(full);
    }
}

// The task's queries, and the weight of each beside them.
template <class S>
MEGAMOE_DEVICE void load_queries(const CmpParams& p, const Instruction& inst, SharedStorage& s) {
    constexpr uint32_t kLoads = ceil_div(uint32_t(S::kRows), 32u);
    const uint32_t lane = ptx::lane(), used = inst.rows * S::kHeads;
    const float* from = reinterpret_cast<const float*>(p.operands[operand::index_score::weights]) +
                        uint64_t(inst.row) * S::kHeads;
    float weight[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i)
        weight[i] = i * 32 + lane < used ? ptx::load_l2(from + i * 32 + lane) : 0.f;
    if (lane == 0) {
        ptx::arrive_expect(s.input_full[0], S::kRows * kBlockBytes);
        ptx::load_box(s.inputs[0], p.maps.inputs, 0, int32_t(inst.row * S::kPitch),
                      s.input_full[0]);
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i)
        if (i * 32 + lane < S::kRows) s.input_scale[0][i * 32 + lane] = weight[i];
    arrive_warp(s.input_full[0]);
}

}  // namespace megamoe::attention
