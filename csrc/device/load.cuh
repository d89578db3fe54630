// Boxes of tensors, and loads of what other CTAs store during the kernel: past L1, and never moved
// above a wait, which the compiler may do with __ldcg and with plain loads through const
// __restrict__ pointers.
#pragma once

#include "device/tma.cuh"

namespace megamoe::ptx {

// `tma_load` with the default L2 policy.
MEGAMOE_DEVICE void load_box(void* shared, const TensorMap& map, int32_t x, int32_t y,
                             uint64_t& bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&bar)), "r"(x), "r"(y)
        : "memory");
}

MEGAMOE_DEVICE float load_l2(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE float2 load_l2(const float2* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE float4 load_l2(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
MEGAMOE_DEVICE uint2 load_l2(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE uint4 load_l2(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

}  // namespace megamoe::ptx
