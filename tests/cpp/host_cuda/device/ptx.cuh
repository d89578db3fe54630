// What csrc/device/trace.cuh needs of CUDA, for one host thread that plays the lanes in turn.
#pragma once

#include <cstring>

#include "megamoe/config.hpp"

#define MEGAMOE_DEVICE inline

struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index {
    unsigned x;
};
inline Index blockIdx{0}, threadIdx{0};
inline long long clock64() { return 1234; }
inline void __syncwarp() {}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
    const unsigned old = *p;
    *p += v;
    return old;
}

namespace megamoe::ptx {
inline uint64_t host_clock = 0;
inline uint64_t now_ns() { return host_clock; }
inline uint32_t lane() { return threadIdx.x & 31; }
}  // namespace megamoe::ptx
