// What finishers read besides the producers' results, brought to L2 before the wait.
//
// The bodies ask for these before they wait, too, but ptxas sinks such loads below the wait, next
// to their first use: nothing tells it that the wait is long. A prefetch is not moved.
#pragma once

#include "cmp/params.cuh"

namespace megamoe::attention {

MEGAMOE_DEVICE void warm_line(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Of `bytes` from `p` on, a line per thread.
MEGAMOE_DEVICE void warm(uint64_t p, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t at = threadIdx.x * kLineBytes; at < bytes; at += kMathThreads * kLineBytes)
        warm_line(reinterpret_cast<const uint8_t*>(p) + at);
}

// Rows of the rotation table: a thread per token.
template <int kRope>
MEGAMOE_DEVICE void warm_rotations(const Instruction& inst, uint64_t positions, uint64_t table) {
    if (threadIdx.x >= inst.rows) return;
    uint32_t position;
    asm volatile("ld.global.nc.u32 %0, [%1];"
                 : "=r"(position)
                 : "l"(reinterpret_cast<const uint32_t*>(positions) + inst.row + threadIdx.x)
                 : "memory");
    const auto* row = reinterpret_cast<const uint8_t*>(table) + uint64_t(position) * kRope * 4;
#pragma unroll
    for (int at = 0; at < kRope * 4; at += kLineBytes) warm_line(row + at);
}

// Math threads.
template <class S>
MEGAMOE_DEVICE void warm_finisher(const CmpParams& p, const Instruction& inst) {
    const uint64_t* at = p.operands;
    if constexpr (S::kOpcode == Opcode::kQkvAFinal) {
        namespace slots = operand::qkv_a;
        constexpr int kRope = S::kN - S::kQLora - S::kKvLora;
        warm(at[slots::q_norm], S::kQLora * 2);
        warm(at[slots::kv_norm], S::kKvLora * 2);
        warm(at[slots::slots] + inst.row * 8, 8);
        warm_rotations<kRope>(inst, at[slots::positions], at[slots::rope]);
    } else if constexpr (S::kOpcode == Opcode::kIndexKey) {
        namespace slots = operand::index_key;
        warm(at[slots::norm_weight], kGroup * 2);
        warm(at[slots::norm_bias], kGroup * 2);
        warm(at[slots::slots] + inst.row * 8, inst.rows * 8);
        warm_rotations<S::kRope>(inst, at[slots::positions], at[slots::rope]);
    } else if constexpr (S::kOpcode == Opcode::kIndexQuery) {
        namespace slots = operand::index_query;
        warm_rotations<S::kRope>(inst, at[slots::positions], at[slots::rope]);
    } else if constexpr (S::kOpcode == Opcode::kNormQuant) {
        if (inst.wait_event[0] != kNoCounter) warm(at[operand::norm_quant::weight], S::kN * 2);
    }
}

}  // namespace megamoe::attention
