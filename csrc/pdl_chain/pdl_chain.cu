// A chain of short kernels, to measure what lies between two of them: one "layer" of the chain is
// out[i] = relu(in[i]) * w[i] + b[i], and each layer reads what the one before it wrote.
//
// Weights belong to the layer alone, so they are read before griddepcontrol.wait. Everything that
// another kernel reads or writes is touched after it: the two activation buffers alternate, so the
// buffer a layer writes is the one its predecessor still reads.
//
//   PDL_CHAIN_STAMPS         time stamps of every CTA, for the gaps
//   PDL_CHAIN_WAIT           0 leaves the wait out: the negative control of the check
//   PDL_CHAIN_TRIGGER_FIRST  1 lets the next kernel start before this one has done anything
#include "device/pdl.cuh"

#ifndef PDL_CHAIN_STAMPS
#define PDL_CHAIN_STAMPS 0
#endif
#ifndef PDL_CHAIN_WAIT
#define PDL_CHAIN_WAIT 1
#endif
#ifndef PDL_CHAIN_TRIGGER_FIRST
#define PDL_CHAIN_TRIGGER_FIRST 0
#endif

namespace megamoe::pdl_chain {

inline constexpr uint32_t kThreads = 256;

// Stamps of a CTA, %globaltimer in ns.
enum Stamp : uint32_t {
    kStart,  // first instruction
    kReady,  // past the wait: the predecessor's output may be read
    kDone,   // all of this CTA's output is written
    kNumStamps
};

// No pointer is __restrict__, and `in` is read by plain loads: under PDL its writer may still run
// when this kernel starts, which the read-only path (ld.global.nc) does not allow.
struct LayerParams {
    const float* in;
    float* out;
    const float* weight;
    const float* bias;
    uint64_t* stamps;  // [CTAs][kNumStamps] of this layer
    uint32_t count;
    uint32_t delay_ns;  // sleep between the early trigger and the store, to expose a missing wait
};

MEGAMOE_DEVICE void stamp(const LayerParams& p, Stamp which, uint64_t at) {
    if (threadIdx.x == 0) p.stamps[uint64_t(blockIdx.x) * kNumStamps + which] = at;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    megamoe_pdl_layer(const __grid_constant__ LayerParams p) {
    uint64_t start = 0, ready = 0;
    if constexpr (PDL_CHAIN_STAMPS) start = ptx::now_ns();
    if constexpr (PDL_CHAIN_TRIGGER_FIRST) ptx::launch_dependents();
    const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
    float weight = 0.0f, bias = 0.0f;
    if (i < p.count) {
        weight = __ldg(p.weight + i);
        bias = __ldg(p.bias + i);
    }
    if constexpr (PDL_CHAIN_WAIT) ptx::grid_wait();
    if constexpr (PDL_CHAIN_STAMPS) ready = ptx::now_ns();
    if (i < p.count) {
        // Never contracted to an fma, so that the CPU's result is the same to the bit. The
        // comparison keeps a NaN, so that poison spreads.
        const float x = p.in[i];
        const float y = __fadd_rn(__fmul_rn(x < 0.0f ? 0.0f : x, weight), bias);
        if (p.delay_ns) {
            const uint64_t end = ptx::now_ns() + p.delay_ns;
            while (ptx::now_ns() < end) __nanosleep(200);
        }
        p.out[i] = y;
    }
    if constexpr (PDL_CHAIN_STAMPS) {
        __syncthreads();
        const uint64_t done = ptx::now_ns();
        stamp(p, kStart, start);
        stamp(p, kReady, ready);
        stamp(p, kDone, done);
    }
    if constexpr (!PDL_CHAIN_TRIGGER_FIRST) ptx::launch_dependents();
}

}  // namespace megamoe::pdl_chain

// Facts that the host reads from the compiled file instead of repeating them.
extern "C" {
__constant__ unsigned megamoe_pdl_threads = megamoe::pdl_chain::kThreads;
__constant__ unsigned megamoe_pdl_param_bytes = sizeof(megamoe::pdl_chain::LayerParams);
__constant__ unsigned megamoe_pdl_stamps = megamoe::pdl_chain::kNumStamps;
}
