// Route listing of the CUDA kernel and its order of experts, on the host: a thread per lane,
// collectives over a barrier per warp. PARTS is a file that holds flag_share of
// protocol.hpp, class RouteLister, publish_counts and order_experts of csrc/moe/dispatch.cuh and
// named_expert of csrc/moe/weights.cuh.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define MEGAMOE_DEVICE inline
#define MEGAMOE_HD inline

using std::min;

constexpr uint32_t kThreads = 96;  // the kernel has more
constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

struct Index {
    uint32_t x = 0;
};
struct uint2 {
    uint32_t x, y;
};
struct alignas(16) int4 {
    int32_t x, y, z, w;
};
thread_local Index threadIdx;
Index blockIdx, gridDim;

std::list<std::barrier<>> warp_barriers;
std::barrier<> cta_barrier(kThreads);
uint32_t lanes[(kThreads / 32)][32];

// What `look` makes of the values that the lanes of this warp have brought.
template <class Look>
uint32_t together(uint32_t value, Look look) {
    const uint32_t warp = threadIdx.x / 32;
    auto& barrier = *std::next(warp_barriers.begin(), warp);
    lanes[warp][threadIdx.x % 32] = value;
    barrier.arrive_and_wait();
    const uint32_t found = look(lanes[warp]);
    barrier.arrive_and_wait();
    return found;
}
uint32_t __ballot_sync(uint32_t, bool bit) {
    return together(bit, [](const uint32_t* v) {
        uint32_t all = 0;
        for (int i = 0; i < 32; ++i) all |= v[i] << i;
        return all;
    });
}
uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
    return together(value, [](const uint32_t* v) {
        uint32_t sum = 0;
        for (int i = 0; i < 32; ++i) sum += v[i];
        return sum;
    });
}
uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
    return together(value, [](const uint32_t* v) {
        uint32_t all = 0;
        for (int i = 0; i < 32; ++i) all |= v[i];
        return all;
    });
}
void __syncthreads() { cta_barrier.arrive_and_wait(); }
uint32_t __popc(uint32_t v) { return uint32_t(std::popcount(v)); }
uint32_t __ffs(uint32_t v) { return v ? uint32_t(std::countr_zero(v)) + 1 : 0; }

// The ids of a call begin at any word of a tensor.
std::vector<int32_t> tensor;
int32_t* ids;
uint32_t num_ids;
template <class T>
T __ldg(const T* at) {
    const auto* first = reinterpret_cast<const int32_t*>(at);
    const bool inside = first >= ids && reinterpret_cast<const int32_t*>(at + 1) <= ids + num_ids;
    if (inside && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0) return *at;
    std::printf("read %zu bytes at id %td of %u\n", sizeof(T), first - ids, num_ids);
    std::abort();
}

namespace ptx {
uint32_t lane() { return threadIdx.x % 32; }
void add_release_sys(uint32_t* word, uint32_t v) { *word += v; }
}  // namespace ptx

struct CallState {
    uint32_t epoch = 1;
};
struct SharedStorage {
    uint2 scan[2][(kThreads / 32)];
    uint32_t count[512];
    uint16_t order[512];
    CallState call;
};

constexpr uint32_t kUntouched = 0xA5A5A5A5;
struct Shape {
    uint32_t num_ranks, num_experts, topk;
    uint32_t local_experts() const { return num_experts / num_ranks; }
};
enum class Region { kCountsFlag };
// Of one rank: what it writes to each owner.
struct MoEParams {
    Shape shape;
    uint32_t num_tokens;
    const int32_t* topk_idx;
    uint32_t rank = 0;
    std::vector<uint32_t>*counts, *routes;
    std::vector<uint32_t>* flags;  // [rank] at each owner
    template <class T>
    T* ptr(uint32_t owner, Region, uint32_t rank) const {
        return flags[owner].data() + rank;
    }
    uint32_t* recv_count(uint32_t owner, uint32_t, uint32_t) const { return counts[owner].data(); }
    uint32_t* route(uint32_t owner, uint32_t, uint32_t) const { return routes[owner].data(); }
};

#include PARTS

std::mt19937 random_bits(11);
uint32_t below(uint32_t n) { return uint32_t(random_bits() % n); }

int compare(const char* what, uint32_t owner, const std::vector<uint32_t>& have,
            const std::vector<uint32_t>& want) {
    for (size_t i = 0; i < want.size(); ++i) {
        if (have[i] == want[i]) continue;
        std::printf("%s for owner %u: [%zu] is %u, must be %u\n", what, owner, i, have[i], want[i]);
        return 1;
    }
    return 0;
}

