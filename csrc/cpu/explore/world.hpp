// A whole group in one thread: every rank's window, and every role of every rank as a fiber.
//
// Steps. A fiber's step is: waits that hold, plain accesses, then at most one operation (a store
// or an addition). It ends
//   - before a wait that does not hold, or one that follows the operation;
//   - after the operation, before the next plain access or operation.
// So an acquire comes first, a release last, and the plain accesses behind a release belong to the
// next step: a flag raised before its data is seen as such. Cutting executions into such steps
// loses none if
//   - plain accesses of steps that are enabled together never conflict (Search checks it: any data
//     race shows as such a pair in some state), and
//   - no step undoes a guard that another fiber's step has passed (Search checks that too).
// Plain accesses are seen through the compiler's instrumentation: roles.cpp is compiled with
// -fsanitize=thread, and access.cpp defines the functions that it calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/explore/planted.hpp"
#include "cpu/explore/scenario.hpp"
#include "cpu/explore/scheduler.hpp"

namespace megamoe::cpu::explore {

// A set of state words, by index.
class WordSet {
  public:
    explicit WordSet(size_t num_words) : bits_((num_words + 63) / 64) {}
    void clear() { std::fill(bits_.begin(), bits_.end(), 0); }
    void add(size_t i) { bits_[i / 64] |= uint64_t(1) << (i % 64); }
    // The first common word, or -1.
    int64_t meets(const WordSet& other) const {
        for (size_t i = 0; i < bits_.size(); ++i)
            if (const uint64_t both = bits_[i] & other.bits_[i])
                return int64_t(i * 64) + __builtin_ctzll(both);
        return -1;
    }

  private:
    std::vector<uint64_t> bits_;
};

// What one step did to shared words.
struct Footprint {
    explicit Footprint(size_t num_words)
        : read(num_words), written(num_words), waited(num_words), changed(num_words) {}
    void clear() {
        for (WordSet* set : {&read, &written, &waited, &changed}) set->clear();
        num_guards = 0;
        operation = nullptr;
    }
    // The first word on which two steps conflict where one side is a plain access, or -1.
    int64_t races_with(const Footprint& other) const;
    // Whether this step's operation undoes a guard that the other passed.
    bool undoes_guard_of(const Footprint& other) const;

    WordSet read, written;    // plain accesses
    WordSet waited, changed;  // guards, operations
    static constexpr uint32_t kMaxGuards = 16;
    Pending guards[kMaxGuards];
    uint32_t num_guards = 0;
    const uint32_t* operation = nullptr;
    uint32_t value = 0;  // of the operation's word, afterwards
};

// Writes that a planted bug holds back, per fiber. They lie in the arena, as part of the state.
struct Deferred {
    static constexpr uint32_t kMax = 15;
    uint32_t count;
    struct {
        uint32_t word, value;  // index into the arena
    } write[kMax];
};

class World {
  public:
    World(const Scenario& scenario, Bug bug);

    void reset();
    void step(uint32_t fiber, bool merge);
    const Scheduler& fibers() const { return fibers_; }
    const Footprint& footprint() const { return footprint_; }
    // Empty, or what was found wrong with an output.
    const std::string& violation() const { return violation_; }

    // The state: all words that the protocol or a host can change, and the fibers.
    size_t num_words() const { return state_.size(); }
    size_t max_snapshot_bytes() const { return state_.size() * 4 + fibers_.max_snapshot_bytes(); }
    void save(uint8_t* to) const;
    void restore(const uint8_t* from);
    uint64_t hash();
    bool stacks_fit() const { return fibers_.stacks_fit(); }

    std::string fiber_name(uint32_t fiber) const;
    std::string describe(const Pending& pending) const;
    std::string word_name(const uint32_t* word) const;
    const uint32_t* state_word(size_t index) const { return state_[index]; }

    // ------------------------------------------------- for the running fiber (roles.cpp)

    // One operation on a shared word; stops where the rules above say so.
    uint32_t load(uint32_t* word);
    void store(uint32_t* word, uint32_t value);
    uint32_t add(uint32_t* word, uint32_t value);
    void wait(const Pending& guard);
    // A plain access of memory that may be shared; called by the instrumentation.
    void access(const void* address, size_t bytes, bool is_write);
    void wrong_output(uint32_t rank, uint32_t call, size_t word, uint32_t have, uint32_t want);

    Bug bug() const { return bug_; }
    bool has_bug(Bug bug, Region region, const uint32_t* word) const {
        return bug_ == bug && region_of(word) == region;
    }
    const Scenario& scenario() const { return scenario_; }
    Windows windows(uint32_t rank) const { return {layout_, bases_.data(), rank}; }
    const std::vector<uint32_t>& expected(uint32_t rank, uint32_t call) const {
        return expected_[rank * scenario_.num_calls() + call];
    }
    // A rank's own memory outside of its window.
    uint32_t* started(uint32_t rank) const { return own(rank); }  // calls that its host began
    uint32_t* y(uint32_t rank) const { return own(rank) + 1; }
    uint32_t* expert_scratch(uint32_t rank) const { return own(rank) + experts_at_; }
    uint32_t* out_scratch(uint32_t rank) const { return own(rank) + out_at_; }
    uint32_t* begin_scratch(uint32_t rank, uint32_t role) const {
        return own(rank) + begin_at_ + role * shape_.num_ranks * shape_.local_experts();
    }
    Deferred& deferred() const {
        return *reinterpret_cast<Deferred*>(arena_.get() + deferred_at_ +
                                            fibers_.current() * sizeof(Deferred) / 4);
    }
    uint32_t* arena() const { return arena_.get(); }
    void run_fiber(uint32_t fiber);  // roles.cpp

  private:
    static void body(void* self, uint32_t fiber) { static_cast<World*>(self)->run_fiber(fiber); }

    uint32_t* own(uint32_t rank) const { return arena_.get() + own_at_ + rank * own_words_; }
    bool in_window(const uint32_t* word) const {
        return word >= arena_.get() && word < arena_.get() + own_at_;
    }
    Region region_of(const uint32_t* word) const;
    void list_state(const RowSizes& size);
    void add_state(uint32_t* word);
    bool is_private(const uint32_t* word) const;
    void note(WordSet& set, const uint32_t* word) {
        const int32_t i = index_[size_t(word - arena_.get())];
        if (i >= 0) set.add(size_t(i));
    }

    const Scenario& scenario_;
    const MoEShape shape_;
    const Bug bug_;
    const WindowLayout layout_;
    Scheduler fibers_;

    struct PageDelete {
        void operator()(uint32_t* p) const { ::operator delete[](p, std::align_val_t(4096)); }
    };
    std::unique_ptr<uint32_t[], PageDelete> arena_;  // windows, own memory, deferred writes
    uint64_t arena_words_ = 0, window_words_ = 0, own_at_ = 0, own_words_ = 0, deferred_at_ = 0;
    uint32_t experts_at_ = 0, out_at_ = 0, begin_at_ = 0;
    std::vector<uint8_t*> bases_;
    std::vector<std::vector<uint32_t>> expected_;  // [rank][call]
    std::vector<uint32_t*> state_;                 // words of the arena that can change
    std::vector<int32_t> index_;                   // of an arena word in state_, or -1
    std::vector<uint64_t> gathered_;               // scratch of hash()

    Footprint footprint_;
    bool committed_ = false;  // the step has done its operation
    std::string violation_;
};

}  // namespace megamoe::cpu::explore
