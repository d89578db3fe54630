"""How fast an SM brings pages of weights: ``python -m launcher.probe_pages`` on a Hopper GPU.

The attention-pre kernel streams pages of 16 KiB, boxes of 128 rows by 128 bytes, one thread per SM
(``docs/attention_pre.md``). This is what that can reach, by the form of the copy, the pages in
flight, and whether L2 holds them. Times are the difference between a long and a short launch, so
that neither launch nor first touches count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

import torch

from launcher.script import need_hopper, run_script
from megamoe import jit
from megamoe.backends.cuda_driver import Kernel, Module, tensor_map
from megamoe.errors import MegaMoeError

__all__ = ["FORMS", "compile_probe", "main", "measure"]

PAGE: Final = 16384
SLOTS: Final = 12
COLUMNS: Final = 2048
FORMS: Final = ("rows", "tiled", "linear", "halves", "halves, two warps")
_SHORT, _LONG = 180, 900


class _Params(ctypes.Structure):
    """``PageRateParams`` of csrc/attention_pre/page_rate.cu."""

    _fields_ = (
        ("rows", ctypes.c_uint8 * 128),
        ("tiled", ctypes.c_uint8 * 128),
        ("half", ctypes.c_uint8 * 128),
        ("linear", ctypes.c_uint64),
        ("form", ctypes.c_uint32),
        ("pages", ctypes.c_uint32),
        ("distinct", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 9),
    )


def compile_probe() -> jit.Cubin:
    """The probe. Needs no GPU."""
    return jit.compile_cubin("attention_pre/page_rate.cu", {})


def measure(in_flight: int, form: int, distinct: int) -> float:
    """Nanoseconds per page and SM, all SMs at once.

    Args:
        in_flight: pages of an SM under way, 1..12.
        form: index into ``FORMS``.
        distinct: pages of an SM before it starts again: 9 stay in L2, 900 do not.
    """
    cubin = compile_probe()
    if cubin.constant("megamoe_page_rate_param_bytes") != ctypes.sizeof(_Params):
        raise MegaMoeError("the probe's parameters are not those of launcher/probe_pages.py")
    kernel = Kernel(Module(cubin.image), "megamoe_page_rate", threads=64, shared_bytes=SLOTS * PAGE)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    pages = -(-sms * distinct * 128 // COLUMNS) * (COLUMNS // 128)
    data = torch.randint(0, 255, (pages * PAGE,), dtype=torch.uint8, device="cuda")
    rows = data.numel() // COLUMNS
    params = _Params(linear=data.data_ptr(), form=form, distinct=distinct, in_flight=in_flight)
    params.columns = COLUMNS

    def box(columns: int, height: int) -> bytes:
        return tensor_map(
            data.data_ptr(),
            columns=columns,
            rows=data.numel() // columns,
            box=(128, height),
            element_bytes=1,
        )

    assert rows % 128 == 0
    for name, made in (
        ("rows", box(COLUMNS, 128)),
        ("half", box(COLUMNS, 64)),
        ("tiled", box(128, 128)),
    ):
        ctypes.memmove(getattr(params, name), made, 128)
    stream = torch.cuda.current_stream().cuda_stream
    took: list[float] = []
    for count in (_SHORT, _LONG):
        params.pages = count
        for _ in range(2):
            kernel.launch(sms, params, stream)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        begin.record()
        for _ in range(5):
            kernel.launch(sms, params, stream)
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) * 1e6 / 5)
    return (took[1] - took[0]) / (_LONG - _SHORT)


def main() -> None:
    """Prints a table of nanoseconds per page, and what all SMs together read."""
    need_hopper("the probe")
    sources: Mapping[str, int] = {"L2": 9, "memory": 900}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for source, distinct in sources.items():
        for form, name in enumerate(FORMS):
            for in_flight in (1, 2, 4, 8, 12):
                ns = measure(in_flight, form, distinct)
                print(
                    f"| {source} | {name} | {in_flight} in flight | {ns:.0f} ns per page | "
                    f"{PAGE * sms / ns / 1e3:.2f} TB/s |",
                    flush=True,
                )


if __name__ == "__main__":
    run_script(main)
