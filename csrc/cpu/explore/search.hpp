// Explicit-state search: every interleaving of a scenario's steps, states merged by hash.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "cpu/explore/world.hpp"

namespace megamoe::cpu::explore {

// 64-bit hashes, open addressing; 0 marks a free place.
class HashSet {
  public:
    HashSet() : table_(1 << 12) {}
    // False if it was there.
    bool insert(uint64_t hash) {
        if (hash == 0) hash = 1;
        if ((size_ + 1) * 2 > table_.size()) grow();
        for (size_t i = hash & (table_.size() - 1);; i = (i + 1) & (table_.size() - 1)) {
            if (table_[i] == hash) return false;
            if (table_[i] == 0) {
                table_[i] = hash;
                ++size_;
                return true;
            }
        }
    }
    size_t size() const { return size_; }

  private:
    void grow() {
        std::vector<uint64_t> old(table_.size() * 2);
        old.swap(table_);
        size_ = 0;
        for (uint64_t hash : old)
            if (hash != 0) insert(hash);
    }
    std::vector<uint64_t> table_;
    size_t size_ = 0;
};

struct Outcome {
    uint64_t states = 0;       // distinct
    uint64_t transitions = 0;  // steps taken
    uint32_t depth = 0;        // of the longest path, in steps
    bool complete = false;     // nothing was left out
    std::string violation;     // empty: none found
    std::vector<std::string> trace;
};

inline std::string report_deadlock(const World& world) {
    std::string text = "deadlock:";
    for (uint32_t f = 0; f < world.fibers().num_fibers(); ++f)
        text += "\n    " + world.fiber_name(f) + ": " +
                (world.fibers().done(f) ? "done" : world.describe(world.fibers().pending(f)));
    return text;
}

// What is wrong with the state just reached, if anything.
inline std::string inspect(const World& world, uint32_t enabled) {
    if (!world.violation().empty()) return world.violation();
    if (enabled == 0 && !world.fibers().all_done()) return report_deadlock(world);
    return {};
}

struct SearchOptions {
    double seconds;
    uint64_t max_states;
    // Also look for two enabled steps that race, and for a step that undoes a guard; without them
    // the search is exhaustive only for executions cut into steps (see world.hpp).
    bool check_steps = true;
    // Which enabled fiber goes first. It decides how soon a bug is found.
    bool last_fiber_first = false;
};

// Depth first.
class Search {
  public:
    Search(World& world, SearchOptions options) : world_(world), options_(options) {}

    Outcome run() {
        const auto start = std::chrono::steady_clock::now();
        world_.reset();
        push();
        while (depth_ > 0 && out_.violation.empty()) {
            Node& node = nodes_[depth_ - 1];
            if (node.todo == 0) {
                if (options_.check_steps) compare_steps(node);
                --depth_;
                continue;
            }
            if (out_.states >= options_.max_states) return finish(false);
            if (out_.transitions % 1024 == 0) {
                const std::chrono::duration<double> spent =
                    std::chrono::steady_clock::now() - start;
                if (spent.count() > options_.seconds) return finish(false);
            }
            node.chosen = uint32_t(options_.last_fiber_first ? 31 - __builtin_clz(node.todo)
                                                             : __builtin_ctz(node.todo));
            node.todo &= ~(1U << node.chosen);
            if (!node.is_current) world_.restore(node.saved.data());
            node.is_current = false;
            world_.step(node.chosen, true);
            ++out_.transitions;
            if (options_.check_steps) node.footprints[node.chosen] = world_.footprint();
            push();
        }
        return finish(out_.violation.empty());
    }

  private:
    struct Node {
        std::vector<uint8_t> saved;
        std::vector<Footprint> footprints;  // of each enabled fiber's step
        uint32_t enabled = 0, todo = 0, chosen = 0;
        bool is_current = false;  // the world is in this state
    };

    // The world's state becomes a node, unless it is known.
    void push() {
        if (!seen_.insert(world_.hash())) return;
        if (depth_ == nodes_.size()) {
            nodes_.emplace_back();
            nodes_.back().saved.resize(world_.max_snapshot_bytes());
            if (options_.check_steps)
                nodes_.back().footprints.assign(world_.fibers().num_fibers(), world_.footprint());
        }
        Node& node = nodes_[depth_];
        world_.save(node.saved.data());
        ++out_.states;
        node.enabled = node.todo = world_.fibers().enabled_mask();
        node.is_current = true;
        ++depth_;
        if (depth_ > out_.depth) out_.depth = uint32_t(depth_);
        out_.violation = inspect(world_, node.enabled);
        if (!out_.violation.empty()) trace();
    }
    // All steps that were enabled together in this state have been taken.
    void compare_steps(const Node& node) {
        for (uint32_t f = 0; f < node.footprints.size(); ++f) {
            for (uint32_t g = 0; g < node.footprints.size(); ++g) {
                if (f == g || (node.enabled >> f & 1) == 0 || (node.enabled >> g & 1) == 0)
                    continue;
                const Footprint &a = node.footprints[f], &b = node.footprints[g];
                const int64_t word = f < g ? a.races_with(b) : -1;
                std::string what;
                if (word >= 0)
                    what = "data race on " + world_.word_name(world_.state_word(size_t(word)));
                else if (a.undoes_guard_of(b))
                    what = "a guard is undone on " + world_.word_name(a.operation);
                else
                    continue;
                out_.violation =
                    what + " between " + world_.fiber_name(f) + " and " + world_.fiber_name(g);
                return trace();
            }
        }
    }
    void trace() {
        for (size_t i = 0; i + 1 < depth_; ++i) {
            world_.restore(nodes_[i].saved.data());
            const uint32_t f = nodes_[i].chosen;
            out_.trace.push_back(world_.fiber_name(f) + ": " +
                                 world_.describe(world_.fibers().pending(f)));
        }
    }
    Outcome finish(bool complete) {
        out_.complete = complete;
        if (!world_.stacks_fit() && out_.violation.empty())
            out_.violation = "the explorer is wrong: a stack is deeper than its snapshots";
        return out_;
    }

    World& world_;
    SearchOptions options_;
    HashSet seen_;
    std::vector<Node> nodes_;
    size_t depth_ = 0;
    Outcome out_;
};

}  // namespace megamoe::cpu::explore