// The order that rank p.rank takes its experts in: those of its own tokens first, which it finds by
// its ids alone while these are few.
int check_order(MoEParams p, SharedStorage& s, const std::vector<uint32_t>& own) {
    const uint32_t experts = p.shape.local_experts(), n = p.num_tokens * p.shape.topk;
    std::vector<uint32_t> want, named;
    for (uint32_t e = 0; e < experts; ++e) {
        s.count[p.rank * experts + e] = own[e];
        if (own[e]) want.push_back(e);
        for (uint32_t i = 0; i < min(n, 256u); ++i) {
            if (ids[i] != int32_t(p.rank * experts + e)) continue;
            named.push_back(e);
            break;
        }
    }
    for (uint32_t e = 0; e < experts; ++e)
        if (!own[e]) want.push_back(e);
    named.push_back(kNoExpert);
    std::vector<uint32_t> found(32 * named.size());
    {
        std::vector<std::jthread> threads;
        for (uint32_t lane = 0; lane < 32; ++lane)
            threads.emplace_back([&, lane] {
                threadIdx.x = lane;
                order_experts(p, s);
                for (size_t i = 0; i < named.size(); ++i)
                    found[i * 32 + lane] = named_expert(p, uint32_t(i));
            });
    }
    std::vector<uint32_t> named_by_lane;
    for (uint32_t e : named) named_by_lane.insert(named_by_lane.end(), 32, e);
    return compare("order", p.rank, {s.order, s.order + experts}, want) +
           compare("named experts by lane", p.rank, found, named_by_lane);
}

int check_lists(Shape shape, uint32_t num_tokens, uint32_t num_ctas, uint32_t offset) {
    const uint32_t n = num_tokens * shape.topk, per_rank = shape.local_experts();
    tensor.resize(n + offset);
    ids = tensor.data() + offset;
    num_ids = n;
    const uint32_t routing = below(4);
    for (uint32_t i = 0; i < n; ++i) {
        int32_t& id = ids[i];
        id = int32_t(below(shape.num_experts));
        if (routing == 1 && below(3) == 0) id = -1;                       // masked
        if (routing == 2) id = int32_t(shape.num_experts - 1);            // all to one
        if (routing == 3 && below(2)) id = int32_t(below(2) * per_rank);  // hot
    }
    std::vector<std::vector<uint32_t>> counts(shape.num_ranks), routes(shape.num_ranks),
        flags(shape.num_ranks);
    for (auto& v : counts) v.assign(per_rank + 1, kUntouched);
    for (auto& v : routes) v.assign(n + 1, kUntouched);
    for (auto& v : flags) v.assign(shape.num_ranks, 0);
    const MoEParams p{shape, num_tokens, ids, 0, counts.data(), routes.data(), flags.data()};
    auto s = std::make_unique<SharedStorage>();
    gridDim.x = num_ctas;
    for (blockIdx.x = 0; blockIdx.x < num_ctas; ++blockIdx.x) {
        std::vector<std::jthread> threads;
        for (uint32_t i = 0; i < kThreads; ++i)
            threads.emplace_back([&, i] {
                threadIdx.x = i;
                RouteLister(p, *s).run();
                publish_counts(p, *s);
            });
    }
    int failures = 0;
    for (uint32_t owner = 0; owner < shape.num_ranks; ++owner) {
        std::vector<uint32_t> want_counts(per_rank + 1, kUntouched), want_routes;
        for (uint32_t e = 0; e < per_rank; ++e) {
            const size_t before = want_routes.size();
            for (uint32_t i = 0; i < n; ++i)
                if (ids[i] == int32_t(owner * per_rank + e)) want_routes.push_back(i);
            want_counts[e] = uint32_t(want_routes.size() - before);
        }
        want_routes.resize(n + 1, kUntouched);
        std::vector<uint32_t> want_flags(shape.num_ranks, 0);
        want_flags[0] = kWholeFlag;
        failures += compare("flags", owner, flags[owner], want_flags);
        failures += compare("counts", owner, counts[owner], want_counts);
        failures += compare("routes", owner, routes[owner], want_routes);
        MoEParams of_owner = p;
        of_owner.rank = owner;
        failures += check_order(of_owner, *s, want_counts);
    }
    if (failures)
        std::printf(
            "with %u ranks, %u experts, top %u, %u tokens, %u CTAs, routing %u, offset %u\n",
            shape.num_ranks, shape.num_experts, shape.topk, num_tokens, num_ctas, routing, offset);
    return failures;
}

int main() {
    for (uint32_t w = 0; w < (kThreads / 32); ++w) warp_barriers.emplace_back(32);
    int failures = check_lists({2, 4, 8}, 300, 2, 0);  // several rounds of loads
    failures += check_lists({2, 140, 6}, 20, 9, 0);    // more experts than lanes
    for (uint32_t i = 0; i < 20 && !failures; ++i) {
        const uint32_t ranks = 1u << below(3), tokens = i % 4 ? below(40) : below(400);
        failures += check_lists({ranks, ranks * (1 + below(12)), 1 + below(8)}, tokens,
                                1 + below(9), below(2) ? 0 : below(4));
    }
    if (!failures) std::printf("ok\n");
    return failures != 0;
}
