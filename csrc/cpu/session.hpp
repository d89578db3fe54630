// A CPU rank's session: its view of the group's windows, its weights, and calls.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/math.hpp"
#include "cpu/sync.hpp"

namespace megamoe::cpu {

class Session {
  public:
    // `bases[r]` is where rank r's window, zero-filled when created, is mapped in this process.
    Session(const MoEShape& shape, uint32_t rank, std::vector<uint8_t*> bases, float clamp,
            double limit_s, Isa isa);

    void load_expert(uint32_t index, const void* w1, const float* w1_scale, const void* w2,
                     const float* w2_scale) {
        math_.load_expert(index, w1, w1_scale, w2, w2_scale);
    }
    bool weights_loaded() const { return math_.num_loaded() == shape_.total_experts(); }

    // Puts a call's tokens into the own window: BF16 rows (quantised where the layer is FP8) …
    void stage_bf16(const uint16_t* x, uint32_t num_tokens);
    // … or e4m3 rows with FP32 scales [T, H/128].
    void stage_fp8(const uint8_t* x, const float* scale, uint32_t num_tokens);

    // Collective. False when a wait expired on any rank; fault() then says which. The session
    // refuses further calls until reset. y: BF16 [T, H].
    bool run(uint32_t num_tokens, const int32_t* topk_idx, const float* topk_weight, uint8_t* y);

    bool faulted() const { return faulted_; }
    FaultRecord fault() const;
    uint32_t epoch() const { return windows_.control(rank_).epoch.value; }
    const Stats& stats() const { return stats_; }
    void clear_stats();

    // From now on every call is recorded.
    void enable_trace(uint32_t capacity) {
        trace_.enable(std::max(shape_.num_units, shape_.num_pullers), capacity);
    }
    const CpuTrace& trace() const { return trace_; }

    // Collective on the hosts: returns the ranks that did not arrive within the limit.
    std::vector<uint32_t> host_barrier(double limit_s);
    // Clears the own protocol state. Between two host barriers, with no call running.
    void clear_state();

    Isa isa() const { return math_.fns().isa; }

  private:
    MoEShape shape_;
    uint32_t rank_;
    std::vector<uint8_t*> bases_;
    Windows windows_;
    double limit_s_;
    CpuMath math_;
    Stats stats_;
    CpuTrace trace_;
    std::vector<std::vector<uint32_t>> begin_;  // per role thread, [R * E_l]
    uint32_t host_generation_ = 0;
    bool faulted_ = false;
};

}  // namespace megamoe::cpu
