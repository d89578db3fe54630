// What the drivers share: a clock, a time limit, and the windows of a group in one process.
#pragma once

#include <chrono>
#include <cstring>
#include <vector>

#include "cpu/sync.hpp"
#include "megamoe/layout.hpp"

namespace driver {

// Of a wait, in seconds: sanitizers are slow and cores few.
inline constexpr double kLimit = 60;

class Clock {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct alignas(4096) Page {
    uint8_t bytes[4096];
};

// Zero-filled windows, as a rank gets them.
struct Memory {
    explicit Memory(const megamoe::MoEShape& s)
        : windows(s.num_ranks,
                  std::vector<Page>(megamoe::make_window_layout(s).num_bytes / sizeof(Page))) {
        for (std::vector<Page>& window : windows) bases.push_back(window[0].bytes);
    }
    std::vector<std::vector<Page>> windows;
    std::vector<uint8_t*> bases;
};

}  // namespace driver
