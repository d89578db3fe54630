"""NVML sampler: what a GPU's clocks, power, energy, temperature and links say, in base units.

What cannot be read is absent from a reading, never zero, and a machine without NVML gives readings
that say why. Field 186 is instantaneous power; NVML's plain power query is an average over a
second on Hopper. Energy is a counter that moves in steps: take differences over seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

__all__ = ["CLOCKS_EVENTS", "Reading", "Sampler", "open_nvml"]

CLOCKS_EVENTS: Final[dict[int, str]] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of ``nvmlDeviceGetCurrentClocksEventReasons``, by nvml.h's names."""

POWER_INSTANT: Final = 186  # NVML_FI_DEV_POWER_INSTANT, mW
NVLINK_DATA_TX: Final = 138  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, KiB
NVLINK_DATA_RX: Final = 139  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, KiB
ALL_LINKS: Final = 0xFFFFFFFF  # scope: the sum over links


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a device.

    Attributes:
        device: the GPU's name and UUID, or empty.
        values: by name, in the unit that the name ends in: ``sm_clock_hertz``,
            ``memory_clock_hertz``, ``power_watts``, ``power_limit_watts``, ``energy_joules_total``,
            ``temperature_celsius``, ``memory_used_bytes``, ``memory_total_bytes``,
            ``nvlink_transmit_bytes_total``, ``nvlink_receive_bytes_total``,
            ``utilization_ratio``. Only what could be read.
        clocks_events: by name, whether the driver holds clocks back for it; None when unread.
        unavailable: why there is nothing to read, or empty.
    """

    device: str = ""
    values: dict[str, float] = field(default_factory=dict)
    clocks_events: dict[str, bool] | None = None
    unavailable: str = ""


def open_nvml() -> ModuleType | str:
    """The initialised ``pynvml`` module, or why there is none."""
    try:
        import pynvml
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    return pynvml  # type: ignore[no-any-return]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Sampler:
    """Reads one GPU, on demand or from a thread.

    Args:
        gpu: UUID (``GPU-...``) or NVML index of the device, or None for a rank without a GPU.
        nvml: the module to ask, or why there is none; by default ``open_nvml()``.
    """

    def __init__(self, gpu: str | int | None, nvml: ModuleType | str | None = None) -> None:
        self._unavailable = ""
        self._device = ""
        self._handle: Any = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if gpu is None:
            self._unavailable = "the rank runs without a GPU"
            return
        found = open_nvml() if nvml is None else nvml
        if isinstance(found, str):
            self._unavailable = found
            return
        self._nvml: Any = found
        try:
            if isinstance(gpu, int):
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu)
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(gpu)
            name = _text(self._nvml.nvmlDeviceGetName(self._handle))
            self._device = f"{name} {_text(self._nvml.nvmlDeviceGetUUID(self._handle))}"
        except self._nvml.NVMLError as error:
            self._unavailable = f"NVML has no GPU {gpu}: {error}"

    def read(self) -> Reading:
        """One reading, now. Never raises for a sensor that does not answer."""
        if self._unavailable:
            return Reading(unavailable=self._unavailable)
        nvml, gpu = self._nvml, self._handle
        values: dict[str, float] = {}

        def take(name: str, scale: float, query: Callable[[], float]) -> None:
            with contextlib.suppress(nvml.NVMLError):
                values[name] = query() * scale

        take("sm_clock_hertz", 1e6, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
        take(
            "memory_clock_hertz", 1e6, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)
        )
        take("power_limit_watts", 1e-3, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        take("energy_joules_total", 1e-3, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
        take(
            "temperature_celsius",
            1.0,
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        )
        take("utilization_ratio", 1e-2, lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        take("memory_used_bytes", 1.0, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used)
        take("memory_total_bytes", 1.0, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total)
        for name, scale, number in (
            ("power_watts", 1e-3, (POWER_INSTANT, 0)),
            ("nvlink_transmit_bytes_total", 1024.0, (NVLINK_DATA_TX, ALL_LINKS)),
            ("nvlink_receive_bytes_total", 1024.0, (NVLINK_DATA_RX, ALL_LINKS)),
        ):
            value = self._field(number)
            if value is not None:
                values[name] = value * scale
        events: dict[str, bool] | None = None
        with contextlib.suppress(nvml.NVMLError):
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
            events = {name: bool(bits & bit) for bit, name in CLOCKS_EVENTS.items()}
        return Reading(device=self._device, values=values, clocks_events=events)

    def _field(self, number: tuple[int, int]) -> float | None:
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            found = nvml.nvmlDeviceGetFieldValues(self._handle, [number])[0]
            # A field has a return code of its own: an unsupported one reads as zero beside it.
            if found.nvmlReturn == nvml.NVML_SUCCESS:
                kinds = {
                    nvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
                    nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
                    nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
                    nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
                    nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
                }
                return float(getattr(found.value, kinds[found.valueType]))
        return None

    def start(self, sink: Callable[[Reading], None], period_s: float = 1.0) -> None:
        """Reads in a thread, once a period, and hands each reading to ``sink``."""

        def work() -> None:
            while not self._stop.wait(period_s):
                sink(self.read())

        self._thread = threading.Thread(target=work, name="telemetry", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
