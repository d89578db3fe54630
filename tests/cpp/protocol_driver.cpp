// All ranks of a group as threads of one process, for ThreadSanitizer and AddressSanitizer: between
// processes the one reports false races and misses real ones. The real sync policy with the exact
// math: every output word is recomputed from its token's identity.
//
//   protocol_driver SECONDS           the protocol as it is
//   protocol_driver SECONDS relaxed   with additions that order nothing: ThreadSanitizer must
//   object
//
// Prints one JSON object; exit status 1 when an output is wrong or a wait expired.
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cpu/explore/scenario.hpp"
#include "cpu/kernel.hpp"
#include "cpu/sync.hpp"
#include "driver.hpp"

using namespace megamoe;
using namespace megamoe::cpu;
using namespace megamoe::cpu::explore;
using driver::Clock;
using driver::kLimit;
using driver::Memory;

namespace {

// A mistake that neither outputs on x86-64 nor interleavings show.
struct RelaxedSync : CpuSync {
    using CpuSync::CpuSync;
    static uint32_t add(uint32_t* word, uint32_t value) {
        return std::atomic_ref(*word).fetch_add(value, std::memory_order_relaxed);
    }
};

// One rank: its roles are threads that live for all calls and meet between them, as the threads of
// a session's calls do when they are joined. Nothing holds the ranks together.
template <class Sync>
class ExactRank {
  public:
    ExactRank(const Scenario& scenario, Memory& memory, uint32_t rank)
        : scenario_(scenario),
          shape_(scenario.shape),
          windows_{make_window_layout(shape_), memory.bases.data(), rank},
          sync_(shape_, windows_, kLimit, stats_),
          experts_(shape_.num_units * shape_.num_experts),
          out_(shape_.num_units * shape_.block_m * shape_.l2_tile_n / 2),
          math_(shape_, rank, scenario.h_words, experts_.data(), out_.data()),
          y_(size_t(shape_.max_tokens) * shape_.y_row_bytes() / 4),
          meet_(scenario.roles_per_rank()) {}

    void start(std::vector<std::jthread>& threads) {
        for (uint32_t role = 0; role < scenario_.roles_per_rank(); ++role)
            threads.emplace_back([this, role] { run(role); });
    }
    uint64_t rows() const { return rows_; }
    const std::string& wrong() const { return wrong_; }
    const Stats& stats() const { return stats_; }

  private:
    void run(uint32_t role) {
        std::vector<uint32_t> begin(shape_.num_ranks * shape_.local_experts());
        for (uint32_t call = 0; call < scenario_.num_calls(); ++call) {
            const RankInput& in = scenario_.calls[call][windows_.rank];
            if (role == 0) {
                // Ranks start their calls at different times.
                if (const uint32_t skew = mix(call, windows_.rank) % 4; skew > 1)
                    std::this_thread::sleep_for(std::chrono::microseconds(100 * skew));
                std::fill(y_.begin(), y_.end(), 0xA5A5A5A5);
                math_.stage(windows_, call, in.num_tokens);
            }
            meet_.arrive_and_wait();
            const Context<Sync, IdentityMath> ctx{
                shape_,
                windows_,
                sync_,
                math_,
                {in.num_tokens, in.topk_idx.data(), in.topk_weight.data(),
                 reinterpret_cast<uint8_t*>(y_.data())}};
            const uint32_t units = shape_.num_units;
            const bool ok = role < units ? run_math(ctx, role, begin.data())
                            : role < units + shape_.num_pullers
                                ? run_dispatch(ctx, role - units, begin.data())
                                : run_combine(ctx, begin.data());
            if (!ok) failed_ = true;
            meet_.arrive_and_wait();
            if (failed_) {
                if (role == 0 && wrong_.empty()) wrong_ = "a wait expired";
                return;
            }
            if (role == 0) check(call);
        }
    }
    void check(uint32_t call) {
        const std::vector<uint32_t> want = scenario_.expected(math_, call, windows_.rank);
        rows_ += scenario_.calls[call][windows_.rank].num_tokens;
        for (size_t i = 0; i < want.size() && wrong_.empty(); ++i) {
            if (y_[i] == want[i]) continue;
            char text[160];
            std::snprintf(text, sizeof text, "rank %u, call %u, word %zu of y: %08x, want %08x",
                          windows_.rank, call, i, y_[i], want[i]);
            wrong_ = text;
        }
    }

