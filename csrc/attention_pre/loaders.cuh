// What both loaders do at their beginning and end.
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

}  // namespace megamoe::attention
