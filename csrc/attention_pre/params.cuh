// What the host hands to the attention-pre kernel: its parameters, and the specialisations that a
// plan needs.
//
// A specialisation fixes the shape of a task body at compile time: columns, K, token rows that the
// body can hold (the M band). Neither the number of tokens nor any key length is compiled in. The
// list comes from backends/attention.py as a macro, one X(...) per `spec_id`, in order.
#pragma once

#include "device/tma.cuh"
#include "megamoe/instruction.hpp"

#ifndef MEGAMOE_ATTENTION_SPECS
#error "MEGAMOE_ATTENTION_SPECS lists the specialisations: see megamoe/backends/attention.py"
#endif

namespace megamoe::attention {

// K is cut into blocks of 128 bytes: one swizzled row of a shared-memory operand.
inline constexpr uint32_t kBlockBytes = 128;
// Weight rows of a page, keys of a page of scores, columns of a task's sub-tile.
inline constexpr uint32_t kTileRows = 128;
// Keys of a page of the index cache, and its bytes: codes, then FP32 scales.
inline constexpr uint32_t kCacheKeys = 64;
inline constexpr uint32_t kCacheCodeBytes = kCacheKeys * kGroup;
inline constexpr uint32_t kCachePageBytes = kCacheKeys * (kGroup + 4);
inline constexpr uint32_t kMaxOperandRows = 16;

enum class Loads : uint32_t {
    kNone,        // no pages: the body reads global memory itself
    kFp8,         // weights [N, K] e4m3
    kBf16,        // weights [N, K] BF16
    kBf16ByHead,  // weights [heads, K, N] BF16: N is contiguous
    kKeys,        // pages of the index cache
};

MEGAMOE_HD constexpr Loads loads_of(Opcode opcode) {
    switch (opcode) {
        case Opcode::kQkvA:
        case Opcode::kIndexKey:
        case Opcode::kIndexQuery:
        case Opcode::kMainQuery:
        case Opcode::kGemmSwiglu:
        case Opcode::kGemmStore:
            return Loads::kFp8;
        case Opcode::kHeadGate:
            return Loads::kBf16;
        case Opcode::kAbsorbQuery:
            return Loads::kBf16ByHead;
        case Opcode::kIndexScore:
            return Loads::kKeys;
        default:
            return Loads::kNone;
    }
}

// The part of a specialisation that the loading roles read at run time.
struct SpecRow {
    Loads loads;
    uint32_t rows;    // of an input block: tokens, or queries (tokens x heads) of scores
    uint32_t blocks;  // K of a task in blocks of 128 bytes
    uint32_t tiles;   // weight pages per block: sub-tiles of 128 columns
    uint32_t n, k;    // of the whole matrix
    uint32_t pitch;   // absorb_query: input columns of a head; scores: query rows of a token
    bool partial;     // an FP8 GEMM whose sums others finish: the same body for all opcodes

