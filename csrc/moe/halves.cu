// Probes of L2's two halves: which SMs are near to which lines, and which chunks of memory belong
// to which half. megamoe/backends/cuda_halves.py and cuda_placing.py run them, one CTA on each SM,
// and tell the halves apart.
#include "device/ptx.cuh"

namespace megamoe::moe {

struct HalvesParams {
    uint32_t* words;   // zeros
    uint32_t* cycles;  // [SMs][lines]: the fewest of an atomic's round trip; 0 where not measured
    uint32_t stride;   // words from line to line
    uint32_t lines, repeats, num_sms;
};

struct ChunksParams {
    uint32_t* words;        // of any values, which stay: windows of 16 chunks of 4 KB
    uint32_t* cycles;       // [windows][16]: the fewest of an atomic's round trip
    uint32_t* half;         // [windows]: of the SM that measured the window
    uint32_t near_half[6];  // as in MoEParams
    uint32_t num_windows, repeats;
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

extern "C" __global__ void __launch_bounds__(32, 1)
    megamoe_chunks(const __grid_constant__ megamoe::moe::ChunksParams p) {
    using namespace megamoe;
    using megamoe::moe::cycle;
    if (threadIdx.x != 0) return;
    const uint32_t sm = ptx::sm_id();
    const uint32_t half = p.near_half[sm / 32] >> sm % 32 & 1;
    for (uint32_t window = blockIdx.x; window < p.num_windows; window += gridDim.x) {
        p.half[window] = half;
        for (uint32_t i = 0; i < 16; ++i) {
            const uint64_t chunk = uint64_t(window) * 16 + i;
            uint32_t fewest = ~0u;
            for (uint32_t r = 0; r < p.repeats; ++r) {
                const uint64_t begin = cycle();
                const uint32_t found = ptx::fetch_add_relaxed_gpu(p.words + chunk * 1024, 0);
                // Hardly ever so, and harmless: the answer is waited for.
                if (found == 0x9E3779B9) asm volatile("nanosleep.u32 0;" ::: "memory");
                fewest = min(fewest, uint32_t(cycle() - begin));
            }
            p.cycles[chunk] = fewest;
        }
    }
}

extern "C" {
__constant__ unsigned megamoe_halves_param_bytes = sizeof(megamoe::moe::HalvesParams);
__constant__ unsigned megamoe_chunks_param_bytes = sizeof(megamoe::moe::ChunksParams);
}
