// A math policy whose results anybody can recompute: every row is a hash of its token's identity
// and of the experts that it has passed. A row that was lost, stale, mixed up, summed twice or in
// another order gives another word.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/context.hpp"

namespace megamoe::cpu::explore {

inline uint32_t mix(uint32_t a, uint32_t b) {
    uint32_t h = std::rotl(a * 0x9E3779B1U, 13) ^ (b * 0x85EBCA77U + 0xC2B2AE3DU);
    h ^= h >> 15;
    h *= 0x2C1B3C6DU;
    return h ^ (h >> 13);
}

// Words of the three kinds of rows. Of a Linear 1 tile's columns the first `h_words` words are
// used, so that an explorer's state stays small.
struct RowSizes {
    uint32_t x, x_scale, h_tile_stride, h_used, h_scale, y_tile;

    RowSizes(const MoEShape& s, uint32_t h_words)
        : x(s.x_row_bytes() / 4),
          x_scale(s.x_groups()),
          h_tile_stride(s.h_row_bytes() / 4 / s.l1_tiles()),
          h_used(h_words < h_tile_stride ? h_words : h_tile_stride),
          h_scale(s.h_groups()),
          y_tile(s.l2_tile_n / 2) {}
};

// The arithmetic, without any memory of the protocol.
struct RowHash {
    static uint32_t token(uint32_t rank, uint32_t call, uint32_t token) {
        return mix(mix(mix(0x70CE, rank), call), token);
    }
    static uint32_t x(uint32_t token, uint32_t word) { return mix(token, word); }
    static uint32_t x_scale(uint32_t token, uint32_t group) { return mix(~token, group); }
    static uint32_t digest(const uint32_t* words, uint32_t n, uint32_t start) {
        for (uint32_t i = 0; i < n; ++i) start = mix(start, words[i]);
        return start;
    }
    // Tile n of Linear 1 and 2, and one slot of the reduction.
    static uint32_t h(uint32_t x_digest, uint32_t expert, uint32_t n, uint32_t word) {
        return mix(mix(mix(x_digest, expert), n), word);
    }
    static uint32_t h_scale(uint32_t x_digest, uint32_t expert, uint32_t n) {
        return mix(mix(~x_digest, expert), n);
    }
    static uint32_t y(uint32_t h_digest, uint32_t expert, uint32_t n, uint32_t word) {
        return mix(mix(mix(h_digest, ~expert), n), word);
    }
    static uint32_t add_slot(uint32_t sum, uint32_t y, float weight) {
        return mix(mix(sum, y), std::bit_cast<uint32_t>(weight));
    }
};

class IdentityMath {
  public:
    // `experts` has room for [U][E] words, `out` for [U][block_m * l2_tile_n / 2].
    IdentityMath(const MoEShape& shape, uint32_t rank, uint32_t h_words, uint32_t* experts,
                 uint32_t* out)
        : shape_(shape), size_(shape, h_words), rank_(rank), experts_(experts), out_(out) {}

    // Local expert to a number of its own in the group; shared experts are the same everywhere.
    static uint32_t global_expert(const MoEShape& s, uint32_t rank, uint32_t local) {
        return local < s.local_experts() ? rank * s.local_experts() + local
                                         : s.num_experts + local - s.local_experts();
    }

    uint32_t* expert_scratch(uint32_t unit) const { return experts_ + unit * shape_.num_experts; }

