// The functions that -fsanitize=thread makes roles.cpp call, without the sanitizer's runtime: they
// tell the World what the running fiber reads and writes. memcpy and memset, which the compiler
// leaves as calls, come here through the linker's --wrap.
#include "cpu/explore/access.hpp"

#include <cstdint>

#include "cpu/explore/world.hpp"

namespace megamoe::cpu::explore {
namespace {

struct Watched {
    World* world;
    uintptr_t begin;
    size_t bytes;
} watched;

inline void report(const void* address, size_t bytes, bool is_write) {
    if (uintptr_t(address) - watched.begin < watched.bytes)
        watched.world->access(address, bytes, is_write);
}

}  // namespace

void watch(World* world, const void* begin, size_t bytes) {
    watched = {world, uintptr_t(begin), bytes};
}

}  // namespace megamoe::cpu::explore

using megamoe::cpu::explore::report;

extern "C" {
void* __real_memcpy(void* to, const void* from, size_t n);
void* __real_memset(void* to, int value, size_t n);

void* __wrap_memcpy(void* to, const void* from, size_t n) {
    report(from, n, false);
    report(to, n, true);
    return __real_memcpy(to, from, n);
}
void* __wrap_memset(void* to, int value, size_t n) {
    report(to, n, true);
    return __real_memset(to, value, n);
}

#define MEGAMOE_ACCESS(n)                                           \
    void __tsan_read##n(void* p) { report(p, n, false); }           \
    void __tsan_write##n(void* p) { report(p, n, true); }           \
    void __tsan_unaligned_read##n(void* p) { report(p, n, false); } \
    void __tsan_unaligned_write##n(void* p) { report(p, n, true); }
MEGAMOE_ACCESS(1)
MEGAMOE_ACCESS(2)
MEGAMOE_ACCESS(4)
MEGAMOE_ACCESS(8)
MEGAMOE_ACCESS(16)
#undef MEGAMOE_ACCESS
void __tsan_read_range(void* p, size_t n) { report(p, n, false); }
void __tsan_write_range(void* p, size_t n) { report(p, n, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
