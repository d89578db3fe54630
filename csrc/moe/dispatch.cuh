// Dispatch: list the routes for their owners, tell every peer, learn what this rank will get.
#pragma once

#include "moe/shared.cuh"

namespace megamoe::moe {

// The walks of schedule.hpp take shared experts first, then those that own tokens go to, then the
// others. So this rank knows the first ones before it has heard from its peers.
MEGAMOE_DEVICE uint32_t expert_at(const MoEParams& p, const SharedStorage& s, uint32_t order) {
    const uint32_t shared = p.shape.num_shared;
    return order < shared ? p.shape.local_experts() + order : s.order[order - shared];
}

// Routes are listed without atomics and without a barrier between counting and writing: each CTA
// has some experts to itself, and reads all ids for them. Position in the owner's list = routes to
// the owner's earlier experts + earlier routes to this one. Each warp has a contiguous part of the
// ids, kBatch experts are looked for at once, and kAhead loads of four ids are in flight.
class RouteLister {
  public:
    MEGAMOE_DEVICE RouteLister(const MoEParams& p, SharedStorage& s)
        : p_(p), s_(s), num_ids_(p.num_tokens * p.shape.topk) {
        const uint32_t part = ceil_div(ceil_div(num_ids_, kAtOnce), kWarps) * kAtOnce;
        begin_ = threadIdx.x / 32 * part;
        end_ = min(begin_ + part, num_ids_);
        by_four_ = reinterpret_cast<uintptr_t>(p.topk_idx) % 16 == 0;
    }

    MEGAMOE_DEVICE void run() {
        for (uint32_t e = blockIdx.x; e < p_.shape.num_experts; e += kBatch * gridDim.x) list(e);
    }

  private:
    static constexpr uint32_t kWarps = kThreads / 32, kBatch = 2, kAhead = 4;
    // Ids that a load brings; that a warp looks at between two waits.
    static constexpr uint32_t kWords = 4, kAtOnce = kAhead * 32 * kWords;

    // Experts first, first + gridDim.x, …
    MEGAMOE_DEVICE void list(uint32_t first) {
        const uint32_t per_rank = p_.shape.local_experts();
        const uint32_t warp = threadIdx.x / 32, lane = ptx::lane();
        int32_t wanted[kBatch], owned[kBatch];  // the expert, and its owner's first
        uint32_t earlier[kBatch] = {}, mine[kBatch] = {};
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
            wanted[b] = int32_t(first + b * gridDim.x);
            owned[b] = wanted[b] / int32_t(per_rank) * int32_t(per_rank);
        }
        for (uint32_t i = begin_; i < end_; i += kAtOnce) {
            int32_t id[kAhead][kWords];
            load(id, i);
#pragma unroll
            for (uint32_t u = 0; u < kAhead; ++u)
#pragma unroll
                for (uint32_t w = 0; w < kWords; ++w)
#pragma unroll
                    for (uint32_t b = 0; b < kBatch; ++b) {
                        earlier[b] += id[u][w] >= owned[b] && id[u][w] < wanted[b];
                        mine[b] += id[u][w] == wanted[b];
                    }
        }
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
            earlier[b] = __reduce_add_sync(~0u, earlier[b]);
            mine[b] = __reduce_add_sync(~0u, mine[b]);
            if (lane == 0) s_.scan[b][warp] = {earlier[b], mine[b]};
        }
        __syncthreads();
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
            if (uint32_t(wanted[b]) >= p_.shape.num_experts) continue;
            uint32_t at = 0, count = 0;
            for (uint32_t w = 0; w < kWarps; ++w) {
                const uint2 v = s_.scan[b][w];
                at += v.x + (w < warp ? v.y : 0);
                count += v.y;
            }
            write(uint32_t(wanted[b]), at, count, mine[b]);
        }
        __syncthreads();  // before the next batch's sums
    }
    // The count, by one thread, and this warp's `mine` entries from position `at` on.
    MEGAMOE_DEVICE void write(uint32_t expert, uint32_t at, uint32_t count, uint32_t mine) {
        const uint32_t owner = expert / p_.shape.local_experts(), parity = s_.call.epoch & 1;
        if (threadIdx.x == 0)
            p_.recv_count(owner, parity, p_.rank)[expert % p_.shape.local_experts()] = count;
        uint32_t* list = p_.route(owner, parity, p_.rank);
        const uint32_t last = at + mine;
        for (uint32_t i = begin_; at < last; i += kAtOnce) {
            int32_t id[kAhead][kWords];
            load(id, i);
#pragma unroll
            for (uint32_t u = 0; u < kAhead; ++u) {
                // Of lower lanes, whose ids come before this one's; of all lanes.
                uint32_t before = 0, hits = 0;
#pragma unroll
                for (uint32_t w = 0; w < kWords; ++w) {
                    const uint32_t found = __ballot_sync(~0u, id[u][w] == int32_t(expert));
                    before += __popc(found & ((1u << ptx::lane()) - 1));
                    hits += __popc(found);
                }
                uint32_t* to = list + at + before;
#pragma unroll
                for (uint32_t w = 0; w < kWords; ++w)
                    if (id[u][w] == int32_t(expert)) *to++ = index(i, u) + w;
                at += hits;
            }
        }
    }
    // Of this lane's first id of load u.
    MEGAMOE_DEVICE static uint32_t index(uint32_t first, uint32_t u) {
        return first + (u * 32 + ptx::lane()) * kWords;
    }
    MEGAMOE_DEVICE void load(int32_t (&id)[kAhead][kWords], uint32_t first) {
#pragma unroll
        for (uint32_t u = 0; u < kAhead; ++u) {
            const uint32_t i = index(first, u);
            if (by_four_ && i + kWords <= end_) {
                const int4 v = __ldg(reinterpret_cast<const int4*>(p_.topk_idx + i));
                id[u][0] = v.x, id[u][1] = v.y, id[u][2] = v.z, id[u][3] = v.w;
            } else {
#pragma unroll
                for (uint32_t w = 0; w < kWords; ++w)
                    id[u][w] = i + w < end_ ? __ldg(p_.topk_idx + i + w) : -1;
            }
        }
    }

    const MoEParams& p_;
    SharedStorage& s_;
    uint32_t num_ids_, begin_, end_;
    bool by_four_;  // the caller's ids may be a part of a tensor
};

