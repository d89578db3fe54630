#include "cpu/explore/world.hpp"

#include <algorithm>
#include <cstdio>

#include "cpu/explore/access.hpp"

namespace megamoe::cpu::explore {

int64_t Footprint::races_with(const Footprint& other) const {
    for (const auto& [mine, theirs] : {std::pair{this, &other}, std::pair{&other, this}}) {
        for (const WordSet* set : {&theirs->read, &theirs->written, &theirs->waited})
            if (const int64_t word = mine->written.meets(*set); word >= 0) return word;
        for (const WordSet* set : {&mine->read, &mine->written})
            if (const int64_t word = set->meets(theirs->changed); word >= 0) return word;
    }
    return -1;
}

bool Footprint::undoes_guard_of(const Footprint& other) const {
    for (uint32_t i = 0; i < other.num_guards; ++i)
        if (other.guards[i].word == operation && !other.guards[i].holds_for(value)) return true;
    return false;
}

World::World(const Scenario& scenario, Bug bug)
    : scenario_(scenario),
      shape_(scenario.shape),
      bug_(bug),
      layout_(make_window_layout(shape_)),
      fibers_(shape_.num_ranks * scenario.roles_per_rank(), &World::body, this),
      footprint_(0) {
    if (fibers_.num_fibers() > 32) throw std::invalid_argument("World: at most 32 fibers");
    const RowSizes size(shape_, scenario.h_words);
    experts_at_ = 1 + shape_.max_tokens * shape_.y_row_bytes() / 4;
    out_at_ = experts_at_ + shape_.num_units * shape_.num_experts;
    begin_at_ = out_at_ + shape_.num_units * shape_.block_m * size.y_tile;
    own_words_ = begin_at_ + scenario.roles_per_rank() * shape_.num_ranks * shape_.local_experts();
    window_words_ = layout_.num_bytes / 4;
    own_at_ = window_words_ * shape_.num_ranks;
    deferred_at_ = own_at_ + own_words_ * shape_.num_ranks;
    arena_words_ = deferred_at_ + fibers_.num_fibers() * sizeof(Deferred) / 4;
    arena_.reset(new (std::align_val_t(4096)) uint32_t[arena_words_]());
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) {
        bases_.push_back(reinterpret_cast<uint8_t*>(arena_.get() + r * window_words_));
        const IdentityMath math(shape_, r, scenario.h_words, nullptr, nullptr);
        for (uint32_t c = 0; c < scenario.num_calls(); ++c)
            expected_.push_back(scenario.expected(math, c, r));
    }
    list_state(size);
    reset();
}

void World::add_state(uint32_t* word) {
    index_[size_t(word - arena_.get())] = int32_t(state_.size());
    state_.push_back(word);
}

void World::list_state(const RowSizes& size) {
    index_.assign(arena_words_, -1);
    for (uint32_t r = 0; r < shape_.num_ranks; ++r) {
        for (uint32_t i = 0; i < uint32_t(Region::kNumRegions); ++i) {
            const auto region = Region(i);
            if (region == Region::kHostBarrier || region == Region::kFault) continue;
            const Span& span = layout_[region];
            for (uint64_t e = 0; e < span.count; ++e) {
                auto* first = windows(r).ptr<uint32_t>(r, region, e);
                const uint64_t words = span.stride == kLineBytes ? 1 : span.stride / 4;
                const uint64_t step = region == Region::kControl ? kLineBytes / 4 : 1;
                for (uint64_t w = 0; w < words; w += step)
                    if (region != Region::kL2Ring || w % size.h_tile_stride < size.h_used)
                        add_state(first + w);
            }
        }
        // The upper half of the only 64-bit word.
        add_state(reinterpret_cast<uint32_t*>(&windows(r).control(r).block_base.value) + 1);
        for (uint32_t w = 0; w < own_words_; ++w) add_state(own(r) + w);
    }
    if (bug_ != Bug::kNone)
        for (uint64_t w = deferred_at_; w < arena_words_; ++w) add_state(arena_.get() + w);
    if (state_.size() % 2) state_.push_back(state_.back());
    gathered_.resize(state_.size() / 2);
    footprint_ = Footprint(state_.size());
}

void World::reset() {
    for (uint32_t* word : state_) *word = 0;
    violation_.clear();
    fibers_.reset();
    // All but the hosts begin with a wait for their host: that they get there is no step.
    for (uint32_t f = 0; f < fibers_.num_fibers(); ++f)
        if (f % scenario_.roles_per_rank() != 0) step(f, true);
}

void World::step(uint32_t fiber, bool merge) {
    footprint_.clear();
    committed_ = false;
    watch(this, arena_.get(), arena_words_ * 4);
    fibers_.step(fiber, merge);
    watch(nullptr, nullptr, 0);
}

void World::save(uint8_t* to) const {
    for (size_t i = 0; i < state_.size(); ++i) std::memcpy(to + 4 * i, state_[i], 4);
    fibers_.save(to + state_.size() * 4);
}

void World::restore(const uint8_t* from) {
    for (size_t i = 0; i < state_.size(); ++i) std::memcpy(state_[i], from + 4 * i, 4);
    fibers_.restore(from + state_.size() * 4);
}

uint64_t World::hash() {
    for (size_t i = 0; i < gathered_.size(); ++i)
        gathered_[i] = *state_[2 * i] | uint64_t(*state_[2 * i + 1]) << 32;
    return fibers_.hash(hash_words(gathered_.data(), gathered_.size(), 1));
}

