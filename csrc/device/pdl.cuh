// Programmatic dependent launch: a kernel may begin before the kernels that it depends on have
// ended.
#pragma once

#include "device/ptx.cuh"

namespace megamoe::ptx {

// Lets dependent kernels be scheduled, once a thread of every CTA has said so or its CTA has ended.
// Says nothing about data.
MEGAMOE_DEVICE void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Returns when all kernels that this one directly depends on have ended and their stores are
// visible to this grid; at once where it was launched without a programmatic dependence. The
// compiler moves no load above it.
MEGAMOE_DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace megamoe::ptx