// Tells every peer that this CTA's lists are there. Hand-offs 2 and 3.
MEGAMOE_DEVICE void publish_counts(const MoEParams& p, SharedStorage& s) {
    __syncthreads();
    const uint32_t share = flag_share(blockIdx.x, gridDim.x);
    for (uint32_t i = threadIdx.x; i < p.shape.num_ranks; i += kThreads) {
        const uint32_t peer = (p.rank + i) % p.shape.num_ranks;
        ptx::add_release_sys(p.ptr<uint32_t>(peer, Region::kCountsFlag, p.rank), share);
    }
}

// The order of the routed experts, by the own rank's counts. One warp.
MEGAMOE_DEVICE void order_experts(const MoEParams& p, SharedStorage& s) {
    const uint32_t experts = p.shape.local_experts(), lane = ptx::lane();
    const uint32_t* own = s.count + p.rank * experts;
    uint32_t at = 0;
#pragma unroll 1
    for (uint32_t wanted = 0; wanted < 2; ++wanted)
#pragma unroll 1
        for (uint32_t e0 = 0; e0 < experts; e0 += 32) {
            const uint32_t e = e0 + lane;
            const bool take = e < experts && (own[e] == 0) == wanted;
            const uint32_t taken = __ballot_sync(~0u, take);
            if (take) s.order[at + __popc(taken & ((1u << lane) - 1))] = e;
            at += __popc(taken);
        }
}

// Of a local expert, from all ranks.
MEGAMOE_DEVICE uint32_t count_rows(const MoEParams& p, const SharedStorage& s, uint32_t expert) {
    const uint32_t experts = p.shape.local_experts();
    if (expert >= experts) return p.num_tokens;  // shared
    uint32_t rows = 0;
    for (uint32_t r = 0; r < p.shape.num_ranks; ++r) rows += s.count[r * experts + expert];
    return rows;
}

