// The one place that tells host from device compilation. NVRTC has no <cstdint>; libcu++ has.
#pragma once

#if defined(__CUDACC__)
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#define MEGAMOE_HD __host__ __device__ __forceinline__
namespace megamoe {
using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::size_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint64_t;
using cuda::std::uint8_t;
}  // namespace megamoe
#else
#include <cstddef>
#include <cstdint>
#define MEGAMOE_HD inline
namespace megamoe {
using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
}  // namespace megamoe
#endif

namespace megamoe {

// Control words sit on lines of their own: a spinning reader must not slow its neighbours.
inline constexpr uint32_t kLineBytes = 128;
// Columns that share one activation scale; side of a weight scale block.
inline constexpr uint32_t kGroup = 128;

MEGAMOE_HD constexpr uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
MEGAMOE_HD constexpr uint64_t align_up(uint64_t a, uint64_t b) { return (a + b - 1) / b * b; }

}  // namespace megamoe
