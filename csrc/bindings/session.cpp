// The CPU backend's session. Tensors come as addresses: backends/cpu.py has checked them.

#include "cpu/session.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "cpu/isa.hpp"

namespace nb = nanobind;

namespace megamoe {
namespace {

template <class T>
T* address(uint64_t a) {
    return reinterpret_cast<T*>(a);
}

nb::dict fault_dict(const FaultRecord& r) {
    nb::dict d;
#define X(name) d[#name] = r.name;
    MEGAMOE_FAULT_FIELDS(X)
#undef X
    return d;
}

nb::dict stats_dict(const cpu::Stats& stats) {
    nb::dict d, blocked;
#define X(id, text) blocked[text] = stats.blocked[uint32_t(Tag::id)].load();
    MEGAMOE_TAGS(X)
#undef X
    d["blocked"] = blocked;
    d["high_water_l1"] = stats.high_water_l1.load();
    d["high_water_l2"] = stats.high_water_l2.load();
    return d;
}

}  // namespace

void bind_session(nb::module_& m) {
    using cpu::Session;
    nb::class_<Session>(m, "CpuSession")
        .def(
            "__init__",
            [](Session* self, const MoEShape& shape, uint32_t rank,
               const std::vector<uint64_t>& bases, float clamp, double limit_s) {
                std::vector<uint8_t*> pointers;
                for (uint64_t base : bases) pointers.push_back(address<uint8_t>(base));
                new (self)
                    Session(shape, rank, std::move(pointers), clamp, limit_s, cpu::best_isa());
            },
            nb::arg("shape"), nb::arg("rank"), nb::arg("bases"), nb::arg("clamp"),
            nb::arg("limit_s"))
        .def("load_expert",
             [](Session& s, uint32_t index, uint64_t w1, uint64_t w1_scale, uint64_t w2,
                uint64_t w2_scale) {
                 nb::gil_scoped_release release;
                 s.load_expert(index, address<void>(w1), address<float>(w1_scale),
                               address<void>(w2), address<float>(w2_scale));
             })
        .def("stage_bf16",
             [](Session& s, uint64_t x, uint32_t num_tokens) {
                 nb::gil_scoped_release release;
                 s.stage_bf16(address<uint16_t>(x), num_tokens);
             })
        .def("stage_fp8",
             [](Session& s, uint64_t x, uint64_t scale, uint32_t num_tokens) {
                 nb::gil_scoped_release release;
                 s.stage_fp8(address<uint8_t>(x), address<float>(scale), num_tokens);
             })
        .def("run",
             [](Session& s, uint32_t num_tokens, uint64_t topk_idx, uint64_t topk_weight,
                uint64_t y) {
                 nb::gil_scoped_release release;
                 return s.run(num_tokens, address<int32_t>(topk_idx), address<float>(topk_weight),
                              address<uint8_t>(y));
             })
        .def("host_barrier",
             [](Session& s, double limit_s) {
                 nb::gil_scoped_release release;
                 return s.host_barrier(limit_s);
             })
        .def("clear_state", &Session::clear_state)
        .def("clear_stats", &Session::clear_stats)
        .def("enable_trace", &Session::enable_trace)
        .def("trace",
             [](const Session& s) {  // bytes of [tracks] uint32 and of [tracks][capacity] events
                 const auto& recorded = s.trace().recorded();
                 const auto& events = s.trace().events();
                 return nb::make_tuple(nb::bytes(reinterpret_cast<const char*>(recorded.data()),
                                                 recorded.size() * sizeof(uint32_t)),
                                       nb::bytes(reinterpret_cast<const char*>(events.data()),
                                                 events.size() * sizeof(TraceEvent)));
             })
        .def_prop_ro("weights_loaded", &Session::weights_loaded)
        .def_prop_ro("faulted", &Session::faulted)
        .def_prop_ro("epoch", &Session::epoch)
        .def_prop_ro("isa", [](const Session& s) { return std::string(cpu::isa_name(s.isa())); })
        .def("fault", [](const Session& s) { return fault_dict(s.fault()); })
        .def("stats", [](const Session& s) { return stats_dict(s.stats()); });
}

}  // namespace megamoe
