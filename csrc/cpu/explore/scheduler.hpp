// A cooperative scheduler: fibers on stacks of their own, which stop where they choose to, and
// whose state can be saved, restored and hashed. It knows nothing of the protocol.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/explore/fiber.hpp"
#include "megamoe/protocol.hpp"

namespace megamoe::cpu::explore {

enum class Op : uint32_t { kStart, kAccess, kStore, kAdd, kWaitEqual, kWaitReached };

// What a stopped fiber does first when it runs again; lies on the fiber's own stack.
struct Pending {
    Op op;
    const uint32_t* word;
    uint32_t want = 0;  // of waits

    bool is_wait() const { return op == Op::kWaitEqual || op == Op::kWaitReached; }
    bool holds_for(uint32_t value) const {
        if (op == Op::kWaitEqual) return value == want;
        if (op == Op::kWaitReached) return reached(value, want);
        return true;
    }
    // A wait is a guard: its fiber can run only while this holds.
    bool holds() const { return !is_wait() || holds_for(*word); }
};

inline uint64_t hash_words(const uint64_t* words, size_t n, uint64_t seed) {
    constexpr uint64_t kA = 0x9E3779B97F4A7C15ULL, kB = 0xD6E8FEB86659FD93ULL;
    __extension__ using Wide = unsigned __int128;
    auto fold = [](uint64_t x, uint64_t y) {
        const Wide product = Wide(x) * y;
        return uint64_t(product) ^ uint64_t(product >> 64);
    };
    uint64_t a = seed ^ kA, b = seed + kB;
    size_t i = 0;
    for (; i + 2 <= n; i += 2) {
        a = fold(a ^ words[i], kA) + words[i + 1];
        b = fold(b ^ words[i + 1], kB) + words[i];
    }
    if (i < n) a = fold(a ^ words[i], kB);
    return fold(a ^ kB, b ^ kA) ^ fold(a + n, kA);
}

class Scheduler {
  public:
    static constexpr size_t kStackBytes = 32 << 10;
    // Fibers use less. These bytes are zero below the stack pointer whenever a fiber runs, so that
    // what padding and dead slots hold depends on the fiber's own history alone.
    static constexpr size_t kUsedBytes = 6 << 10;

    using Body = void (*)(void* owner, uint32_t fiber);

    Scheduler(uint32_t num_fibers, Body body, void* owner)
        : body_(body),
          owner_(owner),
          stacks_(new (std::align_val_t(64)) uint8_t[num_fibers * kStackBytes]()),
          fibers_(num_fibers),
          starts_(num_fibers) {
        for (uint32_t f = 0; f < num_fibers; ++f) starts_[f] = {this, f};
    }

    void reset() {
        for (uint32_t f = 0; f < num_fibers(); ++f) {
            uint8_t* top = stack_top(f);
            std::memset(top - kUsedBytes, 0, kUsedBytes);
            fibers_[f] = {make_stack(top, &Scheduler::entry, &starts_[f]), &kStarting, 0, false};
            fibers_[f].hash = hash_stack(f);
        }
    }

    uint32_t num_fibers() const { return uint32_t(fibers_.size()); }
    uint32_t current() const { return current_; }
    bool done(uint32_t f) const { return fibers_[f].done; }
    const Pending& pending(uint32_t f) const { return *fibers_[f].pending; }
    uint32_t enabled_mask() const {
        uint32_t mask = 0;
        for (uint32_t f = 0; f < num_fibers(); ++f)
            mask |= uint32_t(!fibers_[f].done && fibers_[f].pending->holds()) << f;
        return mask;
    }
    bool all_done() const {
        for (const Fiber& f : fibers_)
            if (!f.done) return false;
        return true;
    }

    // Runs an enabled fiber to its next stop. `merge`: the state will be hashed.
    void step(uint32_t f, bool merge) {
        current_ = f;
        if (merge) {
            uint8_t* lowest = stack_top(f) - kUsedBytes;
            std::memset(lowest, 0, size_t(static_cast<uint8_t*>(fibers_[f].sp) - lowest));
        }
        megamoe_switch_stack(&main_sp_, fibers_[f].sp);
        if (merge) fibers_[f].hash = hash_stack(f);
    }
    // Called by the running fiber: it goes on when the scheduler picks it again.
    void stop(const Pending& pending) {
        fibers_[current_].pending = &pending;
        megamoe_switch_stack(&fibers_[current_].sp, main_sp_);
    }

    // A snapshot holds the fibers and the live part of their stacks, in whole words.
    size_t max_snapshot_bytes() const { return fibers_.size() * (sizeof(Fiber) + kUsedBytes); }
    uint8_t* save(uint8_t* to) const {
        for (uint32_t f = 0; f < num_fibers(); ++f) {
            std::memcpy(to, &fibers_[f], sizeof(Fiber));
            std::memcpy(to + sizeof(Fiber), fibers_[f].sp, live_bytes(f));
            to += sizeof(Fiber) + live_bytes(f);
        }
        return to;
    }
    void restore(const uint8_t* from) {
        for (uint32_t f = 0; f < num_fibers(); ++f) {
            Fiber saved;
            std::memcpy(&saved, from, sizeof saved);
            // Most fibers have not moved since: their stacks are what they were.
            const bool moved = saved.hash != fibers_[f].hash || saved.sp != fibers_[f].sp;
            fibers_[f] = saved;
            if (moved) std::memcpy(saved.sp, from + sizeof saved, live_bytes(f));
            from += sizeof saved + live_bytes(f);
        }
    }
    uint64_t hash(uint64_t seed) const {
        for (const Fiber& f : fibers_) {
            const uint64_t pair[] = {seed, f.hash};
            seed = hash_words(pair, 2, 0);
        }
        return seed;
    }
    // False if a fiber went deeper than kUsedBytes: its snapshots would be incomplete.
    bool stacks_fit() const {
        for (uint32_t f = 0; f < num_fibers(); ++f)
            for (const uint8_t* p = stack_top(f) - kStackBytes; p < stack_top(f) - kUsedBytes; ++p)
                if (*p != 0) return false;
        return true;
    }

  private:
    struct Fiber {
        void* sp;
        const Pending* pending;
        uint64_t hash;  // of the stack
        bool done;
    };
    struct Start {
        Scheduler* scheduler;
        uint32_t fiber;
    };
    struct AlignedDelete {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
    };

    static void entry(void* argument) {
        const Start& start = *static_cast<Start*>(argument);
        Scheduler& self = *start.scheduler;
        self.body_(self.owner_, start.fiber);
        self.fibers_[start.fiber].done = true;
        const Pending never{Op::kStart, nullptr};
        self.stop(never);
    }
    uint8_t* stack_top(uint32_t f) const { return stacks_.get() + (f + 1) * kStackBytes; }
    size_t live_bytes(uint32_t f) const {
        return size_t(stack_top(f) - static_cast<uint8_t*>(fibers_[f].sp));
    }
    uint64_t hash_stack(uint32_t f) const {
        return hash_words(static_cast<const uint64_t*>(fibers_[f].sp), live_bytes(f) / 8,
                          f * 2 + fibers_[f].done);
    }

    static constexpr Pending kStarting{Op::kStart, nullptr};

    Body body_;
    void* owner_;
    std::unique_ptr<uint8_t[], AlignedDelete> stacks_;
    std::vector<Fiber> fibers_;
    std::vector<Start> starts_;
    void* main_sp_ = nullptr;
    uint32_t current_ = 0;
};

}  // namespace megamoe::cpu::explore
