// Brings weights into L2 while the memory has nothing better to do: a node of the graph beside the
// kernels that will read them. It stores nothing and waits for nothing.
#include "device/pdl.cuh"

namespace megamoe {

inline constexpr uint32_t kMaxRanges = 4;

struct PrefetchParams {
    uint64_t address[kMaxRanges];
    uint64_t bytes[kMaxRanges];  // multiples of `chunk`
    uint32_t chunk;              // bytes of a request
    uint32_t cycles;             // at least, between two requests of a CTA
};

}  // namespace megamoe

extern "C" {
__device__ const unsigned megamoe_prefetch_param_bytes = sizeof(megamoe::PrefetchParams);
}

// One thread; requests of all CTAs together walk through the ranges in order.
extern "C" __global__ void __launch_bounds__(32, 1)
    megamoe_prefetch(const __grid_constant__ megamoe::PrefetchParams p) {
    using namespace megamoe;
    if (threadIdx.x != 0) return;
    ptx::launch_dependents();
    int64_t next = clock64();
    uint64_t at = uint64_t(blockIdx.x) * p.chunk;
#pragma unroll 1
    for (uint32_t range = 0; range < kMaxRanges; ++range) {
#pragma unroll 1
        for (; at < p.bytes[range]; at += uint64_t(gridDim.x) * p.chunk) {
            while (clock64() < next) {
            }
            next += p.cycles;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p.address[range] + at),
                         "r"(p.chunk)
                         : "memory");
        }
        at -= p.bytes[range];
    }
}
