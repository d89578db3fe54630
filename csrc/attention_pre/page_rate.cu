// A probe: how fast one thread per SM brings 16 KiB pages into shared memory, by the form of the
// copy and by the pages in flight. launcher/probe_pages.py runs it.
#include "device/load.cuh"

namespace megamoe::attention {

inline constexpr uint32_t kPage = 16384, kSlots = 12;

enum class Form : uint32_t {
    kRows,    // box of 128 rows x 128 bytes of a row-major matrix
    kTiled,   // the same of a matrix in which a page is contiguous
    kLinear,  // bulk copy of a contiguous page
    kHalves,  // two boxes of 64 rows
    kShared,  // the same from two warps
};

struct PageRateParams {
    TensorMap rows, tiled, half;
    const uint8_t* linear;
    uint32_t form, pages, distinct, in_flight, columns;
    uint32_t reserved[9];
};

MEGAMOE_DEVICE void load(const PageRateParams& p, uint8_t* to, uint32_t page, uint32_t warp,
                         uint64_t& full) {
    const uint32_t across = p.columns / 128;
    const int32_t x = page % across * 128, y = page / across * 128;
    switch (Form(p.form)) {
        case Form::kRows:
            return ptx::load_box(to, p.rows, x, y, full);
        case Form::kTiled:
            return ptx::load_box(to, p.tiled, 0, page * 128, full);
        case Form::kLinear:
            return ptx::bulk_load(to, p.linear + uint64_t(page) * kPage, kPage, full);
        case Form::kHalves:
            ptx::load_box(to, p.half, x, y, full);
            return ptx::load_box(to + kPage / 2, p.half, x, y + 64, full);
        case Form::kShared:
            return ptx::load_box(to + warp * (kPage / 2), p.half, x, y + warp * 64, full);
    }
}

}  // namespace megamoe::attention

extern "C" __global__ void __launch_bounds__(64, 1)
    megamoe_page_rate(const __grid_constant__ megamoe::attention::PageRateParams p) {
    using namespace megamoe;
    using namespace megamoe::attention;
    extern __shared__ __align__(1024) uint8_t raw[];
    __shared__ uint64_t full[kSlots];
    const bool shared = Form(p.form) == Form::kShared;
    if (threadIdx.x == 0) {
        for (uint64_t& bar : full) ptx::barrier_init(bar, shared ? 2 : 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const uint32_t warp = threadIdx.x / 32;
    auto landed = [&](uint32_t i) {
        while (!ptx::try_wait(full[i % kSlots], i / kSlots & 1)) {
        }
    };
    if (ptx::lane() == 0 && (warp == 0 || shared)) {
        for (uint32_t i = 0; i < p.pages; ++i) {
            if (i >= p.in_flight) landed(i - p.in_flight);
            uint64_t& bar = full[i % kSlots];
            ptx::arrive_expect(bar, shared ? kPage / 2 : kPage);
            load(p, raw + i % kSlots * kPage, i % p.distinct * gridDim.x + blockIdx.x, warp, bar);
        }
        for (uint32_t i = p.pages - p.in_flight; i < p.pages; ++i) landed(i);
    }
    __syncthreads();
}

extern "C" {
__device__ const unsigned megamoe_page_rate_param_bytes =
    sizeof(megamoe::attention::PageRateParams);
}
