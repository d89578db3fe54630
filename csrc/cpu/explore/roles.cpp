// What the fibers run: the production roles with a cooperative sync policy and the exact math.
//
// This file is compiled with -fsanitize=thread (see access.cpp), so that the World sees the plain
// accesses of the protocol's headers. Nothing else of the explorer is.
#include "cpu/explore/world.hpp"
#include "cpu/kernel.hpp"

namespace megamoe::cpu::explore {
namespace {

void defer(World& world, const uint32_t* word, uint32_t value) {
    Deferred& deferred = world.deferred();
    if (deferred.count == Deferred::kMax) throw std::length_error("too many deferred writes");
    deferred.write[deferred.count++] = {uint32_t(word - world.arena()), value};
}
void flush(World& world) {
    Deferred& deferred = world.deferred();
    for (uint32_t i = 0; i < deferred.count; ++i)
        world.arena()[deferred.write[i].word] = deferred.write[i].value;
    deferred.count = 0;
}

// The sync policy of fibers. A planted bug that drops, weakens or moves an operation is here.
class CooperativeSync {
  public:
    explicit CooperativeSync(World& world) : world_(world) {}

    uint32_t load(uint32_t* word) { return world_.load(word); }
    void store(uint32_t* word, uint32_t value) {
        if (world_.has_bug(Bug::kArrivedKept, Region::kTokenArrived, word)) return;
        if (world_.has_bug(Bug::kArrivedResetLate, Region::kTokenArrived, word))
            return defer(world_, word, value);
        world_.store(word, value);
    }
    uint32_t add(uint32_t* word, uint32_t value) {
        const uint32_t before = world_.add(word, value);
        if (world_.has_bug(Bug::kL1PublishedEarly, Region::kL1Full, word) ||
            world_.has_bug(Bug::kL2PublishedEarly, Region::kL2Full, word))
            flush(world_);
        return before;
    }
    bool wait_equal(uint32_t* word, uint32_t want, const Wait& wait) {
        return wait_for({Op::kWaitEqual, word, want}, wait);
    }
    bool wait_reached(uint32_t* word, uint32_t want, const Wait& wait) {
        return wait_for({Op::kWaitReached, word, want}, wait);
    }
    void observe_pulled() {}
    void observe_consumed() {}
    void observe_produced() {}
    void observe_retired() {}
    struct NoStretch {};
    NoStretch stretch(uint32_t, TraceRole, TraceKind, uint32_t = 0, uint32_t = 0, uint32_t = 0) {
        return {};
    }

  private:
    bool wait_for(Pending guard, const Wait& wait) {
        auto planted = [&](Bug bug, Tag tag) { return world_.bug() == bug && wait.tag == tag; };
        if (planted(Bug::kNoL1EmptyWait, Tag::kL1Empty) ||
            planted(Bug::kNoL2EmptyWait, Tag::kL2Empty) ||
            planted(Bug::kNoL1FullWait, Tag::kL1Full) ||
            planted(Bug::kNoL2FullWait, Tag::kL2Full) ||
            (planted(Bug::kNoCountsWait, Tag::kCountsFlag) && wait.role == Role::kDispatch) ||
            (planted(Bug::kOneBarrier, Tag::kGridBarrier) && wait.index == 1))
            return true;
        if (planted(Bug::kFlagByEquality, Tag::kCountsFlag)) guard.op = Op::kWaitEqual;
        if (planted(Bug::kCombineEarly, Tag::kTokenArrived) && guard.want > 1)
            guard = {Op::kWaitReached, guard.word, 1};
        world_.wait(guard);
        if (planted(Bug::kArrivedResetLate, Tag::kCountsFlag) && wait.role == Role::kCombine)
            flush(world_);
        return true;
    }

    World& world_;
};

// The exact math. Planted bugs hold back what should lie in a ring before it is published.
class PlantedMath : public IdentityMath {
  public:
    PlantedMath(World& world, uint32_t rank)
        : IdentityMath(world.scenario().shape, rank, world.scenario().h_words,
                       world.expert_scratch(rank), world.out_scratch(rank)),
          world_(world) {}

