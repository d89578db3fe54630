// The instruction set as a Python dictionary; part of `native.describe()`.
#pragma once

#include <nanobind/nanobind.h>

namespace megamoe {

nanobind::dict describe_instruction();

}  // namespace megamoe
