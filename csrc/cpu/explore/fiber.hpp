// Switching between stacks by hand: what the explorer's cooperative scheduler stands on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the explorer switches stacks on x86-64 and AArch64 only"
#endif

extern "C" {
// Saves the callee-saved registers on the current stack and its pointer in *save; goes on at
// `load`.
void megamoe_switch_stack(void** save, void* load);
// First return address of a fiber: calls entry(argument), both put into registers by make_stack.
void megamoe_fiber_start();
}

namespace megamoe::cpu::explore {

// Everything a suspended fiber is: the bytes from its stack pointer up. Nothing else of it lives.
inline void* make_stack(uint8_t* top, void (*entry)(void*), void* argument) {
#if defined(__x86_64__)
    constexpr size_t kFrame = 9;  // r15 r14 r13 r12 rbx rbp, return address; two for alignment
    auto* sp = reinterpret_cast<uint64_t*>(top) - kFrame;
    std::memset(sp, 0, kFrame * 8);
    sp[3] = reinterpret_cast<uint64_t>(entry);     // r12
    sp[4] = reinterpret_cast<uint64_t>(argument);  // rbx
    sp[6] = reinterpret_cast<uint64_t>(&megamoe_fiber_start);
#else
    constexpr size_t kFrame = 20;  // x19..x28, x29, x30, d8..d15
    auto* sp = reinterpret_cast<uint64_t*>(top) - kFrame;
    std::memset(sp, 0, kFrame * 8);
    sp[0] = reinterpret_cast<uint64_t>(entry);     // x19
    sp[1] = reinterpret_cast<uint64_t>(argument);  // x20
    sp[11] = reinterpret_cast<uint64_t>(&megamoe_fiber_start);
#endif
    return sp;
}

}  // namespace megamoe::cpu::explore
