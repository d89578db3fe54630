// A probe: which SMs are near to which lines of L2. megamoe/backends/cuda_halves.py runs it, one
// CTA on each SM, and tells the halves apart.
#include "device/ptx.cuh"

namespace megamoe::moe {

struct HalvesParams {
    uint32_t* words;   // zeros
    uint32_t* cycles;  // [SMs][lines]: the fewest of an atomic's round trip; 0 where not measured
    uint32_t stride;   // words from line to line
    uint32_t lines, repeats, num_sms;
};

MEGAMOE_DEVICE uint64_t cycle() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}

}  // namespace megamoe::moe

extern "C" __global__ void __launch_bounds__(32, 1)
    megamoe_halves(const __grid_constant__ megamoe::moe::HalvesParams p) {
    using namespace megamoe;
    using megamoe::moe::cycle;
    const uint32_t sm = ptx::sm_id();
    if (threadIdx.x != 0 || sm >= p.num_sms) return;
    for (uint32_t i = 0; i < p.lines; ++i) {
        const uint32_t line = (i + sm * 7) % p.lines;  // SMs spread over the lines
        uint32_t fewest = ~0u;
        for (uint32_t r = 0; r < p.repeats; ++r) {
            const uint64_t begin = cycle();
            // Never so: the answer is waited for.
            if (ptx::fetch_add_relaxed_gpu(p.words + line * p.stride, 0) != 0) return;
            fewest = min(fewest, uint32_t(cycle() - begin));
        }
        p.cycles[sm * p.lines + line] = fewest;
    }
}

extern "C" {
__constant__ unsigned megamoe_halves_param_bytes = sizeof(megamoe::moe::HalvesParams);
}
