// Translation unit of the MoE kernel, compiled by megamoe/jit.py for one matrix shape.
#include "moe/kernel.cuh"

// Facts that the host reads from the compiled file instead of repeating them.
extern "C" {
__constant__ unsigned megamoe_moe_shared_bytes = sizeof(megamoe::moe::SharedStorage);
__constant__ unsigned megamoe_moe_param_bytes = sizeof(megamoe::moe::MoEParams);
__constant__ unsigned megamoe_moe_layout_offset = offsetof(megamoe::moe::MoEParams, layout);
__constant__ unsigned megamoe_moe_rank_offset = offsetof(megamoe::moe::MoEParams, rank);
__constant__ unsigned megamoe_moe_placed_offset = offsetof(megamoe::moe::MoEParams, placed);
__constant__ unsigned megamoe_moe_bases_offset = offsetof(megamoe::moe::MoEParams, bases);
__constant__ unsigned megamoe_moe_most_streams = megamoe::moe::kMostStreams;
__constant__ unsigned megamoe_moe_threads = megamoe::moe::kThreads;
__constant__ unsigned megamoe_abort_offset = offsetof(megamoe::Control, abort);
__constant__ unsigned megamoe_epoch_offset = offsetof(megamoe::Control, epoch);
__constant__ unsigned megamoe_trace_slots = megamoe::kNumTraceSlots;
}
