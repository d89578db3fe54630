"""A kernel that holds SMs: what another stream does to a GPU."""

from __future__ import annotations

import ctypes

import torch

from megamoe import jit
from megamoe.backends.cuda_driver import Kernel, Module

SOURCE = b"""
struct Params { unsigned long long ns; };
extern "C" __global__ void hog(const __grid_constant__ Params p) {
    extern __shared__ char held[];
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < p.ns);
    if (now == 0) held[threadIdx.x] = 1;
}
"""


class _Params(ctypes.Structure):
    _fields_ = (("ns", ctypes.c_uint64),)


class Hog:
    """Holds SMs for a while: nothing else with much shared memory fits beside it."""

    def __init__(self) -> None:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"hog.cu", 0, [], [])
        (error,) = nvrtc.nvrtcCompileProgram(
            program, 1, [f"--gpu-architecture={jit.ARCH}".encode()]
        )
        assert int(error) == 0, error
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        image = bytes(size)
        nvrtc.nvrtcGetCUBIN(program, image)
        self._kernel = Kernel(Module(image), "hog", threads=32, shared_bytes=200 << 10)

    def hold(self, sms: int, seconds: float) -> torch.cuda.Event:
        """Enqueues it on the current stream; the event is its end."""
        params = _Params(ns=int(seconds * 1e9))
        self._kernel.launch(sms, params, torch.cuda.current_stream().cuda_stream)
        ended = torch.cuda.Event()
        ended.record()
        return ended
