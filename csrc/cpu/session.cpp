#include "cpu/session.hpp"

#include <cstring>
#include <thread>

#include "cpu/kernel.hpp"

namespace megamoe::cpu {

Session::Session(const MoEShape& shape, uint32_t rank, std::vector<uint8_t*> bases, float clamp,
                 double limit_s, Isa isa)
    : shape_(shape),
      rank_(rank),
      bases_(std::move(bases)),
      windows_{make_window_layout(shape), bases_.data(), rank},
      limit_s_(limit_s),
      math_(shape, tile_fns(isa), clamp) {
    const uint32_t roles = shape.num_units + shape.num_pullers + 1;
    begin_.assign(roles, std::vector<uint32_t>(size_t(shape.num_ranks) * shape.local_experts()));
}

void Session::stage_bf16(const uint16_t* x, uint32_t num_tokens) {
    const uint64_t begin = trace_.on() ? CpuTrace::now_ns() : 0;
    for (uint32_t t = 0; t < num_tokens; ++t) {
        const uint16_t* row = x + size_t(t) * shape_.hidden;
        uint8_t* to = windows_.at(rank_, Region::kInput, t);
        if (shape_.is_fp8)
            math_.fns().quantize_row(row, int(shape_.hidden), to,
                                     windows_.ptr<float>(rank_, Region::kInputScale, t));
        else
            std::memcpy(to, row, shape_.x_row_bytes());
    }
    if (trace_.on()) trace_.staged(begin, num_tokens);
}

void Session::stage_fp8(const uint8_t* x, const float* scale, uint32_t num_tokens) {
    const uint64_t begin = trace_.on() ? CpuTrace::now_ns() : 0;
    std::memcpy(windows_.at(rank_, Region::kInput), x, size_t(num_tokens) * shape_.x_row_bytes());
    std::memcpy(windows_.at(rank_, Region::kInputScale), scale,
                size_t(num_tokens) * shape_.x_groups() * 4);
    if (trace_.on()) trace_.staged(begin, num_tokens);
}

bool Session::run(uint32_t num_tokens, const int32_t* topk_idx, const float* topk_weight,
                  uint8_t* y) {
    stats_.begin_call();
    trace_.begin_call();
    CpuSync sync(shape_, windows_, limit_s_, stats_, trace_.on() ? &trace_ : nullptr);
    const Context<CpuSync, CpuMath> ctx{
        shape_, windows_, sync, math_, {num_tokens, topk_idx, topk_weight, y}};
    std::atomic<bool> ok = true;
    auto keep = [&ok](bool role_ok) {
        if (!role_ok) ok = false;
    };
    {
        std::vector<std::jthread> roles;
        for (uint32_t p = 0; p < shape_.num_pullers; ++p)
            roles.emplace_back(
                [&, p] { keep(run_dispatch(ctx, p, begin_[shape_.num_units + p].data())); });
        roles.emplace_back([&] { keep(run_combine(ctx, begin_.back().data())); });
        for (uint32_t u = 1; u < shape_.num_units; ++u)
            roles.emplace_back([&, u] { keep(run_math(ctx, u, begin_[u].data())); });
        keep(run_math(ctx, 0, begin_[0].data()));
    }
    if (!ok) faulted_ = true;
    return ok;
}

FaultRecord Session::fault() const {
    const uint32_t by = CpuSync::load(&windows_.control(rank_).abort.value);
    return by == 0 ? FaultRecord{} : *windows_.ptr<FaultRecord>(rank_, Region::kFault, by - 1);
}

void Session::clear_stats() {
    for (auto& n : stats_.blocked) n = 0;
    stats_.high_water_l1 = stats_.high_water_l2 = 0;
}

std::vector<uint32_t> Session::host_barrier(double limit_s) {
    ++host_generation_;
    for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer)
        CpuSync::store(windows_.ptr<uint32_t>(peer, Region::kHostBarrier, rank_), host_generation_);
    const auto start = std::chrono::steady_clock::now();
    while (true) {
        std::vector<uint32_t> missing;
        for (uint32_t peer = 0; peer < shape_.num_ranks; ++peer) {
            auto* word = windows_.ptr<uint32_t>(rank_, Region::kHostBarrier, peer);
            if (!reached(CpuSync::load(word), host_generation_)) missing.push_back(peer);
        }
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        if (missing.empty() || waited.count() > limit_s) return missing;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

void Session::clear_state() {
    const WindowLayout& w = windows_.layout;
    std::memset(bases_[rank_] + w.clear_begin(), 0, w.clear_end() - w.clear_begin());
    faulted_ = false;
}

}  // namespace megamoe::cpu
