// Shape, layout and names: what Python reads instead of repeating it.

#include "megamoe/layout.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"
#include "cpu/gemm.hpp"
#include "cpu/isa.hpp"
#include "megamoe/fault.hpp"
#include "megamoe/trace.hpp"

namespace nb = nanobind;

namespace megamoe {
namespace {

template <size_t N>
nb::list names(const char* const (&texts)[N]) {
    nb::list out;
    for (const char* text : texts) out.append(text);
    return out;
}

nb::dict describe() {
#define X(id, text) text,
    static const char* const kRoles[] = {MEGAMOE_ROLES(X)};
    static const char* const kPhases[] = {MEGAMOE_PHASES(X)};
    static const char* const kTags[] = {MEGAMOE_TAGS(X)};
    static const char* const kRegions[] = {MEGAMOE_REGIONS(X)};
    static const char* const kTraceRoles[] = {MEGAMOE_TRACE_ROLES(X)};
    static const char* const kTraceKinds[] = {MEGAMOE_TRACE_KINDS(X)};
#undef X
#define X(name) #name,
    static const char* const kShape[] = {MEGAMOE_SHAPE_FIELDS(X)};
    static const char* const kFault[] = {MEGAMOE_FAULT_FIELDS(X)};
#undef X
    nb::dict d;
    d["version"] = MEGAMOE_VERSION;
    d["roles"] = names(kRoles);
    d["phases"] = names(kPhases);
    d["tags"] = names(kTags);
    d["regions"] = names(kRegions);
    d["shape_fields"] = names(kShape);
    d["fault_fields"] = names(kFault);
    d["trace_roles"] = names(kTraceRoles);
    d["trace_kinds"] = names(kTraceKinds);
    nb::list trace_fields;
#define X(type, name) \
    trace_fields.append(std::make_tuple(#name, "<u" + std::to_string(sizeof(type))));
    MEGAMOE_TRACE_FIELDS(X)
#undef X
    d["trace_fields"] = trace_fields;
    nb::list isas;
    for (cpu::Isa isa : cpu::kAllIsas)
        if (cpu::isa_available(isa)) isas.append(cpu::isa_name(isa));
    d["cpu_isas"] = isas;
    d["cpu_l2_tile_n"] = cpu::kL2TileN;
    return d;
}

}  // namespace

void bind_layout(nb::module_& m) {
    nb::class_<MoEShape>(m, "MoEShape")
        .def("__init__",
             [](MoEShape* self, nb::kwargs fields) {
                 new (self) MoEShape{};
#define X(name)                                                                      \
    if (!fields.contains(#name)) throw std::invalid_argument("MoEShape: no " #name); \
    self->name = nb::cast<uint32_t>(fields[#name]);
                 MEGAMOE_SHAPE_FIELDS(X)
#undef X
             })
#define X(name) .def_ro(#name, &MoEShape::name)
            MEGAMOE_SHAPE_FIELDS(X)
#undef X
        .def_prop_ro("l1_tiles", &MoEShape::l1_tiles)
        .def_prop_ro("l2_tiles", &MoEShape::l2_tiles)
        .def_prop_ro("rings_fit", &MoEShape::rings_fit)
        .def("to_bytes", [](const MoEShape& s) {
            return nb::bytes(reinterpret_cast<const char*>(&s), sizeof s);
        });

    m.def(
        "window_layout",
        [](const MoEShape& shape) {
            const WindowLayout w = make_window_layout(shape);
            std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> regions;
#define X(id, text) \
    regions.emplace_back(text, w[Region::id].offset, w[Region::id].count, w[Region::id].stride);
            MEGAMOE_REGIONS(X)
#undef X
            return std::make_tuple(regions, w.num_bytes);
        },
        nb::arg("shape"), "([(region, offset, count, stride)], num_bytes), in bytes.");
    m.def(
        "window_layout_bytes",
        [](const MoEShape& shape) {
            const WindowLayout w = make_window_layout(shape);
            return nb::bytes(reinterpret_cast<const char*>(&w), sizeof w);
        },
        nb::arg("shape"), "The WindowLayout struct itself, as kernels take it.");
    m.def(
        "clear_span",
        [](const MoEShape& shape) {
            const WindowLayout w = make_window_layout(shape);
            return std::make_tuple(w.clear_begin(), w.clear_end());
        },
        nb::arg("shape"), "Bytes [begin, end) of a window that reset() clears.");
    m.def("describe", &describe, "Names and facts that Python reads instead of repeating them.");
}

}  // namespace megamoe
