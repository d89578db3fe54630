// The nanobind module `megamoe._native`: the only place of the C++ tree that sees Python.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "Compiled part of megamoe; use it through megamoe.native.";
    m.def(
        "describe",
        [] {
            nb::dict description;
            description["version"] = MEGAMOE_VERSION;
            return description;
        },
        "Facts that Python reads instead of repeating them.");
}
