// Combine: the source rank sums a token's slots as soon as all of them have arrived.
#pragma once

#include "cpu/context.hpp"

namespace megamoe::cpu {

// Tokens in order. This role holds no ticket, so waiting here stops no tile. Hand-offs 8 and 9.
template <class C>
bool combine(C& ctx) {
    const MoEShape& s = ctx.shape;
    const auto traced =
        ctx.sync.stretch(0, TraceRole::kCombine, TraceKind::kCombine, 0, ctx.call.num_tokens);
    for (uint32_t token = 0; token < ctx.call.num_tokens; ++token) {
        const int32_t* idx = ctx.call.topk_idx + uint64_t(token) * s.topk;
        uint32_t routes = s.num_shared;
        for (uint32_t k = 0; k < s.topk; ++k) routes += idx[k] >= 0;

        uint32_t* arrived = ctx.word(Region::kTokenArrived, token);
        if (!ctx.sync.wait_equal(
                arrived, routes,
                {Role::kCombine, Phase::kReduce, Tag::kTokenArrived, 0, ctx.rank(), token}))
            return false;
        ctx.math.reduce(token, idx, ctx.call.topk_weight + uint64_t(token) * s.topk, ctx.windows,
                        ctx.call.y + uint64_t(token) * s.y_row_bytes());
        ctx.sync.store(arrived, 0);
    }
    return true;
}

}  // namespace megamoe::cpu