    void pull(const uint8_t* x, const uint8_t* x_scale, uint8_t* to, uint8_t* to_scale) const {
        auto* word = reinterpret_cast<uint32_t*>(to);
        const uint32_t before = *word;
        IdentityMath::pull(x, x_scale, to, to_scale);
        hold_back(Bug::kL1PublishedEarly, word, before);
    }
    void linear1(uint32_t unit, const Tile& tile, const uint8_t* x, const uint8_t* x_scale,
                 uint8_t* h, uint8_t* h_scale) const {
        const MoEShape& s = world_.scenario().shape;
        auto* word = reinterpret_cast<uint32_t*>(h) + tile.n * s.h_row_bytes() / 4 / s.l1_tiles();
        const uint32_t before = *word;
        IdentityMath::linear1(unit, tile, x, x_scale, h, h_scale);
        hold_back(Bug::kL2PublishedEarly, word, before);
    }

  private:
    void hold_back(Bug bug, uint32_t* word, uint32_t before) const {
        if (world_.bug() != bug) return;
        defer(world_, word, *word);
        *word = before;
    }
    World& world_;
};

using ProductionContext = Context<CooperativeSync, PlantedMath>;

// A function of its own per kind of context, and roles in functions of their own: frames that are
// live at a stop are saved and hashed with every state.
template <class C>
[[gnu::noinline]] void run_call_as(World& world, uint32_t rank, uint32_t role, uint32_t call) {
    const MoEShape& s = world.scenario().shape;
    const RankInput& in = world.scenario().calls[call][rank];
    CooperativeSync sync(world);
    PlantedMath math(world, rank);
    const C ctx{{s,
                 world.windows(rank),
                 sync,
                 math,
                 {in.num_tokens, in.topk_idx.data(), in.topk_weight.data(),
                  reinterpret_cast<uint8_t*>(world.y(rank))}}};
    uint32_t* begin = world.begin_scratch(rank, role);
    if (role < s.num_units)
        run_math(ctx, role, begin);
    else if (role < s.num_units + s.num_pullers)
        run_dispatch(ctx, role - s.num_units, begin);
    else
        run_combine(ctx, begin);
}

void run_call(World& world, uint32_t rank, uint32_t role, uint32_t call) {
    switch (world.bug()) {
        case Bug::kOneParity:
            return run_call_as<OneParity<ProductionContext>>(world, rank, role, call);
        case Bug::kBlockBaseKept:
            return run_call_as<KeptBlockBase<ProductionContext>>(world, rank, role, call);
        case Bug::kLinear2First:
            return run_call_as<Linear2First<ProductionContext>>(world, rank, role, call);
        case Bug::kTicketsIgnoreRing:
            return run_call_as<TicketsIgnoreRing<ProductionContext>>(world, rank, role, call);
        default:
            return run_call_as<AsProduced<ProductionContext>>(world, rank, role, call);
    }
}

// What the host does between calls: poisoned output, new tokens.
void stage(World& world, uint32_t rank, uint32_t call) {
    const MoEShape& s = world.scenario().shape;
    uint32_t* y = world.y(rank);
    for (uint32_t i = 0; i < s.max_tokens * s.y_row_bytes() / 4; ++i) y[i] = 0xA5A5A5A5;
    PlantedMath(world, rank)
        .stage(world.windows(rank), call, world.scenario().calls[call][rank].num_tokens);
}

void check(World& world, uint32_t rank, uint32_t call) {
    const std::vector<uint32_t>& want = world.expected(rank, call);
    for (size_t i = 0; i < want.size(); ++i) {
        const uint32_t have = world.y(rank)[i];
        if (have != want[i]) world.wrong_output(rank, call, i, have, want[i]);
    }
}

}  // namespace

// The calls of one role, one after another. Unit 0 is the host too: it starts a call when all roles
// of its rank have left the one before.
void World::run_fiber(uint32_t fiber) {
    const uint32_t roles = scenario_.roles_per_rank();
    const uint32_t rank = fiber / roles, role = fiber % roles;
    const uint32_t* epoch = &windows(rank).control(rank).epoch.value;
    for (uint32_t call = 0; call < scenario_.num_calls(); ++call) {
        if (role == 0) {
            wait({Op::kWaitReached, epoch, call});
            if (call > 0) check(*this, rank, call - 1);
            stage(*this, rank, call);
            store(started(rank), call + 1);
        } else {
            wait({Op::kWaitReached, started(rank), call + 1});
        }
        run_call(*this, rank, role, call);
    }
    if (role != 0) return;
    wait({Op::kWaitReached, epoch, scenario_.num_calls()});
    check(*this, rank, scenario_.num_calls() - 1);
}

}  // namespace megamoe::cpu::explore
