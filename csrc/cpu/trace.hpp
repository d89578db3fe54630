// The recorder of CPU ranks: the events of megamoe/trace.hpp, on the machine's steady clock, which
// all ranks share. Off unless a session asks for it.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "megamoe/fault.hpp"
#include "megamoe/trace.hpp"

namespace megamoe::cpu {

class CpuTrace {
  public:
    // Each track is written by one thread.
    void enable(uint32_t num_units, uint32_t capacity) {
        capacity_ = capacity;
        recorded_.assign(size_t(num_units) * kNumTraceRoles, 0);
        events_.assign(recorded_.size() * capacity, TraceEvent{});
    }
    bool on() const { return capacity_ != 0; }
    // Tokens that the host has staged since are the call's first event, of unit 0.
    void begin_call() {
        std::fill(recorded_.begin(), recorded_.end(), 0);
        if (staged_.end != 0) record(0, TraceRole::kDispatch, staged_);
        staged_ = {};
    }
    void staged(uint64_t begin, uint32_t num_tokens) {
        staged_ = {begin, now_ns(), uint32_t(TraceKind::kStage), num_tokens, 0, 0};
    }
    void record(uint32_t unit, TraceRole role, const TraceEvent& event) {
        const size_t track = size_t(unit) * kNumTraceRoles + uint32_t(role);
        const uint32_t i = recorded_[track]++;
        if (i < capacity_) events_[track * capacity_ + i] = event;
    }
    static uint64_t now_ns() {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return uint64_t(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
    }
    // [units][kNumTraceRoles], and as many times [capacity].
    const std::vector<uint32_t>& recorded() const { return recorded_; }
    const std::vector<TraceEvent>& events() const { return events_; }

  private:
    uint32_t capacity_ = 0;
    std::vector<uint32_t> recorded_;
    std::vector<TraceEvent> events_;
    TraceEvent staged_{};
};

// An event from here to its end; none where trace is null.
class Stretch {
  public:
    Stretch(CpuTrace* trace, uint32_t unit, TraceRole role, TraceKind kind, uint32_t a, uint32_t b,
            uint32_t c)
        : trace_(trace),
          unit_(unit),
          role_(role),
          event_{trace ? CpuTrace::now_ns() : 0, 0, uint32_t(kind), a, b, c} {}
    Stretch(const Stretch&) = delete;
    Stretch& operator=(const Stretch&) = delete;
    ~Stretch() {
        if (!trace_) return;
        event_.end = CpuTrace::now_ns();
        trace_->record(unit_, role_, event_);
    }

  private:
    CpuTrace* trace_;
    uint32_t unit_;
    TraceRole role_;
    TraceEvent event_;
};

// The track of a waiting role.
inline TraceRole trace_role(Role role) {
    return role == Role::kDispatch  ? TraceRole::kPull
           : role == Role::kCombine ? TraceRole::kCombine
                                    : TraceRole::kMath;
}

}  // namespace megamoe::cpu
