// Tensor maps: opaque on the device, encoded by the host with cuTensorMapEncodeTiled.
#pragma once

#include "device/ptx.cuh"

namespace megamoe {

struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

namespace ptx {

// A 2D box whose first element is (x, y); 128-byte rows land swizzled in shared memory.
MEGAMOE_DEVICE void tma_load(void* shared, const TensorMap& map, int32_t x, int32_t y,
                             uint64_t& bar, uint64_t policy = kEvictNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&bar)), "r"(x), "r"(y), "l"(policy)
        : "memory");
}
// A box of four chunks of 4 KB, 32 rows each, the first at `chunk`; its map tells the others.
MEGAMOE_DEVICE void tma_load_chunks(void* shared, const TensorMap& map, int32_t chunk,
                                    uint64_t& bar) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %3, %3, %3, %4}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&bar)), "r"(0), "r"(chunk)
        : "memory");
}
// The box into L2.
MEGAMOE_DEVICE void tma_prefetch(const TensorMap& map, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map),
                 "r"(x), "r"(y)
                 : "memory");
}
MEGAMOE_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map));
}

}  // namespace ptx
}  // namespace megamoe
