// Seeded schedules: a random walk, or priorities with a few random changes (as PCT: Burckhardt et
// al., ASPLOS 2010), which finds orders that a fair walk hardly ever takes.
#pragma once

#include <random>
#include <vector>

#include "cpu/explore/search.hpp"

namespace megamoe::cpu::explore {

struct Schedule {
    uint32_t seed;
    bool by_priority;
};

// Runs one schedule from the start to the end, or to the first violation.
inline Outcome run_schedule(World& world, Schedule schedule, uint64_t expected_steps) {
    std::mt19937 rng(schedule.seed);
    const Scheduler& fibers = world.fibers();
    world.reset();
    std::vector<uint32_t> priority(fibers.num_fibers());
    for (uint32_t& p : priority) p = 1000 + uint32_t(rng() % 1000000);
    std::vector<uint64_t> changes(schedule.by_priority ? 1 + rng() % 8 : 0);
    for (uint64_t& at : changes) at = rng() % expected_steps;

    Outcome out;
    std::vector<uint8_t> taken;
    while (true) {
        const uint32_t enabled = fibers.enabled_mask();
        out.violation = inspect(world, enabled);
        if (!out.violation.empty() || enabled == 0) break;
        uint32_t chosen = 0;
        if (schedule.by_priority) {
            bool found = false;
            for (uint32_t f = 0; f < fibers.num_fibers(); ++f) {
                if ((enabled >> f & 1) == 0) continue;
                if (!found || priority[f] > priority[chosen]) chosen = f;
                found = true;
            }
            // At a change the running fiber falls behind all others.
            for (size_t i = 0; i < changes.size(); ++i)
                if (changes[i] == out.transitions) priority[chosen] = uint32_t(i);
        } else {
            uint32_t skip = uint32_t(rng() % uint32_t(__builtin_popcount(enabled)));
            uint32_t rest = enabled;
            while (skip-- > 0) rest &= rest - 1;
            chosen = uint32_t(__builtin_ctz(rest));
        }
        world.step(chosen, false);
        ++out.transitions;
    }
    out.complete = out.violation.empty();
    return out;
}

}  // namespace megamoe::cpu::explore
