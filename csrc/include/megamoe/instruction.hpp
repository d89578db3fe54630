// The instruction set of the attention-pre megakernel: what the host plans and a CTA interprets.
//
// This header is the only home of the record: the device reads `Instruction`, and Python gets every
// position, opcode, flag and operand slot from bindings/describe_instruction.cpp, which expands the
// same lists. Which body an opcode runs is said once, beside its operands below.
//
// Vocabulary: a *task* is one tile, and one instruction. An *event* is a counter in global memory
// that tasks wait for before they first read what other tasks wrote. A *unit* is the tasks that
// together publish one result: a single task, or the parts of a split-K reduction, of which the
// last to arrive (`reduce_counter`) reduces, finishes and signals.
#pragma once

#include "megamoe/config.hpp"

namespace megamoe {

inline constexpr uint32_t kInstructionWords = 32;
inline constexpr uint32_t kMaxWaits = 4;
inline constexpr uint32_t kMaxSignals = 2;
inline constexpr uint32_t kOperandSlots = 16;
// In wait_event, signal_event and reduce_counter: the slot is unused. Used slots come first.
inline constexpr uint32_t kNoCounter = 0xffffffffu;
// A queue shorter than the longest one is padded with kNoOp that has neither waits nor signals.

// X(name): one word each, in the order in memory; then X(name, words). 32 words in all.
#define MEGAMOE_INSTRUCTION_SCALARS(X)                                                         \
    X(opcode)         /* enum Opcode */                                                        \
    X(spec_id)        /* compiled specialisation: shapes and tile sizes, not M or KV */        \
    X(operand_row)    /* row of the operand pointer table and of the tensor-map table */       \
    X(flags)          /* enum InstructionFlag */                                               \
    X(row)            /* first token row */                                                    \
    X(rows)           /* token rows; at most the M band of the specialisation */               \
    X(col)            /* first output column; absorb_query: column of the latent */            \
    X(cols)           /* output columns */                                                     \
    X(k)              /* first column of the reduction */                                      \
    X(k_len)          /* columns of the reduction */                                           \
    X(part)           /* which part of a split-K sum this task computes */                     \
    X(parts)          /* parts of that sum; partials are FP32 [M, parts, N] */                 \
    X(item)           /* head (main, absorb, index query) or request (index score) */          \
    X(kv)             /* index score: first key */                                             \
    X(kv_len)         /* index score: keys, before the limit of context_lens */                \
    X(page)           /* index score: place in block_table of the first key's page */          \
    X(stride)         /* index score: elements between two rows of logits */                   \
    X(aux)            /* index query: parts of the gate. index score: new tokens of the */     \
                      /* request from `row` on: row i sees the first len - aux + i + 1 keys */ \
    X(reduce_counter) /* arrivals of the unit, or kNoCounter if the task is a unit */          \
    X(reduce_total)   /* tasks of the unit */
#define MEGAMOE_INSTRUCTION_ARRAYS(X)                                                        \
    X(wait_event, kMaxWaits)     /* every event named here must reach ... */                 \
    X(wait_threshold, kMaxWaits) /* ... threshold * epoch before the first dependent read */ \
    X(signal_event, kMaxSignals) /* the unit adds, after its last write, to these events */  \
    X(signal_increment, kMaxSignals)

struct Instruction {
#define X(name) uint32_t name;
    MEGAMOE_INSTRUCTION_SCALARS(X)
#undef X
#define X(name, words) uint32_t name[words];
    MEGAMOE_INSTRUCTION_ARRAYS(X)
#undef X
};
static_assert(sizeof(Instruction) == 4 * kInstructionWords);

// X(constant, name, bit)
#define MEGAMOE_INSTRUCTION_FLAGS(X)                                                           \
    X(kHasResidual, has_residual, 0) /* add a second input (norm_quant) or to the output */    \
    X(kHasRope, has_rope, 1)         /* the tile's last columns of the head are rotated */     \
    X(kScalePow2, scale_pow2, 2)     /* activation scales are rounded up to a power of two */  \
    X(kHasNormed, has_normed, 3)     /* norm_quant: store the BF16 result as well */           \
    X(kHasNewKeys, has_new_keys, 4)  /* index_score: some keys are of this run. Without the */ \
                                     /* flag keys may be fetched before the waits */

enum InstructionFlag : uint32_t {
#define X(constant, name, bit) constant = 1u << bit,
    MEGAMOE_INSTRUCTION_FLAGS(X)
#undef X
};

// X(constant, name, OPERANDS). An opcode names a main loop and its finaliser; spec_id picks the
// compiled shape. Tensors are row-major. M is the number of token rows of the call, T of a tile.
#define MEGAMOE_OPCODES(X)                                                                       \
    /* Waits and signals only: padding, and the relays of normalization. */                      \
    X(kNoOp, no_op, MEGAMOE_NO_OPERANDS)                                                         \
    /* A0. r = BF16(x + residual); n = BF16(rmsnorm(r) * weight); e4m3 of n per 128. */          \
    X(kNormQuant, norm_quant, MEGAMOE_NORM_QUANT_OPERANDS)                                       \
    /* B0. FP8 GEMM onto [q_a | kv_a | k_pe]; partials. In a unit, the last to arrive does */    \
    /* kQkvAFinal's work for its `rows`, all columns of them. */                                 \
    X(kQkvA, qkv_a, MEGAMOE_QKV_A_OPERANDS)                                                      \
    /* A task per row: sum of the parts; RMSNorm and e4m3 of q_a; RMSNorm, e4m3 of kv_a and RoPE \
       of k_pe into the latent cache. */                                                         \
    X(kQkvAFinal, qkv_a_final, MEGAMOE_QKV_A_OPERANDS)                                           \
    /* C0. BF16 GEMM onto the index heads; FP32 partials, summed by kIndexQuery. */              \
    X(kHeadGate, head_gate, MEGAMOE_HEAD_GATE_OPERANDS)                                          \
    /* B1. FP8 GEMM; last part: LayerNorm, RoPE on the first columns, e4m3, paged write. */      \
    X(kIndexKey, index_key, MEGAMOE_INDEX_KEY_OPERANDS)                                          \
    /* Sums the parts of kIndexKey and finishes them, where they are units of their own. */      \
    X(kIndexKeyFinal, index_key_final, MEGAMOE_INDEX_KEY_OPERANDS)                               \
    /* D1. FP8 GEMM of one head; last part: RoPE, e4m3, weight = gate * scale * constant. */     \
    X(kIndexQuery, index_query, MEGAMOE_INDEX_QUERY_OPERANDS)                                    \
    /* The same for kIndexQuery. */                                                              \
    X(kIndexQueryFinal, index_query_final, MEGAMOE_INDEX_QUERY_OPERANDS)                         \
    /* D0. FP8 GEMM, half a head; RoPE on the head's last columns; BF16. */                      \
    X(kMainQuery, main_query, MEGAMOE_MAIN_QUERY_OPERANDS)                                       \
    /* D2. BF16 GEMM per head: q_nope onto the latent; BF16. */                                  \
    X(kAbsorbQuery, absorb_query, MEGAMOE_ABSORB_QUERY_OPERANDS)                                 \
    /* E1. logits = sum over heads of weight * relu(q . k), times the key's scale; -inf where    \
       the row may not look. */                                                                  \
    X(kIndexScore, index_score, MEGAMOE_INDEX_SCORE_OPERANDS)                                    \
    /* FP8 GEMM with gate columns [0, I) and up columns [I, 2I); SwiGLU; e4m3 per 128. */        \
    X(kGemmSwiglu, gemm_swiglu, MEGAMOE_GEMM_SWIGLU_OPERANDS)                                    \
    /* FP8 GEMM; last part: plus residual where flagged; BF16. */                                \
    X(kGemmStore, gemm_store, MEGAMOE_GEMM_STORE_OPERANDS)

// Operand slots, in the order of the pointer table. `partials` are FP32 [M, parts, N].
#define MEGAMOE_NO_OPERANDS(X)
#define MEGAMOE_NORM_QUANT_OPERANDS(X)                 \
    X(x)            /* BF16 [M, H] */                  \
    X(residual)     /* BF16 [M, H] */                  \
    X(weight)       /* BF16 [H] */                     \
    X(residual_out) /* BF16 [M, H], x + residual */    \
    X(normed)       /* BF16 [M, H], with kHasNormed */ \
    X(codes)        /* e4m3 [M, H] */                  \
    X(scales)       /* FP32 [M, H/128] */
#define MEGAMOE_QKV_A_OPERANDS(X)                                                          \
    X(a)        /* e4m3 [M, H] */                                                          \
    X(a_scales) /* FP32 [M, H/128] */                                                      \
    X(w)        /* e4m3 [Lq + Lkv + R, H] */                                               \
    X(w_scales) /* FP32 [ceil(rows/128), H/128] */                                         \
    X(partials)                                                                            \
    X(q_norm)    /* BF16 [Lq] */                                                           \
    X(kv_norm)   /* BF16 [Lkv] */                                                          \
    X(codes)     /* e4m3 [M, Lq] */                                                        \
    X(scales)    /* FP32 [M, Lq/128] */                                                    \
    X(cache)     /* bytes [slots, Lkv + 4 Lkv/128 + 2 R]: codes, FP32 scales, BF16 rope */ \
    X(slots)     /* int64 [M]: row of `cache` */                                           \
    X(positions) /* int32 [M] */                                                           \
    X(rope)      /* FP32 [max position, R]: R/2 cosines, R/2 sines */
#define MEGAMOE_HEAD_GATE_OPERANDS(X) \
    X(a) /* BF16 [M, H] */            \
    X(w) /* BF16 [index heads, H] */  \
    X(partials)
#define MEGAMOE_INDEX_KEY_OPERANDS(X)                                          \
    X(a)        /* e4m3 [M, H] */                                              \
    X(a_scales) /* FP32 [M, H/128] */                                          \
    X(w)        /* e4m3 [128, H] */                                            \
    X(w_scales) /* FP32 [1, H/128] */                                          \
    X(partials)                                                                \
    X(norm_weight) /* BF16 [128] */                                            \
    X(norm_bias)   /* BF16 [128] */                                            \
    X(cache)       /* bytes [pages, 64*132]: 64 x 128 codes, 64 FP32 scales */ \
    X(slots)       /* int64 [M]: page * 64 + place */                          \
    X(positions)   /* int32 [M] */                                             \
    X(rope)        /* FP32 [max position, R] */
#define MEGAMOE_INDEX_QUERY_OPERANDS(X)                                        \
    X(a)        /* e4m3 [M, Lq] */                                             \
    X(a_scales) /* FP32 [M, Lq/128] */                                         \
    X(w)        /* e4m3 [index heads * 128, Lq] */                             \
    X(w_scales) /* FP32 [index heads, Lq/128] */                               \
    X(partials)                                                                \
    X(gate)      /* FP32 [M, gate parts, index heads]: kHeadGate's partials */ \
    X(codes)     /* e4m3 [M, index heads, 128] */                              \
    X(weights)   /* FP32 [M, index heads] */                                   \
    X(positions) /* int32 [M] */                                               \
    X(rope)      /* FP32 [max position, R] */
#define MEGAMOE_MAIN_QUERY_OPERANDS(X)                     \
    X(a)         /* e4m3 [M, Lq] */                        \
    X(a_scales)  /* FP32 [M, Lq/128] */                    \
    X(w)         /* e4m3 [heads * D, Lq] */                \
    X(w_scales)  /* FP32 [heads * D / 128, Lq/128] */      \
    X(out)       /* BF16 [M, heads, D]: D = nope + rope */ \
    X(positions) /* int32 [M] */                           \
    X(rope)      /* FP32 [max position, R] */
#define MEGAMOE_ABSORB_QUERY_OPERANDS(X)                      \
    X(a)   /* BF16 [M, heads, D]; the first `nope` columns */ \
    X(w)   /* BF16 [heads, nope, Lkv] */                      \
    X(out) /* BF16 [M, heads, Lkv] */
#define MEGAMOE_INDEX_SCORE_OPERANDS(X)                              \
    X(codes)        /* e4m3 [M, index heads, 128] */                 \
    X(weights)      /* FP32 [M, index heads] */                      \
    X(cache)        /* bytes [pages, 64*132] */                      \
    X(block_table)  /* int32 [requests, pages of a request], flat */ \
    X(context_lens) /* int32 [requests], keys with the new tokens */ \
    X(logits)       /* FP32 [M, stride] */
#define MEGAMOE_GEMM_SWIGLU_OPERANDS(X)    \
    X(a)        /* e4m3 [M, K] */          \
    X(a_scales) /* FP32 [M, K/128] */      \
    X(w)        /* e4m3 [2I, K] */         \
    X(w_scales) /* FP32 [2I/128, K/128] */ \
    X(codes)    /* e4m3 [M, I] */          \
    X(scales)   /* FP32 [M, I/128] */
#define MEGAMOE_GEMM_STORE_OPERANDS(X)          \
    X(a)        /* e4m3 [M, K] */               \
    X(a_scales) /* FP32 [M, K/128] */           \
    X(w)        /* e4m3 [N, K] */               \
    X(w_scales) /* FP32 [ceil(N/128), K/128] */ \
    X(partials)                                 \
    X(residual) /* BF16 [M, N] */               \
    X(out)      /* BF16 [M, N] */

enum class Opcode : uint32_t {
#define X(constant, name, operands) constant,
    MEGAMOE_OPCODES(X)
#undef X
};

// Operand slots as constants: operand::qkv_a::w. The count checks that a row can hold them.
namespace operand {
#define MEGAMOE_SLOT(name) name,
#define X(constant, op, OPERANDS)                              \
    namespace op {                                             \
    enum Slot : uint32_t { OPERANDS(MEGAMOE_SLOT) num_slots }; \
    static_assert(num_slots <= kOperandSlots);                 \
    }
MEGAMOE_OPCODES(X)
#undef X
#undef MEGAMOE_SLOT
}  // namespace operand

// Counters. Events come first, arrival counters of units after them, then, for a dynamic plan, its
// ticket counter. All are zero before the first run of a plan and never cleared: every run adds the
// same amount, so run `epoch` (from 1) is complete at total * epoch. A new plan starts with zeroed
// counters and epoch 1.
//
// In a dynamic plan all workers draw from one queue of `depth` instructions. Each worker draws
// until it gets a ticket past the end, so a run draws depth + workers tickets.
inline constexpr uint32_t kCounterStride = kLineBytes / sizeof(uint32_t);

// Whether a counter read as `have` satisfies a wait. The difference is taken modulo 2^32, so
// counters may wrap.
MEGAMOE_HD constexpr bool event_reached(uint32_t have, uint32_t threshold, uint32_t epoch) {
    return static_cast<int32_t>(have - threshold * epoch) >= 0;
}

// Whether an arrival that found `before` in the unit's counter is the last one of this run.
MEGAMOE_HD constexpr bool is_last_arrival(uint32_t before, uint32_t total, uint32_t epoch) {
    return before + 1 == total * epoch;
}

// Place in the dynamic queue of a ticket that was drawn as `before`; `depth` and more: none is
// left.
MEGAMOE_HD constexpr uint32_t ticket_place(uint32_t before, uint32_t depth, uint32_t num_workers,
                                           uint32_t epoch) {
    return before - (depth + num_workers) * (epoch - 1);
}

}  // namespace megamoe