// Rows and blocks before each expert, in the order of the walks. One warp.
MEGAMOE_DEVICE void index_rows(const MoEParams& p, SharedStorage& s) {
    const uint32_t experts = p.shape.total_experts(), lane = ptx::lane();
    uint32_t rows = 0, blocks = 0;
    for (uint32_t i0 = 0; i0 < experts; i0 += 32) {
        const uint32_t i = i0 + lane;
        const uint32_t n = i < experts ? count_rows(p, s, expert_at(p, s, i)) : 0;
        const uint32_t b = n ? ExpertBlocks(p.shape, n).count() : 0;
        uint32_t n_sum = n, b_sum = b;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const uint32_t nv = __shfl_up_sync(~0u, n_sum, o), bv = __shfl_up_sync(~0u, b_sum, o);
            if (lane >= o) {
                n_sum += nv;
                b_sum += bv;
            }
        }
        if (i < experts) {
            s.row_begin[i] = rows + n_sum - n;
            s.block_begin[i] = blocks + b_sum - b;
        }
        rows += __shfl_sync(~0u, n_sum, 31);
        blocks += __shfl_sync(~0u, b_sum, 31);
    }
    if (lane == 0) {
        s.row_begin[experts] = rows;
        s.block_begin[experts] = s.call.num_blocks = blocks;
    }
}

// The ring slots of a block of the call.
MEGAMOE_DEVICE L1Slot l1_slot_of(const MoEParams& p, const CallState& call, uint32_t block) {
    return l1_slot(p.shape, ring_position(call.l1_base, block, p.shape.ring_l1));
}
MEGAMOE_DEVICE L2Slot l2_slot_of(const MoEParams& p, const CallState& call, uint32_t block) {
    return l2_slot(p.shape, ring_position(call.l2_base, block, p.shape.ring_l2));
}

// Every CTA waits for every peer's counts and indexes them. False when the call is given up.
MEGAMOE_DEVICE bool receive_counts(const MoEParams& p, SharedStorage& s) {
    const uint32_t ranks = p.shape.num_ranks, per_rank = p.shape.local_experts();
    const uint32_t warp = threadIdx.x / 32, lane = ptx::lane();
    if (threadIdx.x == kThreads - 1) {  // a thread that waits for few counts, if any
        s.call.l1_base = ring_position(s.call.block_base, p.shape.ring_l1);
        s.call.l2_base = ring_position(s.call.block_base, p.shape.ring_l2);
    }
    for (uint32_t r = threadIdx.x; r < ranks; r += kThreads) {
        wait_word<Compare::kReached, Scope::kSystem>(
            p, s.call, p.word(Region::kCountsFlag, r), s.call.epoch * kWholeFlag,
            {Role::kDispatch, Phase::kExchange, Tag::kCountsFlag, blockIdx.x, r, r});
    }
    __syncthreads();
    if (stopped(s.call)) return false;
    const uint32_t* counts = p.recv_count(p.rank, s.call.epoch & 1, 0);
    for (uint32_t i = threadIdx.x; i < ranks * per_rank; i += kThreads)
        s.count[i] = __ldcg(counts + i);
    __syncthreads();
    for (uint32_t r = warp; r < ranks; r += kThreads / 32) {  // begin[r][e]: exclusive scan over e
        uint32_t sum = 0;
        for (uint32_t e0 = 0; e0 < per_rank; e0 += 32) {
            const uint32_t e = e0 + lane, n = e < per_rank ? s.count[r * per_rank + e] : 0;
            uint32_t up = n;
#pragma unroll
            for (int o = 1; o < 32; o <<= 1) {
                const uint32_t v = __shfl_up_sync(~0u, up, o);
                if (lane >= o) up += v;
            }
            if (e < per_rank) s.begin[r * per_rank + e] = sum + up - n;
            sum += __shfl_sync(~0u, up, 31);
        }
    }
    if (warp == kThreads / 32 - 1) order_experts(p, s);
    __syncthreads();
    if (warp == 0) index_rows(p, s);
    __syncthreads();
    return true;
}

// Of the expert at `order` in the walks.
MEGAMOE_DEVICE ExpertBlocks blocks_of(const MoEParams& p, const SharedStorage& s, uint32_t order) {
    return ExpertBlocks(p.shape, s.row_begin[order + 1] - s.row_begin[order]);
}

// The source of a row of a local expert.
MEGAMOE_DEVICE RowSource row_source(const MoEParams& p, SharedStorage& s, uint32_t expert,
                                    uint32_t row) {
    const RouteTable table(p.shape, p.rank, p.num_tokens, s.count, s.begin);
    return table.source(expert, row,
                        [&](uint32_t peer) { return p.route(p.rank, s.call.epoch & 1, peer); });
}

// The expert, in the order of the walks, that `i` belongs to: begin[found] <= i < begin[found + 1].
MEGAMOE_DEVICE uint32_t expert_of(const MoEParams& p, const uint32_t* begin, uint32_t i) {
    uint32_t low = 0, high = p.shape.total_experts();
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (begin[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    return low;
}

}  // namespace megamoe::moe
