// The math policy of CPU ranks: row copies, and tiles by the run-time selected tile functions.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/context.hpp"
#include "cpu/gemm.hpp"

namespace megamoe::cpu {

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};
using AlignedBytes = std::unique_ptr<uint8_t[], FreeDeleter>;

// `size` bytes on a cache line boundary; throws std::bad_alloc.
AlignedBytes allocate_aligned(size_t size);

// One mapping for the weights of all experts. The heap would keep holes between them, since experts
// are read in and freed one by one, and the kernel may back a mapping with large pages.
class WeightMemory {
  public:
    explicit WeightMemory(size_t size);  // throws std::bad_alloc; pages are taken when written
    ~WeightMemory();
    WeightMemory(const WeightMemory&) = delete;
    WeightMemory& operator=(const WeightMemory&) = delete;
    uint8_t* data() const { return data_; }

  private:
    uint8_t* data_;
    size_t size_;
};

// One local expert in the layout of the tile functions.
struct PackedExpert {
    uint8_t *w1 = nullptr, *w2 = nullptr;
    bool loaded = false;
    std::vector<float> w1_scale, w2_scale;  // [2I/128, H/128], [H/128, I/128]; empty for BF16
};

class CpuMath {
  public:
    CpuMath(const MoEShape& shape, const TileFns& fns, float clamp);

    // w1 [2I, H], w2 [H, I] row-major; scales null for BF16.
    void load_expert(uint32_t index, const void* w1, const float* w1_scale, const void* w2,
                     const float* w2_scale);
    uint32_t num_loaded() const { return num_loaded_; }
    const TileFns& fns() const { return fns_; }

    uint32_t* expert_scratch(uint32_t unit) { return units_[unit].experts.data(); }

    void pull(const uint8_t* x, const uint8_t* x_scale, uint8_t* to, uint8_t* to_scale) const {
        std::memcpy(to, x, shape_.x_row_bytes());
        if (shape_.is_fp8) std::memcpy(to_scale, x_scale, size_t(shape_.x_groups()) * 4);
    }
    void linear1(uint32_t unit, const Tile& tile, const uint8_t* x, const uint8_t* x_scale,
                 uint8_t* h, uint8_t* h_scale) {
        const PackedExpert& e = experts_[tile.expert];
        fns_.linear1_tile(x, scale(x_scale), int(tile.num_rows), e.w1, e.w1_scale.data(), gemm_,
                          int(tile.n), clamp_, h,
                          reinterpret_cast<float*>(shape_.is_fp8 ? h_scale : nullptr),
                          units_[unit].scratch.get());
    }
    // Returns [num_rows, l2_tile_n] BF16, valid until the unit's next tile.
    const uint8_t* linear2(uint32_t unit, const Tile& tile, const uint8_t* h,
                           const uint8_t* h_scale) {
        const PackedExpert& e = experts_[tile.expert];
        uint8_t* out = units_[unit].out.get();
        fns_.linear2_tile(h, scale(h_scale), int(tile.num_rows), e.w2, e.w2_scale.data(), gemm_,
                          int(tile.n), reinterpret_cast<uint16_t*>(out),
                          units_[unit].scratch.get());
        return out;
    }
    // Masked slots are skipped, not multiplied by 0; shared experts come last with weight 1.
    void reduce(uint32_t token, const int32_t* topk_idx, const float* topk_weight,
                const Windows& windows, uint8_t* y) const {
        const uint16_t* slots[kMaxSlots];
        float weights[kMaxSlots];
        int n = 0;
        auto use = [&](uint32_t slot, float weight) {
            const uint8_t* row = windows.combine_row(shape_, windows.rank, slot, token);
            slots[n] = reinterpret_cast<const uint16_t*>(row);
            weights[n++] = weight;
        };
        for (uint32_t k = 0; k < shape_.topk; ++k)
            if (topk_idx[k] >= 0) use(k, topk_weight[k]);
        for (uint32_t s = 0; s < shape_.num_shared; ++s) use(shape_.topk + s, 1.0F);
        fns_.reduce_token(slots, weights, n, int(shape_.hidden), reinterpret_cast<uint16_t*>(y));
    }

    static constexpr uint32_t kMaxSlots = 64;

  private:
    const float* scale(const uint8_t* p) const {
        return reinterpret_cast<const float*>(shape_.is_fp8 ? p : nullptr);
    }

    struct Unit {
        AlignedBytes scratch, out;
        std::vector<uint32_t> experts;
    };

    MoEShape shape_;
    GemmShape gemm_;
    const TileFns& fns_;
    float clamp_;
    WeightMemory weights_;
    std::vector<PackedExpert> experts_;
    std::vector<Unit> units_;
    uint32_t num_loaded_ = 0;
};

}  // namespace megamoe::cpu
