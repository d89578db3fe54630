// Where the instrumentation of roles.cpp reports plain accesses to.
#pragma once

#include <cstddef>

namespace megamoe::cpu::explore {

class World;

// From now on accesses in [begin, begin + bytes) go to `world`; null: none.
void watch(World* world, const void* begin, size_t bytes);

}  // namespace megamoe::cpu::explore
