// All ranks of a group as threads of one process, for ThreadSanitizer and AddressSanitizer: between
// processes the one reports false races and misses real ones. No Python.
//
//   protocol_driver exact SECONDS   the real sync policy with the exact math; every output word is
//                                   recomputed from its token's identity
//   protocol_driver math            the real sessions; equal bits for every ring, number of ranks,
//                                   units and pullers
//   protocol_driver faults          absent ranks; then a reset and a complete group
//
// Prints one JSON object per part; exit status 1 when something is wrong.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cpu/explore/scenario.hpp"
#include "cpu/isa.hpp"
#include "cpu/kernel.hpp"
#include "cpu/session.hpp"
#include "cpu/sync.hpp"

using namespace megamoe;
using namespace megamoe::cpu;
using namespace megamoe::cpu::explore;

namespace {

constexpr double kLimit = 60;  // seconds; sanitizers are slow and cores few

class Clock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Memory {
    explicit Memory(const MoEShape& s) {
        const uint64_t bytes = make_window_layout(s).num_bytes;
        for (uint32_t r = 0; r < s.num_ranks; ++r) {
            windows.push_back(allocate_aligned(bytes));
            std::memset(windows.back().get(), 0, bytes);
            bases.push_back(windows.back().get());
        }
    }
    std::vector<AlignedBytes> windows;
    std::vector<uint8_t*> bases;
};

// ---------------------------------------------------------------- exact

// One rank: its roles are threads that live for all calls and meet between them, as the threads of
// a session's calls do when they are joined. Nothing holds the ranks together.
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
            const Context<CpuSync, IdentityMath> ctx{
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
    CpuSync sync_;
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
// num_ranks num_experts topk num_shared hidden inter is_fp8 max_tokens block_m ring_l1 ring_l2
// wave_blocks l2_lag l2_tile_n num_units num_pullers
constexpr ExactCase kExactCases[] = {
    {"1r_1u_1p", {1, 4, 2, 0, 128, 128, 0, 9, 2, 1, 1, 1, 1, 128, 1, 1}},
    {"2r_2u_1p_min", {2, 4, 2, 0, 256, 256, 0, 12, 2, 1, 1, 1, 1, 128, 2, 1}},
    {"2r_3u_2p_fp8", {2, 6, 3, 1, 256, 128, 1, 10, 4, 2, 3, 2, 2, 128, 3, 2}},
    {"4r_2u_2p_min", {4, 8, 2, 0, 128, 128, 0, 8, 4, 1, 1, 1, 1, 128, 2, 2}},
    {"4r_1u_1p_shared", {4, 8, 4, 2, 128, 256, 1, 6, 3, 1, 2, 1, 1, 64, 1, 1}},
    {"2r_2u_2p_wide", {2, 4, 2, 1, 128, 256, 0, 16, 2, 16, 16, 4, 6, 64, 2, 2}},
};

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
        std::vector<std::unique_ptr<ExactRank>> ranks;
        for (uint32_t r = 0; r < c.shape.num_ranks; ++r)
            ranks.push_back(std::make_unique<ExactRank>(scenario, memory, r));
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

// ---------------------------------------------------------------- real sessions

struct Token {
    std::vector<uint16_t> x;  // BF16 [H]
    std::vector<int32_t> idx;
    std::vector<float> weight;
};

uint16_t to_bf16(float v) { return uint16_t(std::bit_cast<uint32_t>(v) >> 16); }
float small_float(uint32_t key) { return float(int32_t(mix(key, 77) % 513) - 256) / 256.0F; }

// The weights of an expert, the same whatever rank holds it.
struct Expert {
    std::vector<uint8_t> w1, w2;
    std::vector<float> s1, s2;

    Expert(const MoEShape& s, uint32_t global) {
        const size_t n = size_t(s.inter) * s.hidden;
        auto fill = [&](std::vector<uint8_t>& w, size_t count, uint32_t salt) {
            w.resize(count * (s.is_fp8 ? 1 : 2));
            for (size_t i = 0; i < count; ++i) {
                const uint32_t h = mix(mix(global, salt), uint32_t(i));
                if (s.is_fp8) {
                    w[i] = uint8_t((h & 0x80) | (h >> 8) % 0x60);  // |w| < 32, no NaN
                } else {
                    const uint16_t v = to_bf16(small_float(h) / 8);
                    std::memcpy(&w[2 * i], &v, 2);
                }
            }
        };
        fill(w1, 2 * n, 1);
        fill(w2, n, 2);
        if (!s.is_fp8) return;
        for (size_t i = 0; i < 3 * n / kBlock / kBlock; ++i)
            (i < 2 * n / kBlock / kBlock ? s1 : s2)
                .push_back(0.002F + std::fabs(small_float(uint32_t(i) + global)) / 1000);
    }
    static constexpr size_t kBlock = 128;
};

class Group {
  public:
    Group(const MoEShape& s, double limit_s) : shape_(s), memory_(s) {
        for (uint32_t r = 0; r < s.num_ranks; ++r) {
            ranks_.push_back(
                std::make_unique<Session>(s, r, memory_.bases, INFINITY, limit_s, best_isa()));
            for (uint32_t e = 0; e < s.total_experts(); ++e) {
                const Expert x(s, IdentityMath::global_expert(s, r, e));
                ranks_[r]->load_expert(e, x.w1.data(), x.s1.data(), x.w2.data(), x.s2.data());
            }
        }
    }
    Session& session(uint32_t rank) { return *ranks_[rank]; }

    // Rank r gets the tokens from r/R to (r+1)/R of all, or none. y: [tokens][H]. Ranks of
    // `absent` do not take part. Returns whether each rank's call succeeded.
    std::vector<char> run(const std::vector<Token>& tokens, std::vector<uint16_t>& y,
                          uint32_t absent = 0) {
        const uint32_t h = shape_.hidden, k = shape_.topk;
        y.assign(tokens.size() * h, 0xFFFF);
        std::vector<char> ok(shape_.num_ranks, 0);
        std::vector<std::jthread> threads;
        for (uint32_t r = 0; r < shape_.num_ranks; ++r) {
            if (absent >> r & 1) continue;
            threads.emplace_back([&, r] {
                const size_t first = tokens.size() * r / shape_.num_ranks;
                const size_t last = tokens.size() * (r + 1) / shape_.num_ranks;
                std::vector<uint16_t> x;
                std::vector<int32_t> idx;
                std::vector<float> weight;
                for (size_t t = first; t < last; ++t) {
                    x.insert(x.end(), tokens[t].x.begin(), tokens[t].x.end());
                    idx.insert(idx.end(), tokens[t].idx.begin(), tokens[t].idx.begin() + k);
                    weight.insert(weight.end(), tokens[t].weight.begin(),
                                  tokens[t].weight.begin() + k);
                }
                ranks_[r]->stage_bf16(x.data(), uint32_t(last - first));
                ok[r] = ranks_[r]->run(uint32_t(last - first), idx.data(), weight.data(),
                                       reinterpret_cast<uint8_t*>(y.data() + first * h));
            });
        }
        threads.clear();
        return ok;
    }
    // What the host does on reset: all arrive, clear, and arrive again.
    bool reset() {
        std::atomic<bool> ok = true;
        {
            std::vector<std::jthread> threads;
            for (auto& rank : ranks_)
                threads.emplace_back([&] {
                    if (!rank->host_barrier(kLimit).empty()) ok = false;
                    rank->clear_state();
                    if (!rank->host_barrier(kLimit).empty()) ok = false;
                });
        }
        return ok;
    }

  private:
    MoEShape shape_;
    Memory memory_;
    std::vector<std::unique_ptr<Session>> ranks_;
};

std::vector<Token> draw_tokens(const MoEShape& s, uint32_t n, uint32_t seed) {
    std::vector<Token> tokens(n);
    for (uint32_t t = 0; t < n; ++t) {
        for (uint32_t i = 0; i < s.hidden; ++i)
            tokens[t].x.push_back(to_bf16(small_float(mix(mix(seed, t), i))));
        for (uint32_t k = 0; k < s.topk; ++k) {
            const uint32_t h = mix(mix(~seed, t), k);
            // A third to one hot expert, some masked, duplicates where they fall.
            tokens[t].idx.push_back(h % 3 == 0 ? 1 : h % 7 == 0 ? -1 : int32_t(h % s.num_experts));
            tokens[t].weight.push_back(0.1F + float(h % 10) / 10);
        }
    }
    return tokens;
}

MoEShape session_shape(uint32_t ranks, bool fp8, uint32_t ring, uint32_t units, uint32_t pullers) {
    const uint32_t wave = ring > 1 ? 2 : 1;
    return {ranks, 4,    2,    1,    256, 256, fp8 ? 1U : 0U, 24,
            2,     ring, ring, wave, 1,   128, units,         pullers};
}

int run_math_part() {
    const Clock clock;
    uint32_t groups = 0;
    for (bool fp8 : {true, false}) {
        const std::vector<Token> tokens = draw_tokens(session_shape(1, fp8, 1, 1, 1), 23, fp8);
        std::vector<uint16_t> want, y;
        Group(session_shape(1, fp8, 24, 1, 1), kLimit).run(tokens, want);
        size_t distinct = 0;
        for (size_t i = 1; i < want.size(); ++i) distinct += want[i] != want[i - 1];
        if (distinct < want.size() / 2) {
            std::printf("{\"part\": \"math\", \"wrong\": \"output looks constant\"}\n");
            return 1;
        }
        const MoEShape shapes[] = {
            session_shape(1, fp8, 1, 2, 1),
            session_shape(2, fp8, 1, 1, 2),
            session_shape(2, fp8, 3, 2, 1),
            session_shape(4, fp8, 1, 1, 1),
        };
        for (const MoEShape& s : shapes) {
            Group group(s, kLimit);
            ++groups;
            for (uint32_t call = 0; call < 2; ++call) {
                const std::vector<char> ok = group.run(tokens, y);
                size_t at = 0;
                while (at < y.size() && y[at] == want[at]) ++at;
                bool all = true;
                for (char rank_ok : ok) all = all && rank_ok;
                if (all && at == y.size()) continue;
                std::printf(
                    "{\"part\": \"math\", \"wrong\": \"fp8 %d, %u ranks, ring %u, units %u, "
                    "call %u: all ranks ok %d, word %zu is %04x, want %04x\"}\n",
                    fp8, s.num_ranks, s.ring_l1, s.num_units, call, all, at,
                    at < y.size() ? y[at] : 0, at < y.size() ? want[at] : 0);
                return 1;
            }
        }
    }
    std::printf("{\"part\": \"math\", \"isa\": \"%s\", \"groups\": %u, \"seconds\": %.1f}\n",
                isa_name(best_isa()), groups, clock.seconds());
    return 0;
}

// ---------------------------------------------------------------- faults

int run_faults() {
    const Clock clock;
    constexpr double kShort = 2;
    uint32_t records = 0;
    for (uint32_t ranks : {2U, 4U}) {
        const MoEShape s = session_shape(ranks, true, 1, 1, 1);
        const std::vector<Token> tokens = draw_tokens(s, 13, 5);
        Group group(s, kShort * 20);
        std::vector<uint16_t> want, y;
        group.run(tokens, want);
        // A group of its own with a short limit: its first call is complete, then one rank stays
        // away. Each survivor names a rank that it or a peer waited for.
        for (uint32_t missing : {0U, ranks - 1}) {
            Group faulty(s, kShort);
            for (uint32_t complete_calls = missing % 2; complete_calls > 0; --complete_calls)
                faulty.run(tokens, y);
            const uint32_t epoch = missing % 2 + 1;
            const std::vector<char> ok = faulty.run(tokens, y, 1U << missing);
            for (uint32_t r = 0; r < ranks; ++r) {
                if (r == missing) continue;
                const FaultRecord f = faulty.session(r).fault();
                ++records;
                if (!ok[r] && faulty.session(r).faulted() && f.valid == 1 && f.peer == missing &&
                    f.tag == uint32_t(Tag::kCountsFlag) && f.phase == uint32_t(Phase::kExchange) &&
                    f.epoch == epoch && f.want == epoch && f.have == epoch - 1 && f.rank != missing)
                    continue;
                std::printf(
                    "{\"part\": \"faults\", \"wrong\": \"%u ranks without %u: rank %u ok %d "
                    "valid %u peer %u tag %u phase %u epoch %u want %u have %u\"}\n",
                    ranks, missing, r, ok[r], f.valid, f.peer, f.tag, f.phase, f.epoch, f.want,
                    f.have);
                return 1;
            }
            if (!faulty.reset()) {
                std::printf("{\"part\": \"faults\", \"wrong\": \"reset did not complete\"}\n");
                return 1;
            }
            faulty.run(tokens, y);
            if (y != want) {
                std::printf("{\"part\": \"faults\", \"wrong\": \"other output after a reset\"}\n");
                return 1;
            }
        }
    }
    std::printf("{\"part\": \"faults\", \"records\": %u, \"seconds\": %.1f}\n", records,
                clock.seconds());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string_view part = argc > 1 ? argv[1] : "";
    if (part == "exact") return run_exact(argc > 2 ? std::atof(argv[2]) : 10);
    if (part == "math") return run_math_part();
    if (part == "faults") return run_faults();
    std::fprintf(stderr, "protocol_driver: exact [SECONDS], math or faults\n");
    return 2;
}
