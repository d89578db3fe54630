// The instruction set as a Python dictionary: `native.describe_instruction()`.
#pragma once

#include <nanobind/nanobind.h>

namespace megamoe {

nanobind::dict describe_instruction();

}  // namespace megamoe
