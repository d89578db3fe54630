#include "cpu/math.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

namespace megamoe::cpu {

AlignedBytes allocate_aligned(size_t size) {
    void* p = std::aligned_alloc(kAlign, align_up(size ? size : 1, kAlign));
    if (p == nullptr) throw std::bad_alloc();
    return AlignedBytes(static_cast<uint8_t*>(p));
}

WeightMemory::WeightMemory(size_t size) : size_(size) {
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, size, MADV_HUGEPAGE);  // a wish: a kernel without them ignores it
    data_ = static_cast<uint8_t*>(p);
}

WeightMemory::~WeightMemory() { munmap(data_, size_); }

CpuMath::CpuMath(const MoEShape& shape, const TileFns& fns, float clamp)
    : shape_(shape),
      gemm_{int(shape.hidden), int(shape.inter), shape.is_fp8 != 0},
      fns_(fns),
      clamp_(clamp),
      weights_(shape.total_experts() * (fns.packed_w1_bytes(gemm_) + fns.packed_w2_bytes(gemm_))),
      experts_(shape.total_experts()) {
    // Packed sizes are multiples of kAlign, so every weight begins on a cache line.
    uint8_t* place = weights_.data();
    for (PackedExpert& e : experts_) {
        e.w1 = place;
        e.w2 = e.w1 + fns.packed_w1_bytes(gemm_);
        place = e.w2 + fns.packed_w2_bytes(gemm_);
    }
    units_.resize(shape.num_units);
    for (Unit& unit : units_) {
        unit.scratch = allocate_aligned(scratch_bytes(gemm_, int(shape.block_m)));
        unit.out = allocate_aligned(size_t(shape.block_m) * shape.l2_tile_n * 2);
        unit.experts.resize(shape.num_experts);
    }
}

void CpuMath::load_expert(uint32_t index, const void* w1, const float* w1_scale, const void* w2,
                          const float* w2_scale) {
    PackedExpert& e = experts_.at(index);
    num_loaded_ += !e.loaded;
    e.loaded = true;
    fns_.pack_w1(e.w1, w1, gemm_);
    fns_.pack_w2(e.w2, w2, gemm_);
    if (!shape_.is_fp8) return;
    const size_t blocks = size_t(shape_.h_groups()) * shape_.x_groups();
    e.w1_scale.assign(w1_scale, w1_scale + 2 * blocks);
    e.w2_scale.assign(w2_scale, w2_scale + blocks);
}

}  // namespace megamoe::cpu
