"""The sampler against a stand-in for NVML: units, names, and what is absent stays absent."""

from __future__ import annotations

import threading
import types

import pytest

from megamoe.telemetry import CLOCKS_EVENTS, Sampler, open_nvml


class NVMLError(Exception):
    pass


def fake(broken: tuple[str, ...] = ()) -> types.ModuleType:
    """A module that answers like pynvml, but for the functions named in ``broken``."""
    nvml = types.ModuleType("pynvml")
    answers = {
        "nvmlDeviceGetHandleByIndex": lambda i: f"gpu{i}",
        "nvmlDeviceGetHandleByUUID": lambda u: f"gpu{u}",
        "nvmlDeviceGetName": lambda _: b"NVIDIA H200",
        "nvmlDeviceGetUUID": lambda _: "GPU-1",
        "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _: 123_456,
        "nvmlDeviceGetTemperature": lambda *_: 41,
        "nvmlDeviceGetUtilizationRates": lambda _: types.SimpleNamespace(gpu=75),
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(used=5 << 30, total=140 << 30),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x4 | 0x20,
        "nvmlDeviceGetFieldValues": field_values(broken),
    }

    def failing(*_):
        raise NVMLError("Not Supported")

    for name, answer in answers.items():
        setattr(nvml, name, failing if name in broken else answer)
    nvml.NVMLError = NVMLError
    nvml.NVML_SUCCESS = 0
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    for number, kind in enumerate(
        ("DOUBLE", "UNSIGNED_INT", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "SIGNED_LONG_LONG")
    ):
        setattr(nvml, f"NVML_VALUE_TYPE_{kind}", number)
    return nvml


def field_values(broken):
    readings = {186: (1, "uiVal", 651_000), 138: (3, "ullVal", 7), 139: (3, "ullVal", 9)}

    def answer(_, numbers):
        [(number, _scope)] = numbers
        kind, name, value = readings[number]
        bad = str(number) in broken
        return [
            types.SimpleNamespace(
                nvmlReturn=3 if bad else 0,
                valueType=kind,
                value=types.SimpleNamespace(**{name: 0 if bad else value}),
            )
        ]

    return answer


WANT = {
    "sm_clock_hertz": 1980e6,
    "memory_clock_hertz": 3201e6,
    "power_watts": 651.0,
    "power_limit_watts": 700.0,
    "energy_joules_total": 123.456,
    "temperature_celsius": 41.0,
    "utilization_ratio": 0.75,
    "memory_used_bytes": float(5 << 30),
    "memory_total_bytes": float(140 << 30),
    "nvlink_transmit_bytes_total": 7 * 1024.0,
    "nvlink_receive_bytes_total": 9 * 1024.0,
}


@pytest.mark.parametrize("gpu", [0, "GPU-1"])
def test_base_units_and_names(gpu):
    reading = Sampler(gpu, fake()).read()
    assert reading.values == pytest.approx(WANT)
    assert reading.device == "NVIDIA H200 GPU-1"
    assert not reading.unavailable
    active = {name for name, on in reading.clocks_events.items() if on}
    assert active == {"sw_power_cap", "sw_thermal_slowdown"}
    assert set(reading.clocks_events) == set(CLOCKS_EVENTS.values())


@pytest.mark.parametrize(
    ("broken", "absent"),
    [
        (("nvmlDeviceGetTotalEnergyConsumption",), {"energy_joules_total"}),
        (("nvmlDeviceGetClockInfo",), {"sm_clock_hertz", "memory_clock_hertz"}),
        (("186",), {"power_watts"}),  # the field answers 0 with an error code beside it
        (("138", "139"), {"nvlink_transmit_bytes_total", "nvlink_receive_bytes_total"}),
        (("nvmlDeviceGetFieldValues",), {"power_watts"} | {n for n in WANT if "nvlink" in n}),
    ],
)
def test_what_cannot_be_read_is_absent(broken, absent):
    reading = Sampler(0, fake(broken)).read()
    assert set(reading.values) == set(WANT) - absent
    assert reading.clocks_events is not None


def test_unread_clocks_events_are_none():
    reading = Sampler(0, fake(("nvmlDeviceGetCurrentClocksEventReasons",))).read()
    assert reading.clocks_events is None
    assert set(reading.values) == set(WANT)


def test_no_device_says_why():
    assert "without a GPU" in Sampler(None).read().unavailable
    reading = Sampler(3, fake(("nvmlDeviceGetHandleByIndex",))).read()
    assert "no GPU 3: Not Supported" in reading.unavailable
    reading = Sampler(0, "NVML: Driver Not Loaded").read()
    assert reading.unavailable == "NVML: Driver Not Loaded"
    assert reading.values == {}
    assert reading.clocks_events is None


def test_this_machine_reads_or_says_why():
    nvml = open_nvml()
    reading = Sampler(0, nvml).read()
    assert bool(reading.values) != bool(reading.unavailable)
    if isinstance(nvml, str):
        assert reading.unavailable == nvml


def test_thread_hands_over_readings():
    came, enough = [], threading.Event()

    def sink(reading):
        came.append(reading)
        if len(came) == 3:
            enough.set()

    sampler = Sampler(0, fake())
    sampler.start(sink, period_s=0.01)
    assert enough.wait(5)
    sampler.stop()
    count = len(came)
    assert count >= 3
    assert came[0].values == pytest.approx(WANT)