    const Scenario& scenario_;
    const MoEShape shape_;
    Windows windows_;
    Stats stats_;
    Sync sync_;
    std::vector<uint32_t> experts_, out_;
    IdentityMath math_;
    std::vector<uint32_t> y_;
    std::barrier<> meet_;
    std::atomic<bool> failed_ = false;
    uint64_t rows_ = 0;
    std::string wrong_;
};

struct ExactCase {
    const char* name;
    MoEShape shape;
};
// num_ranks num_experts topk num_shared hidden inter is_fp8 max_tokens block_m tail_rows
// ring_l1 ring_l2 wave_blocks l2_lag l2_tile_n num_units num_pullers
constexpr ExactCase kExactCases[] = {
    {"1r_1u_1p", {1, 4, 2, 0, 128, 128, 0, 9, 2, 0, 1, 1, 1, 1, 128, 1, 1}},
    {"2r_2u_1p_min", {2, 4, 2, 0, 256, 256, 0, 12, 2, 0, 1, 1, 1, 1, 128, 2, 1}},
    {"2r_3u_2p_fp8", {2, 6, 3, 1, 256, 128, 1, 10, 4, 1, 2, 3, 2, 2, 128, 3, 2}},
    {"4r_2u_2p_min", {4, 8, 2, 0, 128, 128, 0, 8, 4, 0, 1, 1, 1, 1, 128, 2, 2}},
    {"4r_1u_1p_shared", {4, 8, 4, 2, 128, 256, 1, 6, 3, 0, 1, 2, 1, 1, 64, 1, 1}},
    {"2r_2u_2p_wide", {2, 4, 2, 1, 128, 256, 0, 16, 2, 1, 16, 16, 4, 6, 64, 2, 2}},
};

template <class Sync>
int run_exact(double seconds) {
    const Clock clock;
    uint64_t calls = 0, rows = 0, blocked = 0;
    uint32_t round = 0;
    // All cases at least once; then again with other routes, as the time goes.
    for (; round < std::size(kExactCases) || clock.seconds() < seconds; ++round) {
        const ExactCase& c = kExactCases[round % std::size(kExactCases)];
        Scenario scenario = draw_scenario(c.name, c.shape, 20, round, 100 + round);
        scenario.h_words = 64;
        Memory memory(c.shape);
        std::vector<std::unique_ptr<ExactRank<Sync>>> ranks;
        for (uint32_t r = 0; r < c.shape.num_ranks; ++r)
            ranks.push_back(std::make_unique<ExactRank<Sync>>(scenario, memory, r));
        {
            std::vector<std::jthread> threads;
            for (auto& rank : ranks) rank->start(threads);
        }
        calls += scenario.num_calls();
        for (auto& rank : ranks) {
            rows += rank->rows();
            for (Tag tag : {Tag::kL1Empty, Tag::kL2Empty})
                blocked += rank->stats().blocked[uint32_t(tag)];
            if (rank->wrong().empty()) continue;
            std::printf(
                "{\"part\": \"exact\", \"case\": \"%s\", \"round\": %u, \"wrong\": \"%s\"}\n",
                c.name, round, rank->wrong().c_str());
            return 1;
        }
    }
    std::printf(
        "{\"part\": \"exact\", \"rounds\": %u, \"calls\": %lu, \"rows\": %lu, "
        "\"ring_waits\": %lu, \"seconds\": %.1f}\n",
        round, calls, rows, blocked, clock.seconds());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
    const bool relaxed = argc > 2 && std::string_view(argv[2]) == "relaxed";
    return relaxed ? run_exact<RelaxedSync>(seconds) : run_exact<CpuSync>(seconds);
}
