// Thin names for the PTX that the kernels use: barriers in shared memory, bulk copies, memory
// order.
#pragma once

#include "megamoe/config.hpp"

#define MEGAMOE_DEVICE __device__ __forceinline__

namespace megamoe::ptx {

MEGAMOE_DEVICE uint32_t shared_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}
MEGAMOE_DEVICE uint32_t lane() { return threadIdx.x & 31; }
// threadIdx.x, read anew: what follows from it is not kept in registers from task to task.
MEGAMOE_DEVICE uint32_t thread_anew() {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// One lane of a converged warp, the same every time. The compiler knows that it is one, and issues
// bulk copies without a loop over lanes.
MEGAMOE_DEVICE bool elect() {
    uint32_t one;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"
                 : "=r"(one)::"memory");
    return one;
}
// Lane 0's value in every lane, and what lane 0 has acquired with it: a shuffle alone moves a value
// and orders no memory.
MEGAMOE_DEVICE uint32_t from_lane_0(uint32_t value) {
    const uint32_t v = __shfl_sync(~0u, value, 0);
    __syncwarp();
    return v;
}
MEGAMOE_DEVICE uint64_t now_ns() {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// ---------------------------------------------------------------- mbarrier

MEGAMOE_DEVICE void barrier_init(uint64_t& bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&bar)),
                 "r"(arrivals));
}
// Makes barriers that this thread initialised known to the copy engine.
MEGAMOE_DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
MEGAMOE_DEVICE void arrive(uint64_t& bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&bar)) : "memory");
}
MEGAMOE_DEVICE void arrive_expect(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
MEGAMOE_DEVICE void arrive_expect(uint64_t& bar, uint32_t bytes) {
    arrive_expect(shared_address(&bar), bytes);
}
// Blocks for a time that the hardware chooses.
MEGAMOE_DEVICE bool try_wait(uint64_t& bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p; }"
        : "=r"(done)
        : "r"(shared_address(&bar)), "r"(parity)
        : "memory");
    return done;
}
template <int kThreads>
MEGAMOE_DEVICE void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

// ---------------------------------------------------------------- bulk copies

// What L2 is to do with the lines of a copy.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictLast = 0x14F0000000000000;

MEGAMOE_DEVICE void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint64_t& bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(shared_address(&bar))
        : "memory");
}
MEGAMOE_DEVICE void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t& bar) {
    bulk_load(shared_address(shared), global, bytes, bar);
}
MEGAMOE_DEVICE void bulk_store(void* global, const void* shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}
MEGAMOE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most kPending of this thread's groups are not yet written (or, with _read, not yet read).
template <int kPending>
MEGAMOE_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
MEGAMOE_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Orders generic accesses of this thread (and what it has acquired) before later bulk copies.
MEGAMOE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---------------------------------------------------------------- global memory, with order

MEGAMOE_DEVICE uint32_t load_acquire_gpu(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE uint32_t load_acquire_sys(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE uint32_t load_relaxed_sys(const uint32_t* p) {
    uint32_t v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MEGAMOE_DEVICE void store_release_sys(uint32_t* p, uint32_t v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void add_release_gpu(uint32_t* p, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void add_release_sys(uint32_t* p, uint32_t v) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void add_relaxed_sys(uint32_t* p, uint32_t v) {
    asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// These return the value before the addition. The first is for one lane of a warp: the compiler's
// own gathers lanes, and waits for the answer to do so.
MEGAMOE_DEVICE uint32_t fetch_add_relaxed_gpu(uint32_t* word, uint32_t value) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}
MEGAMOE_DEVICE uint32_t fetch_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
    uint32_t old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(v)
                 : "memory");
    return old;
}
MEGAMOE_DEVICE void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

MEGAMOE_DEVICE uint32_t sm_id() {
    uint32_t id;
    asm("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

MEGAMOE_DEVICE void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// Data that other SMs or peers write during the kernel: past the L1 cache.
MEGAMOE_DEVICE uint4 load_streaming(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
MEGAMOE_DEVICE void store_u32(void* p, uint32_t v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MEGAMOE_DEVICE void store_u128(void* p, const uint32_t (&v)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3])
                 : "memory");
}

// ---------------------------------------------------------------- shared memory

MEGAMOE_DEVICE float load_shared(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
MEGAMOE_DEVICE float2 load_shared2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}

MEGAMOE_DEVICE uint4 load_shared4(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Four 8 x 8 matrices of 16-bit words: lane i gives the address of row i % 8 of matrix i / 8.
MEGAMOE_DEVICE void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// ---------------------------------------------------------------- registers

template <int kRegisters>
MEGAMOE_DEVICE void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MEGAMOE_DEVICE void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Transposes an 8x8 matrix of 16-bit elements spread over a warp.
MEGAMOE_DEVICE uint32_t transpose_8x8(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
// `low` ends in the low byte. Nearest even, saturating at 448; NaN stays NaN.
MEGAMOE_DEVICE uint32_t pack_e4m3(float low, float high) {
    uint16_t v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
MEGAMOE_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
// Results and operands below 2^-126 are zero.
MEGAMOE_DEVICE float exp2_ftz(float v) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
// NaN wins, as in the contract's min and max of the clamp.
MEGAMOE_DEVICE float min_nan(float a, float b) {
    float v;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}
MEGAMOE_DEVICE float max_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

}  // namespace megamoe::ptx
