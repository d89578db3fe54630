// Translation unit of one standalone kernel, compiled by megamoe/jit.py for one specialisation.
#include "cmp/kernel.cuh"

// Facts that the host reads from the compiled file instead of repeating them.
extern "C" {
__device__ const unsigned megamoe_cmp_shared_bytes = sizeof(megamoe::attention::SharedStorage);
__device__ const unsigned megamoe_cmp_param_bytes = sizeof(megamoe::attention::CmpParams);
__device__ const unsigned megamoe_cmp_last_param_at =
    offsetof(megamoe::attention::CmpParams, in_flight);
__device__ const unsigned megamoe_cmp_threads = megamoe::attention::kCmpThreads;
}
