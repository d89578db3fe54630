// The explorer of the protocol's interleavings. Prints one JSON object per line.
//
//   explore_protocol exhaustive SECONDS some|all CALLS UNITS
//                                          2 ranks x 2 experts, every state, for some or all
//                                          routings
//   explore_protocol bounded SECONDS       larger cases, as far as the time goes
//   explore_protocol random SECONDS SEED   seeded schedules of 2 to 4 ranks at minimum rings
//   explore_protocol bugs                  finds every planted bug, by search and at random
//
// Exit status 1: the protocol was found wrong, or one of the ways missed a planted bug.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "cpu/explore/perturb.hpp"

using namespace megamoe::cpu::explore;
using megamoe::MoEShape;

namespace {

struct Size {
    uint32_t ranks, experts, topk, shared, tokens, units, pullers, block_m, ring, lag, tiles1,
        tiles2, tail_rows = 0;
};

// BF16 rows of two words per Linear 2 tile: as little state as the layout allows.
MoEShape make_shape(const Size& z) {
    MoEShape s{};
    s.num_ranks = z.ranks;
    s.num_experts = z.experts;
    s.topk = z.topk;
    s.num_shared = z.shared;
    s.hidden = 2 * z.tiles2;
    s.inter = megamoe::kGroup * z.tiles1;
    s.max_tokens = z.tokens;
    s.block_m = z.block_m;
    s.tail_rows = z.tail_rows;
    s.ring_l1 = s.ring_l2 = z.ring;
    s.wave_blocks = 1;
    s.l2_lag = z.lag;
    s.l2_tile_n = 2;
    s.num_units = z.units;
    s.num_pullers = z.pullers;
    return s;
}

std::string escaped(const std::string& text) {
    std::string out;
    for (char c : text) out += c == '\n' ? std::string("\\n") : std::string(1, c);
    return out;
}

void print_trace(const Outcome& outcome) {
    for (const std::string& step : outcome.trace) std::fprintf(stderr, "    %s\n", step.c_str());
    std::fprintf(stderr, "%s\n", outcome.violation.c_str());
}

class Clock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// ---------------------------------------------------------------- the smallest group

constexpr Size kSmallest{2, 2, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1};
// What a rank can bring to a call: no token, a masked one, one for expert 0, one for expert 1.
constexpr uint32_t kChoices = 4;

// `code` has a digit to base 4 per call and rank, for two calls; a third is the first with the
// ranks' choices exchanged.
Scenario smallest(uint32_t code, uint32_t num_calls = 2, uint32_t num_units = 1) {
    Scenario scenario{"smallest", make_shape(kSmallest), 1, {}};
    scenario.shape.num_units = num_units;
    for (uint32_t call = 0; call < num_calls; ++call) {
        auto& ranks = scenario.calls.emplace_back();
        for (uint32_t r = 0; r < 2; ++r) {
            const uint32_t digit = call < 2 ? 2 * call + r : 1 - r;
            const int choice = int(code >> (2 * digit) & 3);
            std::vector<int32_t> idx;
            if (choice > 0) idx.push_back(choice - 2);
            ranks.push_back(make_input(scenario.shape, r, call, idx));
        }
    }
    return scenario;
}

// All-to-one twice; own expert, then the other's; exchange, then all-to-one; silent rank first,
// silent rank second; masked.
std::vector<uint32_t> chosen_routings(bool all) {
    std::vector<uint32_t> codes;
    if (!all)
        return {2 + 8 + 32 + 128, 2 + 12 + 48 + 128, 3 + 8 + 32 + 128, 2 + 0 + 0 + 128,
                3 + 4 + 16 + 192};
    for (uint32_t code = 0; code < kChoices * kChoices * kChoices * kChoices; ++code)
        codes.push_back(code);
    return codes;
}

int run_exhaustive(double seconds, bool all, uint32_t num_calls, uint32_t num_units) {
    const Clock clock;
    uint64_t states = 0, transitions = 0, largest = 0;
    uint32_t depth = 0, done = 0;
    const std::vector<uint32_t> codes = chosen_routings(all);
    for (uint32_t code : codes) {
        const Scenario scenario = smallest(code, num_calls, num_units);
        World world(scenario, Bug::kNone);
        const Outcome outcome = Search(world, {seconds - clock.seconds(), 50'000'000}).run();
        states += outcome.states;
        transitions += outcome.transitions;
        largest = std::max(largest, outcome.states);
        depth = std::max(depth, outcome.depth);
        if (!outcome.violation.empty()) {
            print_trace(outcome);
            std::printf("{\"mode\": \"exhaustive\", \"routing\": %u, \"violation\": \"%s\"}\n",
                        code, escaped(outcome.violation).c_str());
            return 1;
        }
        if (!outcome.complete) break;
        ++done;
    }
    std::printf(
        "{\"mode\": \"exhaustive\", \"ranks\": 2, \"experts\": 2, \"units\": %u, \"calls\": %u, "
        "\"routings\": %zu, \"routings_done\": %u, \"complete\": %s, \"states\": %lu, "
        "\"largest\": %lu, \"transitions\": %lu, \"depth\": %u, \"seconds\": %.1f}\n",
        num_units, num_calls, codes.size(), done, done == codes.size() ? "true" : "false", states,
        largest, transitions, depth, clock.seconds());
    return 0;
}

// ---------------------------------------------------------------- larger groups

struct Case {
    const char* name;
    Size size;
    uint32_t calls;
};
// Ranks, experts, topk, shared, tokens, units, pullers, block_m, ring, lag, tiles of L1, of L2,
// tail rows of a block.
constexpr Case kCases[] = {
    {"2r_1u", {2, 2, 2, 0, 2, 1, 1, 1, 1, 1, 2, 2}, 2},
    {"2r_2u", {2, 2, 2, 0, 2, 2, 1, 1, 1, 1, 1, 1}, 2},
    {"2r_2u_2p_shared", {2, 4, 2, 1, 3, 2, 2, 2, 1, 1, 2, 2}, 3},
    {"2r_2u_ring3", {2, 4, 2, 0, 4, 2, 2, 1, 3, 2, 1, 2}, 3},
    {"3r_2u", {3, 6, 2, 1, 3, 2, 1, 2, 1, 1, 2, 1}, 4},
    {"4r_1u", {4, 4, 2, 0, 2, 1, 1, 1, 1, 1, 1, 2}, 3},
    {"4r_3u_2p_shared", {4, 8, 3, 1, 4, 3, 2, 2, 2, 1, 2, 2}, 5},
    {"2r_2u_tail", {2, 2, 2, 1, 5, 2, 2, 3, 2, 1, 1, 1, 1}, 3},
};
constexpr uint32_t kNumBounded = 2;  // the first cases, in `bounded`

// One unit fits, with every kind of routing; two units do not.
int run_bounded(double seconds) {
    for (uint32_t i = 0; i < kNumBounded * std::size(kAllRoutings); ++i) {
        const Clock clock;
        const Case& c = kCases[i / std::size(kAllRoutings)];
        const uint32_t first = i % std::size(kAllRoutings);
        const Scenario scenario = draw_scenario(c.name, make_shape(c.size), c.calls, first, 7);
        World world(scenario, Bug::kNone);
        const double limit = seconds / double(kNumBounded * std::size(kAllRoutings));
        const Outcome outcome = Search(world, {limit, 20'000'000}).run();
        if (!outcome.violation.empty()) print_trace(outcome);
        std::printf(
            "{\"mode\": \"bounded\", \"case\": \"%s\", \"first\": \"%s\", \"complete\": %s, "
            "\"states\": %lu, \"transitions\": %lu, \"depth\": %u, \"violation\": \"%s\", "
            "\"seconds\": %.1f}\n",
            c.name, routing_name(kAllRoutings[first]), outcome.complete ? "true" : "false",
            outcome.states, outcome.transitions, outcome.depth, escaped(outcome.violation).c_str(),
            clock.seconds());
        if (!outcome.violation.empty()) return 1;
    }
    return 0;
}

// Schedules of one scenario; adds to the counts, and returns the first violation.
struct RandomCounts {
    uint64_t schedules = 0, steps = 0;
};
Outcome run_schedules(const Scenario& scenario, Bug bug, uint32_t seed, uint32_t n,
                      RandomCounts& counts) {
    World world(scenario, bug);
    uint64_t expected_steps = 1000;
    for (uint32_t i = 0; i < n; ++i) {
        Outcome outcome = run_schedule(world, {seed + i, i % 2 == 1}, expected_steps);
        ++counts.schedules;
        counts.steps += outcome.transitions;
        if (!outcome.violation.empty()) return outcome;
        expected_steps = std::max<uint64_t>(outcome.transitions, 1);
    }
    return {};
}

int run_random(double seconds, uint32_t seed) {
    const Clock clock;
    RandomCounts counts;
    uint32_t scenarios = 0;
    std::map<std::string, uint64_t> per_case;
    for (uint32_t round = 0; clock.seconds() < seconds; ++round) {
        const Case& c = kCases[round % std::size(kCases)];
        const Scenario scenario =
            draw_scenario(c.name, make_shape(c.size), c.calls, round / 2, seed + round);
        const uint64_t before = counts.schedules;
        const Outcome outcome =
            run_schedules(scenario, Bug::kNone, seed + 1000 * round, 50, counts);
        ++scenarios;
        per_case[c.name] += counts.schedules - before;
        if (outcome.violation.empty()) continue;
        std::printf(
            "{\"mode\": \"random\", \"case\": \"%s\", \"round\": %u, \"schedule\": %lu, "
            "\"violation\": \"%s\"}\n",
            c.name, round, counts.schedules - before, escaped(outcome.violation).c_str());
        return 1;
    }
    std::string cases;
    for (const auto& [name, n] : per_case)
        cases += (cases.empty() ? "\"" : ", \"") + name + "\": " + std::to_string(n);
    std::printf(
        "{\"mode\": \"random\", \"seed\": %u, \"scenarios\": %u, \"schedules\": %lu, "
        "\"steps\": %lu, \"cases\": {%s}, \"seconds\": %.1f}\n",
        seed, scenarios, counts.schedules, counts.steps, cases.c_str(), clock.seconds());
    return 0;
}

// ---------------------------------------------------------------- planted bugs

struct Found {
    std::string what;
    uint64_t states = 0;
};

// What two units of a rank do to each other, or two routes of a token, does not show in the
// smallest group.
bool needs_more(Bug bug) {
    return bug == Bug::kL2PublishedEarly || bug == Bug::kNoL2EmptyWait ||
           bug == Bug::kNoL2FullWait || bug == Bug::kOneBarrier || bug == Bug::kCombineEarly;
}

// Short searches, from both ends of the order of fibers.
Found find_by_search(Bug bug, bool check_steps) {
    std::vector<Scenario> scenarios;
    if (needs_more(bug)) {
        for (uint32_t first = 0; first < 5; ++first)
            scenarios.push_back(
                draw_scenario("2r_2u", make_shape(kCases[1].size), kCases[1].calls, first, 7));
    } else {
        for (uint32_t code : chosen_routings(false)) scenarios.push_back(smallest(code));
    }
    Found found;
    for (const Scenario& scenario : scenarios) {
        for (bool last_first : {false, true}) {
            World world(scenario, bug);
            const Outcome outcome = Search(world, {120, 50'000, check_steps, last_first}).run();
            found.states += outcome.states;
            found.what = outcome.violation;
            if (!found.what.empty()) return found;
        }
    }
    return found;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

int run_bugs() {
    int status = 0;
    for (Bug bug : kAllBugs) {
        if (bug == Bug::kNone) continue;
        const Clock clock;
        RandomCounts counts;
        std::string at_random;
        for (uint32_t round = 0; round < 40 && at_random.empty(); ++round) {
            const Case& c = kCases[round % std::size(kCases)];
            const Scenario scenario =
                draw_scenario(c.name, make_shape(c.size), c.calls, round / 2, 1 + round);
            at_random = run_schedules(scenario, bug, 1000 * round, 100, counts).violation;
        }
        const Found wrong = find_by_search(bug, false);
        const Found unsound = find_by_search(bug, true);
        const bool found = !wrong.what.empty() && !unsound.what.empty() && !at_random.empty();
        if (!found) status = 1;
        std::printf(
            "{\"mode\": \"bugs\", \"bug\": \"%s\", \"found\": %s, \"search\": \"%s\", "
            "\"search_states\": %lu, \"checked_search\": \"%s\", \"checked_states\": %lu, "
            "\"random\": \"%s\", \"random_schedules\": %lu, \"seconds\": %.1f}\n",
            bug_name(bug), found ? "true" : "false", first_line(wrong.what).c_str(), wrong.states,
            first_line(unsound.what).c_str(), unsound.states, first_line(at_random).c_str(),
            counts.schedules, clock.seconds());
    }
    return status;
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const std::string_view mode = argc > 1 ? argv[1] : "";
    const double seconds = argc > 2 ? std::atof(argv[2]) : 60;
    if (mode == "exhaustive")
        return run_exhaustive(seconds, argc > 3 && std::string_view(argv[3]) == "all",
                              argc > 4 ? uint32_t(std::atoi(argv[4])) : 2,
                              argc > 5 ? uint32_t(std::atoi(argv[5])) : 1);
    if (mode == "bounded") return run_bounded(seconds);
    if (mode == "random") return run_random(seconds, argc > 3 ? uint32_t(std::atoi(argv[3])) : 1);
    if (mode == "bugs") return run_bugs();
    std::fprintf(stderr, "explore_protocol: exhaustive, bounded, random or bugs\n");
    return 2;
}
