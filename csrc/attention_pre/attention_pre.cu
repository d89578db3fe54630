// Translation unit of the attention-pre megakernel, compiled by megamoe/jit.py for one list of
// specialisations.
#include "attention_pre/kernel.cuh"

// Facts that the host reads from the compiled file instead of repeating them.
extern "C" {
__device__ const unsigned megamoe_attention_shared_bytes =
    sizeof(megamoe::attention::SharedStorage);
__device__ const unsigned megamoe_attention_param_bytes =
    sizeof(megamoe::attention::AttentionParams);
__device__ const unsigned megamoe_attention_threads = megamoe::attention::kThreads;
__device__ const unsigned megamoe_attention_weight_pages = megamoe::attention::kWeightPages;
__device__ const unsigned megamoe_attention_input_pages = megamoe::attention::kInputPages;
__device__ const unsigned megamoe_attention_slots = megamoe::attention::kSlots;
}
