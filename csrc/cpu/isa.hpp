// Instruction sets of the tile functions and their run-time choice.
#pragma once

namespace megamoe::cpu {

// Ascending: a machine that runs one usually runs those before it (kAvx2 and up: x86-64 only).
enum class Isa { kPortable, kAvx2, kAvx512, kAmx };
inline constexpr Isa kAllIsas[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kAmx};

const char* isa_name(Isa isa);  // "portable", "avx2", "avx512", "amx"

// True if this build has the code and this machine and operating system run it. The first
// question about kAmx asks Linux for the tile registers, for the whole process.
bool isa_available(Isa isa);

// The fastest available one, or the one named by the environment variable MEGAMOE_ISA.
// Throws std::runtime_error if that names nothing known, or something not available here.
Isa best_isa();

}  // namespace megamoe::cpu
