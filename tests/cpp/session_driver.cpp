// Real sessions of all ranks in one process, for the sanitizers (see protocol_driver.cpp).
//
//   session_driver equal    equal bits for every ring, number of ranks, units and pullers
//   session_driver faults   absent ranks; then a reset and a complete group
//
// Prints one JSON object; exit status 1 when something is wrong.
#include <bit>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "cpu/explore/identity_math.hpp"
#include "cpu/isa.hpp"
#include "cpu/session.hpp"
#include "driver.hpp"

using namespace megamoe;
using namespace megamoe::cpu;
using driver::Clock;
using driver::kLimit;
using driver::Memory;
using explore::IdentityMath;
using explore::mix;

namespace {

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
    return {ranks, 4,    2,    1,    256, 256, fp8 ? 1U : 0U, 24,     2,
            0,     ring, ring, wave, 1,   128, units,         pullers};
}

int run_equal() {
    const Clock clock;
    uint32_t groups = 0;
    for (bool fp8 : {true, false}) {
        const std::vector<Token> tokens = draw_tokens(session_shape(1, fp8, 1, 1, 1), 23, fp8);
        std::vector<uint16_t> want, y;
        Group(session_shape(1, fp8, 24, 1, 1), kLimit).run(tokens, want);
        size_t distinct = 0;
        for (size_t i = 1; i < want.size(); ++i) distinct += want[i] != want[i - 1];
        if (distinct < want.size() / 2) {
            std::printf("{\"part\": \"equal\", \"wrong\": \"output looks constant\"}\n");
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
                    "{\"part\": \"equal\", \"wrong\": \"fp8 %d, %u ranks, ring %u, units %u, "
                    "call %u: all ranks ok %d, word %zu is %04x, want %04x\"}\n",
                    fp8, s.num_ranks, s.ring_l1, s.num_units, call, all, at,
                    at < y.size() ? y[at] : 0, at < y.size() ? want[at] : 0);
                return 1;
            }
        }
    }
    std::printf("{\"part\": \"equal\", \"isa\": \"%s\", \"groups\": %u, \"seconds\": %.1f}\n",
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
    if (part == "equal") return run_equal();
    if (part == "faults") return run_faults();
    std::fprintf(stderr, "session_driver: equal or faults\n");
    return 2;
}
