"""A node of the graph that brings later stages' weights into L2."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from megamoe import jit
from megamoe.attention_pre.tiling import Specialization
from megamoe.backends.cuda_driver import Module
from megamoe.cmp.kernels import StandaloneKernel
from megamoe.errors import MegaMoeError, SpecError

__all__ = ["PREFETCH", "Prefetch", "PrefetchParams", "compile_prefetch", "prefetch_function"]

_MAX_RANGES: Final = 4
PREFETCH: Final = "PF"
"""Name of the node."""


@dataclass(frozen=True)
class Prefetch:
    """What is brought into L2, and when.

    Attributes:
        weights: names, in the order in which they are asked for; at most 4.
        megabytes: of all of them together; the rest is left to its readers.
        cycles: at least, between two requests of an SM: a backlog would delay all others.
        chunk: bytes of a request.
        after: the kernel that lets the node in; empty: it begins with the run.
    """

    weights: tuple[str, ...] = ("w_index_q", "w_q_b", "w_uk")
    megabytes: float = 32
    cycles: int = 900
    chunk: int = 16384
    after: str = "B0p"


class PrefetchParams(ctypes.Structure):
    """``PrefetchParams`` of csrc/cmp/prefetch.cu."""

    _fields_ = (
        ("address", ctypes.c_uint64 * _MAX_RANGES),
        ("bytes", ctypes.c_uint64 * _MAX_RANGES),
        ("chunk", ctypes.c_uint32),
        ("cycles", ctypes.c_uint32),
    )

    @staticmethod
    def of(prefetch: Prefetch, tensors: Mapping[str, Tensor]) -> PrefetchParams:
        """Parameters for one set of tensors.

        Raises:
            SpecError: too many weights, or a name that is not there.
        """
        if len(prefetch.weights) > _MAX_RANGES:
            raise SpecError(f"{len(prefetch.weights)} weights to prefetch: at most {_MAX_RANGES}")
        params = PrefetchParams(chunk=prefetch.chunk, cycles=prefetch.cycles)
        left = int(prefetch.megabytes * 1e6)
        for i, name in enumerate(prefetch.weights):
            if name not in tensors:
                raise SpecError(f"no weight {name!r} to prefetch")
            size = min(tensors[name].nbytes, left) // prefetch.chunk * prefetch.chunk
            params.address[i], params.bytes[i] = tensors[name].data_ptr(), size
            left -= size
        return params


def compile_prefetch() -> jit.Cubin:
    """The kernel. Needs no GPU."""
    return jit.compile_cubin("cmp/prefetch.cu", {})


@cache
def prefetch_function(device: int) -> tuple[Module, Any]:
    """The kernel, loaded on a device."""
    cubin = compile_prefetch()
    if cubin.constant("megamoe_prefetch_param_bytes") != ctypes.sizeof(PrefetchParams):
        raise MegaMoeError("the kernel's parameters are not those of megamoe/cmp/prefetch.py")
    module = Module(cubin.image)
    return module, module.function("megamoe_prefetch")


def prefetch_node(device: torch.device) -> StandaloneKernel:
    """The node among the kernels: it reads and stores no tensor of the graph."""
    return StandaloneKernel(
        name=PREFETCH,
        row="",
        part="whole",
        specialization=Specialization("no_op", 0, 0, 0, 0, 0),
        reads=(),
        writes=(),
        task=np.zeros(0, np.uint32),
        grid=None,
        table=None,
        ctas=torch.cuda.get_device_properties(device).multi_processor_count,
    )
