// One function per file of this folder, each adding its part to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace megamoe {

void bind_layout(nanobind::module_& m);    // MoEShape, window layout, describe()
void bind_schedule(nanobind::module_& m);  // tile order and row sources, for tests and `plan`
void bind_session(nanobind::module_& m);   // the CPU backend

}  // namespace megamoe
