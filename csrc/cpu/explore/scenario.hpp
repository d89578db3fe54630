// What a group is asked to do over several calls: a shape, and every rank's tokens and routes.
#pragma once

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/explore/identity_math.hpp"

namespace megamoe::cpu::explore {

struct RankInput {
    uint32_t num_tokens = 0;
    std::vector<int32_t> topk_idx;   // [T, K]
    std::vector<float> topk_weight;  // [T, K]
};

struct Scenario {
    std::string name;
    MoEShape shape{};
    uint32_t h_words = 1;                       // words of a Linear 1 tile that carry data
    std::vector<std::vector<RankInput>> calls;  // [call][rank]

    uint32_t num_calls() const { return uint32_t(calls.size()); }
    uint32_t roles_per_rank() const { return shape.num_units + shape.num_pullers + 1; }
    // y of a rank, [T][y_row_bytes / 4] words.
    std::vector<uint32_t> expected(const IdentityMath& math, uint32_t call, uint32_t rank) const {
        const RankInput& in = calls[call][rank];
        const uint32_t row = shape.y_row_bytes() / 4;
        std::vector<uint32_t> y(size_t(in.num_tokens) * row);
        for (uint32_t t = 0; t < in.num_tokens; ++t)
            math.expect(call, t, in.topk_idx.data() + size_t(t) * shape.topk,
                        in.topk_weight.data() + size_t(t) * shape.topk, y.data() + size_t(t) * row);
        return y;
    }
};

inline float slot_weight(uint32_t rank, uint32_t call, uint32_t i) {
    return 0.25F + float(mix(mix(rank, call), i) % 64) / 64.0F;
}

// The rank's tokens, all of them with the given routes, [T * K].
inline RankInput make_input(const MoEShape& s, uint32_t rank, uint32_t call,
                            std::vector<int32_t> topk_idx) {
    RankInput in;
    in.num_tokens = uint32_t(topk_idx.size()) / s.topk;
    if (in.num_tokens * s.topk != topk_idx.size() || in.num_tokens > s.max_tokens)
        throw std::invalid_argument("make_input: routes are [T, K] with T <= max_tokens");
    in.topk_idx = std::move(topk_idx);
    for (uint32_t i = 0; i < in.topk_idx.size(); ++i)
        in.topk_weight.push_back(slot_weight(rank, call, i));
    return in;
}

// How routes are drawn: the worst skews, and everything at once.
enum class Routing { kUniform, kAllToOne, kOwn, kOneRankTalks, kMixed };
inline constexpr Routing kAllRoutings[] = {Routing::kUniform, Routing::kAllToOne, Routing::kOwn,
                                           Routing::kOneRankTalks, Routing::kMixed};
inline const char* routing_name(Routing r) {
    constexpr const char* kNames[] = {"uniform", "all_to_one", "own", "one_rank_talks", "mixed"};
    return kNames[int(r)];
}

// kMixed has masked and duplicate routes; except for kUniform the ranks' tokens are unequal and may
// be none.
inline RankInput draw_input(const MoEShape& s, uint32_t rank, uint32_t call, Routing routing,
                            std::mt19937& rng) {
    auto below = [&](uint32_t n) { return uint32_t(rng() % n); };
    uint32_t tokens = routing == Routing::kUniform ? s.max_tokens : below(s.max_tokens + 1);
    if (routing == Routing::kOneRankTalks)
        tokens = rank == call % s.num_ranks ? s.max_tokens : below(2);
    const uint32_t hot = call % s.num_experts;
    std::vector<int32_t> idx(size_t(tokens) * s.topk);
    for (size_t i = 0; i < idx.size(); ++i) {
        switch (routing) {
            case Routing::kAllToOne:
                idx[i] = int32_t(hot);
                break;
            case Routing::kOwn:
                idx[i] = int32_t(rank * s.local_experts() + below(s.local_experts()));
                break;
            case Routing::kMixed:
                if (i % s.topk != 0 && below(4) == 0)
                    idx[i] = idx[i - 1];
                else
                    idx[i] = below(4) == 0 ? -1 : int32_t(below(s.num_experts));
                break;
            default:
                idx[i] = int32_t(below(s.num_experts));
        }
    }
    return make_input(s, rank, call, std::move(idx));
}

// Calls of all routings in turn, starting with `first`.
inline Scenario draw_scenario(const std::string& name, const MoEShape& shape, uint32_t num_calls,
                              uint32_t first, uint32_t seed) {
    std::mt19937 rng(seed);
    Scenario scenario{name, shape, 1, {}};
    for (uint32_t c = 0; c < num_calls; ++c) {
        const Routing routing = kAllRoutings[(first + c) % std::size(kAllRoutings)];
        auto& ranks = scenario.calls.emplace_back();
        for (uint32_t r = 0; r < shape.num_ranks; ++r)
            ranks.push_back(draw_input(shape, r, c, routing, rng));
    }
    return scenario;
}

}  // namespace megamoe::cpu::explore