// With one unit, the ticket and the grid barrier are touched by one fiber at a time. Operations on
// them count as plain accesses: if two steps could ever conflict on them, Search would say so.
bool World::is_private(const uint32_t* word) const {
    if (shape_.num_units > 1 || !in_window(word)) return false;
    const uint64_t rank = uint64_t(word - arena_.get()) / window_words_;
    const Control& control = windows(uint32_t(rank)).control(uint32_t(rank));
    return word == &control.ticket[0].value || word == &control.barrier.value;
}

void World::access(const void* address, size_t bytes, bool is_write) {
    const auto* first = reinterpret_cast<const uint32_t*>(uintptr_t(address) & ~uintptr_t(3));
    if (committed_) {
        fibers_.stop({Op::kAccess, first});
        // The next step begins here; World::step has reset committed_.
    }
    const auto* end = static_cast<const uint8_t*>(address) + bytes;
    for (const uint32_t* word = first; reinterpret_cast<const uint8_t*>(word) < end; ++word) {
        if (is_write && index_[size_t(word - arena_.get())] < 0 && violation_.empty())
            violation_ = "the explorer is wrong: write outside of the state: " + word_name(word);
        note(is_write ? footprint_.written : footprint_.read, word);
    }
}

uint32_t World::load(uint32_t* word) {
    access(word, 4, false);
    return *word;
}

void World::store(uint32_t* word, uint32_t value) {
    if (is_private(word)) {
        access(word, 4, true);
        *word = value;
        return;
    }
    if (committed_) fibers_.stop({Op::kStore, word});
    *word = value;
    note(footprint_.changed, word);
    footprint_.operation = word;
    footprint_.value = value;
    committed_ = true;
}

uint32_t World::add(uint32_t* word, uint32_t value) {
    if (is_private(word)) {
        access(word, 4, true);
        return (*word += value) - value;
    }
    if (committed_) fibers_.stop({Op::kAdd, word});
    const uint32_t before = *word;
    *word = before + value;
    note(footprint_.changed, word);
    footprint_.operation = word;
    footprint_.value = *word;
    committed_ = true;
    return before;
}

void World::wait(const Pending& guard) {
    if (committed_ || !guard.holds()) fibers_.stop(guard);
    if (footprint_.num_guards == Footprint::kMaxGuards)
        throw std::length_error("World: too many waits in one step");
    footprint_.guards[footprint_.num_guards++] = guard;
    note(footprint_.waited, guard.word);
}

void World::wrong_output(uint32_t rank, uint32_t call, size_t word, uint32_t have, uint32_t want) {
    if (!violation_.empty()) return;
    char text[128];
    std::snprintf(text, sizeof text, "output of rank %u, call %u, token %zu: %08x, want %08x", rank,
                  call, word / (shape_.y_row_bytes() / 4), have, want);
    violation_ = text;
}

Region World::region_of(const uint32_t* word) const {
    if (!in_window(word)) return Region::kNumRegions;
    const uint64_t offset = uint64_t(word - arena_.get()) % window_words_ * 4;
    uint32_t region = 0;
    while (region + 1 < uint32_t(Region::kNumRegions) && layout_.span[region + 1].offset <= offset)
        ++region;
    return Region(region);
}

std::string World::fiber_name(uint32_t fiber) const {
    const uint32_t roles = scenario_.roles_per_rank(), role = fiber % roles;
    const std::string rank = "rank " + std::to_string(fiber / roles);
    if (role < shape_.num_units) return rank + " math " + std::to_string(role);
    if (role + 1 < roles) return rank + " dispatch " + std::to_string(role - shape_.num_units);
    return rank + " combine";
}

std::string World::describe(const Pending& p) const {
    constexpr const char* kOps[] = {"start", "access", "store", "add", "wait ==", "wait >="};
    std::string text = kOps[uint32_t(p.op)];
    if (p.is_wait())
        text.append(" ")
            .append(std::to_string(p.want))
            .append(", have ")
            .append(std::to_string(*p.word))
            .append(",");
    return p.word ? text.append(" ").append(word_name(p.word)) : text;
}

std::string World::word_name(const uint32_t* word) const {
    constexpr const char* kRegions[] = {
#define X(id, text) text,
        MEGAMOE_REGIONS(X)
#undef X
    };
    constexpr const char* kControl[] = {"abort",  "fault_claim",       "epoch", "barrier",
                                        "ticket", "ticket (stream 1)", "exits", "block_base"};
    const auto at = uint64_t(word - arena_.get());
    if (!in_window(word)) {
        const uint64_t rank = (at - own_at_) / own_words_;
        return "host memory " + std::to_string((at - own_at_) % own_words_) + " of rank " +
               std::to_string(rank);
    }
    const Region region = region_of(word);
    const Span& span = layout_[region];
    const uint64_t offset = at % window_words_ * 4 - span.offset;
    const std::string rank = " of rank " + std::to_string(at / window_words_);
    if (region == Region::kControl) return kControl[offset / kLineBytes] + rank;
    return std::string(kRegions[uint32_t(region)]) + "[" +
           std::to_string(span.stride ? offset / span.stride : 0) + "]" + rank;
}

}  // namespace megamoe::cpu::explore
