"""What a GPU's own counters say of a span of time, through NVML's GPM (Hopper and later).

Two samples are taken while the GPU works, and NVML gives the rates between them. Nothing of the
device is set, and no profiler is opened.
"""

from __future__ import annotations

from typing import Any, Final

from megamoe.telemetry import open_nvml

__all__ = ["RATES", "Gpm", "mean_rates"]

RATES: Final[dict[str, tuple[int, float]]] = {
    "sm_active": (2, 1e-2),
    "sm_occupancy": (3, 1e-2),
    "tensor_active": (5, 1e-2),
    "memory_active": (10, 1e-2),
    "nvlink_receive_bytes_per_second": (60, float(1 << 20)),
    "nvlink_transmit_bytes_per_second": (61, float(1 << 20)),
}
"""Name, number in nvml.h (``NVML_GPM_METRIC_…``), and what its percent or MiB are multiplied by:
shares of time or of the peak bandwidth, and bytes per second over all links."""


class Gpm:
    """Samples of one GPU.

    Args:
        gpu: its UUID (``GPU-…``).
        nvml: the module to ask, or why there is none; by default ``open_nvml()``.

    Attributes:
        unavailable: why there are no counters, or empty.
    """

    def __init__(self, gpu: str, nvml: Any = None) -> None:
        self.unavailable = ""
        found = open_nvml() if nvml is None else nvml
        if isinstance(found, str):
            self.unavailable = found
            return
        self._nvml: Any = found
        try:
            self._handle = found.nvmlDeviceGetHandleByUUID(gpu)
            if not found.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                self.unavailable = "NVML has no GPM for this GPU"
                return
            self._samples = [found.nvmlGpmSampleAlloc() for _ in range(2)]
        except (found.NVMLError, AttributeError) as error:
            self.unavailable = f"NVML's GPM: {error}"

    def begin(self) -> None:
        """Takes the first sample."""
        self._take(0)

    def end(self) -> dict[str, float]:
        """Takes the second sample; rates since ``begin``, only those that could be read.

        At least a tenth of a second should lie between.
        """
        self._take(1)
        if self.unavailable:
            return {}
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(RATES)
        asked.sample1, asked.sample2 = self._samples
        for i, (number, _) in enumerate(RATES.values()):
            asked.metrics[i].metricId = number
        try:
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError as error:
            self.unavailable = f"NVML's GPM: {error}"
            return {}
        return {
            name: asked.metrics[i].value * scale
            for i, (name, (_, scale)) in enumerate(RATES.items())
            # A metric has a return code of its own.
            if asked.metrics[i].nvmlReturn == nvml.NVML_SUCCESS
        }

    def _take(self, which: int) -> None:
        if self.unavailable:
            return
        try:
            self._nvml.nvmlGpmSampleGet(self._handle, self._samples[which])
        except self._nvml.NVMLError as error:
            self.unavailable = f"NVML's GPM: {error}"


def mean_rates(of_ranks: list[dict[str, float]]) -> dict[str, float]:
    """Means over ranks, of what all of them could read."""
    return {
        name: round(sum(rates[name] for rates in of_ranks) / len(of_ranks), 4)
        for name in RATES
        if all(name in rates for rates in of_ranks)
    }
