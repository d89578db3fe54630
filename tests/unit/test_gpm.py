"""The GPU's own counters: what is read, scaled and left out; NVML is played by a module."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from launcher.gpm import RATES, Gpm, mean_rates


class Error(Exception):
    pass


class Metric(ctypes.Structure):
    _fields_ = [
        ("metricId", ctypes.c_uint),
        ("nvmlReturn", ctypes.c_uint),
        ("value", ctypes.c_double),
    ]


class Asked(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", Metric * 333),
    ]


def nvml(supported=True, values=None, fails=()):
    """A module with samples 1 and 2, taken in order."""
    made, taken = [], []

    def alloc():
        made.append(ctypes.c_void_p(len(made) + 1))
        return made[-1]

    def get(handle, sample):
        assert handle == "handle"
        if "sample" in fails:
            raise Error("no right to")
        taken.append(sample.value)

    def metrics(asked):
        assert taken == [1, 2]
        assert (asked.sample1, asked.sample2) == (1, 2)
        assert asked.version == 1
        for metric in asked.metrics[: asked.numMetrics]:
            known = values.get(metric.metricId)
            metric.nvmlReturn, metric.value = (3, 0.0) if known is None else (0, known)

    return SimpleNamespace(
        NVMLError=Error,
        NVML_SUCCESS=0,
        NVML_GPM_METRICS_GET_VERSION=1,
        c_nvmlGpmMetricsGet_t=Asked,
        nvmlDeviceGetHandleByUUID=lambda uuid: "handle",
        nvmlGpmQueryDeviceSupport=lambda h: SimpleNamespace(isSupportedDevice=int(supported)),
        nvmlGpmSampleAlloc=alloc,
        nvmlGpmSampleGet=get,
        nvmlGpmMetricsGet=metrics,
    )


def test_rates_have_their_units_and_unread_ones_are_absent():
    gpm = Gpm("GPU-1", nvml(values={2: 97.5, 10: 50.0, 60: 2.0}))
    gpm.begin()
    assert gpm.end() == {
        "sm_active": pytest.approx(0.975),
        "memory_active": pytest.approx(0.5),
        "nvlink_receive_bytes_per_second": 2.0 * 1048576,
    }
    assert gpm.unavailable == ""


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("nvidia-ml-py is not installed", "not installed"),
        (nvml(supported=False), "no GPM for this GPU"),
        (nvml(fails=("sample",)), "no right to"),
    ],
)
def test_without_counters_nothing_is_raised(module, why):
    gpm = Gpm("GPU-1", module)
    gpm.begin()
    assert gpm.end() == {}
    assert why in gpm.unavailable


def test_the_module_of_this_machine_has_what_is_asked_for():
    pynvml = pytest.importorskip("pynvml")
    names = {2: "SM_UTIL", 3: "SM_OCCUPANCY", 5: "ANY_TENSOR_UTIL", 10: "DRAM_BW_UTIL"}
    names |= {60: "NVLINK_TOTAL_RX_PER_SEC", 61: "NVLINK_TOTAL_TX_PER_SEC"}
    assert {number for number, _ in RATES.values()} == set(names)
    for number, name in names.items():
        assert getattr(pynvml, f"NVML_GPM_METRIC_{name}") == number
    fields = dict(f[:2] for f in pynvml.c_nvmlGpmMetricsGet_t._fields_)
    assert fields.keys() == {f[0] for f in Asked._fields_}


def test_means_are_of_what_all_ranks_read():
    every = [{"sm_active": 0.5, "tensor_active": 0.25}, {"sm_active": 1.0}]
    assert mean_rates(every) == {"sm_active": 0.75}
