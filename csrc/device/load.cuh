// Boxes of tensors, and loads of what other CTAs store during the kernel: past L1, and never moved
// above a wait, which the compiler may do with __ldcg and with plain loads through const
// __restrict__ pointers.
#pragma once

#include "device/tma.cuh"

namespace megamoe::ptx {

// `tma_load` with the default L2 policy. Shared memory by its address, for loops that keep it.
MEGAMOE_DEVICE void load_box(uint32_t shared, const TensorMap* map, int32_t x, int32_t y,
                             uint32_t bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(shared),
        "l"(map), "r"(bar), "r"(x), "r"(y)
        : "memory");
}
MEGAMOE_DEVICE void load_box(void* shared, const TensorMap& map, int32_t x, int32_t y,
                             uint64_t& bar) {
    load_box(shared_address(shared), &map, x, y, shared_address(&bar));
}

// A 3D box.
MEGAMOE_DEVICE void load_box(void* shared, const TensorMap& map, int32_t x, int32_t y, int32_t z,
                             uint64_t& bar) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
        "l"(&map), "r"(shared_address(&bar)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// A box into L2 alone.
MEGAMOE_DEVICE void prefetch_box(const TensorMap& map, int32_t x, int32_t y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x),
                 "r"(y)
                 : "memory");
}
// Looks once.
MEGAMOE_DEVICE bool test_wait(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}
MEGAMOE_DEVICE bool test_wait(uint64_t& bar, uint32_t parity) {
    return test_wait(shared_address(&bar), parity);
}
// Orders global memory that this thread knows of before later bulk copies.
MEGAMOE_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Of what nobody writes during the kernel; the load is issued where it stands.
MEGAMOE_DEVICE uint32_t load_constant(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
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