    // Blocks that share an input page, and elements of K in a block.
    MEGAMOE_HD constexpr uint32_t group() const { return kTileRows / rows; }
    MEGAMOE_HD constexpr uint32_t elements() const {
        return loads == Loads::kFp8 || loads == Loads::kKeys ? kBlockBytes : kBlockBytes / 2;
    }
    MEGAMOE_HD constexpr uint32_t input_pages() const {
        if (loads == Loads::kNone) return 0;
        return loads == Loads::kKeys ? 1 : ceil_div(blocks, group());
    }
    MEGAMOE_HD constexpr uint32_t weight_pages(const Instruction& inst) const {
        if (loads == Loads::kNone) return 0;
        return loads == Loads::kKeys ? inst.kv_len / kTileRows : blocks * tiles;
    }
    // Weight row of the matrix where sub-tile `tile` of a task begins.
    MEGAMOE_HD constexpr uint32_t weight_row(const Instruction& inst, uint32_t tile) const {
        const bool gate_up = inst.opcode == uint32_t(Opcode::kGemmSwiglu);
        return inst.col + tile * (gate_up ? n : kTileRows);
    }
};

template <int kId>
struct Spec;
// X(id, opcode, band, n, k, block_n, k_tile, heads, head_dim, rope, q_lora, kv_lora, apart, eps,
//   factor)
#define X(id, opcode, band, n, k, block_n, k_tile, heads, head_dim, rope, q_lora, kv_lora, apart, \
          eps, factor)                                                                            \
    template <>                                                                                   \
    struct Spec<id> {                                                                             \
        static constexpr Opcode kOpcode = Opcode::opcode;                                         \
        static constexpr Loads kLoads = loads_of(kOpcode);                                        \
        static constexpr int kBand = band, kN = n, kK = k, kHeads = heads, kHeadDim = head_dim;   \
        static constexpr int kRope = rope, kQLora = q_lora, kKvLora = kv_lora;                    \
        static constexpr float kEps = eps, kFactor = factor;                                      \
        static constexpr int kParts = k / k_tile;                                                 \
        static constexpr bool kPartial = apart;                                                   \
        static constexpr int kBlocks = k_tile * (kLoads == Loads::kFp8 ? 1 : 2) / kBlockBytes;    \
        static constexpr int kTiles =                                                             \
            kOpcode == Opcode::kGemmSwiglu ? 2 : ceil_div(block_n, kTileRows);                    \
        static constexpr int kRows = kLoads == Loads::kKeys ? band * heads : band;                \
        static constexpr int kPitch = kLoads == Loads::kKeys ? heads : head_dim;                  \
    };
MEGAMOE_ATTENTION_SPECS
#undef X

#define X(id, ...)                                                           \
    {Spec<id>::kLoads, Spec<id>::kRows, Spec<id>::kBlocks, Spec<id>::kTiles, \
     Spec<id>::kN,     Spec<id>::kK,    Spec<id>::kPitch,  Spec<id>::kPartial},
__constant__ const SpecRow kSpecRows[] = {MEGAMOE_ATTENTION_SPECS};
#undef X

MEGAMOE_HD constexpr uint32_t max_band() {
    uint32_t most = 8;
#define X(id, ...)                                                            \
    if (Spec<id>::kLoads != Loads::kNone && Spec<id>::kLoads != Loads::kKeys) \
        most = most > uint32_t(Spec<id>::kBand) ? most : uint32_t(Spec<id>::kBand);
    MEGAMOE_ATTENTION_SPECS
#undef X
    return most;
}

// Weight scales that a task may need.
MEGAMOE_HD constexpr uint32_t max_scales() {
    uint32_t most = 4;
#define X(id, ...)                                                                           \
    if (Spec<id>::kLoads == Loads::kFp8 && Spec<id>::kBlocks * Spec<id>::kTiles > int(most)) \
        most = Spec<id>::kBlocks * Spec<id>::kTiles;
    MEGAMOE_ATTENTION_SPECS
#undef X
    return most;
}

// Tensor maps of an operand row: what the input loader and the weight loader read.
struct StageMaps {
    TensorMap inputs, weights;
};

// Written by the CTA that gives up first, read by the host.
struct Fault {
    uint32_t raised;  // the one that finds 0 writes the rest
    uint32_t worker, place, event, want, have, epoch;
};

struct AttentionParams {
    const Instruction* instructions;  // [workers][depth]; [1][depth] if dynamic
    const uint64_t* operands;         // [rows][kOperandSlots]
    const StageMaps* maps;            // [rows]
    uint32_t* counters;               // kCounterStride words apart: events, units, tickets
    uint32_t* epochs;                 // [workers]: runs completed on these counters
    Fault* fault;
    uint64_t* trace;  // [workers][depth][7] ns, with MEGAMOE_ATTENTION_TRACE
    uint64_t timeout_ns;
    uint32_t depth;
    uint32_t num_operand_rows;
    uint32_t num_tokens;
    uint32_t dynamic;
    uint32_t ticket_counter;  // dynamic
    uint32_t in_flight;       // weight pages of a CTA that may be on their way at once
    uint32_t ahead_pages;     // weight pages that find no room and may go to L2 meanwhile,
    uint32_t ahead_cycles;    // with a pause between two of them
};

}  // namespace megamoe::attention
