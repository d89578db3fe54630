// What loaders share, those of the resident and those of the standalone kernels.
#pragma once

#include "attention_pre/vm.cuh"

namespace megamoe::attention {

// Loads on their way when a role leaves after a stop must land before the CTA ends. `uses` pages
// have been filled, in order.
template <uint32_t kPages>
MEGAMOE_DEVICE void drain(uint64_t (&full)[kPages], uint32_t uses) {
    for (uint32_t use = uses > kPages ? uses - kPages : 0; use < uses; ++use)
        wait_always(full[use % kPages], use / kPages & 1);
}

// The host may have written the maps since the last run.
MEGAMOE_DEVICE void acquire_map(const TensorMap& map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(&map) : "memory");
    ptx::prefetch_map(map);
}

// A warp: 128 keys, cache pages i and i + 1 of a request, into weight page `index`. `entry` is what
// the lane holds of the request's block table; `count` of the two pages exist.
MEGAMOE_DEVICE void load_key_pages(SharedStorage& s, uint32_t index, const TensorMap& map,
                                   const uint8_t* cache, uint32_t entry, uint32_t i,
                                   uint32_t count) {
    const uint32_t lane = ptx::lane();
    uint64_t& full = s.weight_full[index];
    if (lane == 0) {
        if (count > 0)
            ptx::arrive_expect(full, count * kCachePageBytes);
        else
            ptx::arrive(full);
    }
    __syncwarp();
    const uint32_t number = __shfl_sync(~0u, entry, (i + (lane & 1)) % 32);
    if (lane < count) {
        ptx::load_box(s.weights[index] + lane * kCacheCodeBytes, map, 0,
                      int32_t(number * (kCachePageBytes / kBlockBytes)), full);
        ptx::bulk_load(s.key_scale[index] + lane * kCacheKeys,
                       cache + uint64_t(number) * kCachePageBytes + kCacheCodeBytes, kCacheKeys * 4,
                       full);
    }
}

}  // namespace megamoe::attention