    void stage(const Windows& windows, uint32_t call, uint32_t num_tokens) const {
        for (uint32_t t = 0; t < num_tokens; ++t) {
            const uint32_t id = RowHash::token(rank_, call, t);
            auto* x = windows.ptr<uint32_t>(rank_, Region::kInput, t);
            for (uint32_t w = 0; w < size_.x; ++w) x[w] = RowHash::x(id, w);
            auto* scale = windows.ptr<uint32_t>(rank_, Region::kInputScale, t);
            for (uint32_t g = 0; g < size_.x_scale; ++g) scale[g] = RowHash::x_scale(id, g);
        }
    }
    void pull(const uint8_t* x, const uint8_t* x_scale, uint8_t* to, uint8_t* to_scale) const {
        std::memcpy(to, x, size_.x * 4);
        if (size_.x_scale) std::memcpy(to_scale, x_scale, size_.x_scale * 4);
    }
    void linear1(uint32_t, const Tile& tile, const uint8_t* x, const uint8_t* x_scale, uint8_t* h,
                 uint8_t* h_scale) const {
        const uint32_t expert = global_expert(shape_, rank_, tile.expert);
        for (uint32_t r = 0; r < tile.num_rows; ++r) {
            const uint32_t digest = x_digest(words(x) + r * size_.x, words(x_scale), r);
            uint32_t* row =
                words(h) + r * (shape_.h_row_bytes() / 4) + tile.n * size_.h_tile_stride;
            for (uint32_t w = 0; w < size_.h_used; ++w)
                row[w] = RowHash::h(digest, expert, tile.n, w);
            if (size_.h_scale)
                words(h_scale)[r * size_.h_scale + tile.n] =
                    RowHash::h_scale(digest, expert, tile.n);
        }
    }
    const uint8_t* linear2(uint32_t unit, const Tile& tile, const uint8_t* h,
                           const uint8_t* h_scale) const {
        const uint32_t expert = global_expert(shape_, rank_, tile.expert);
        uint32_t* out = out_ + unit * shape_.block_m * size_.y_tile;
        for (uint32_t r = 0; r < tile.num_rows; ++r) {
            const uint32_t digest =
                h_digest(words(h) + r * (shape_.h_row_bytes() / 4), words(h_scale), r);
            for (uint32_t w = 0; w < size_.y_tile; ++w)
                out[r * size_.y_tile + w] = RowHash::y(digest, expert, tile.n, w);
        }
        return reinterpret_cast<const uint8_t*>(out);
    }
    void reduce(uint32_t token, const int32_t* topk_idx, const float* topk_weight,
                const Windows& windows, uint8_t* y) const {
        const uint32_t num_words = shape_.y_row_bytes() / 4;
        for (uint32_t w = 0; w < num_words; ++w) words(y)[w] = 0;
        for (uint32_t j = 0; j < shape_.num_slots(); ++j) {
            if (j < shape_.topk && topk_idx[j] < 0) continue;
            const uint32_t* slot = words(windows.combine_row(shape_, rank_, j, token));
            const float weight = j < shape_.topk ? topk_weight[j] : 1.0F;
            for (uint32_t w = 0; w < num_words; ++w)
                words(y)[w] = RowHash::add_slot(words(y)[w], slot[w], weight);
        }
    }

    // What `reduce` must give for a token.
    void expect(uint32_t call, uint32_t token, const int32_t* topk_idx, const float* topk_weight,
                uint32_t* y) const {
        const uint32_t id = RowHash::token(rank_, call, token);
        uint32_t digest1 = kStart;
        for (uint32_t w = 0; w < size_.x; ++w) digest1 = mix(digest1, RowHash::x(id, w));
        for (uint32_t g = 0; g < size_.x_scale; ++g)
            digest1 = mix(digest1, RowHash::x_scale(id, g));
        const uint32_t num_words = shape_.y_row_bytes() / 4;
        for (uint32_t w = 0; w < num_words; ++w) y[w] = 0;
        for (uint32_t j = 0; j < shape_.num_slots(); ++j) {
            if (j < shape_.topk && topk_idx[j] < 0) continue;
            const bool routed = j < shape_.topk;
            const uint32_t expert =
                routed ? uint32_t(topk_idx[j]) : shape_.num_experts + j - shape_.topk;
            uint32_t digest2 = kStart;
            for (uint32_t n = 0; n < shape_.l1_tiles(); ++n)
                for (uint32_t w = 0; w < size_.h_used; ++w)
                    digest2 = mix(digest2, RowHash::h(digest1, expert, n, w));
            for (uint32_t n = 0; n < size_.h_scale; ++n)
                digest2 = mix(digest2, RowHash::h_scale(digest1, expert, n));
            for (uint32_t w = 0; w < num_words; ++w)
                y[w] = RowHash::add_slot(
                    y[w], RowHash::y(digest2, expert, w / size_.y_tile, w % size_.y_tile),
                    routed ? topk_weight[j] : 1.0F);
        }
    }

  private:
    static constexpr uint32_t kStart = 0x5EED;

    static uint32_t* words(uint8_t* p) { return reinterpret_cast<uint32_t*>(p); }
    static const uint32_t* words(const uint8_t* p) { return reinterpret_cast<const uint32_t*>(p); }

    uint32_t x_digest(const uint32_t* row, const uint32_t* scales, uint32_t r) const {
        const uint32_t digest = RowHash::digest(row, size_.x, kStart);
        return RowHash::digest(scales + r * size_.x_scale, size_.x_scale, digest);
    }
    uint32_t h_digest(const uint32_t* row, const uint32_t* scales, uint32_t r) const {
        uint32_t digest = kStart;
        for (uint32_t n = 0; n < shape_.l1_tiles(); ++n)
            digest = RowHash::digest(row + n * size_.h_tile_stride, size_.h_used, digest);
        return RowHash::digest(scales + r * size_.h_scale, size_.h_scale, digest);
    }

    MoEShape shape_;
    RowSizes size_;
    uint32_t rank_;
    uint32_t* experts_;
    uint32_t* out_;
};

}  // namespace megamoe::cpu::explore
