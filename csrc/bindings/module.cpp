// The nanobind module `megamoe._native`: the only place of the C++ tree that sees Python.

#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"
#include "bindings/describe_instruction.hpp"

NB_MODULE(_native, m) {
    m.doc() = "Compiled part of megamoe; use it through megamoe.native.";
    megamoe::bind_layout(m);
    megamoe::bind_schedule(m);
    megamoe::bind_session(m);
    m.def("describe_instruction", &megamoe::describe_instruction);
}
