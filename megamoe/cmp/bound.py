"""A plan's kernels on one set of tensors, ready to be launched."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megamoe.attention_pre.encode import EncodedPlan, encode, operand_table
from megamoe.attention_pre.plan import KernelPlan
from megamoe.attention_pre.tiling import Specialization
from megamoe.backends.attention_operands import check_tensor, mapped_rows, stage_maps
from megamoe.backends.cuda_driver import Module, check, driver_api
from megamoe.cmp.dag import Edge, data_edges
from megamoe.cmp.kernels import (
    Part,
    Shape,
    StandaloneKernel,
    Wait,
    compile_kernel,
    kernel_shape,
    standalone_kernels,
)
from megamoe.cmp.tuning import TRIGGERS, TUNING, Tuning
from megamoe.errors import BackendUnavailable, MegaMoeError, SpecError

__all__ = ["BoundCmp", "BoundKernel", "with_wait"]

_STAMPS: Final = 7


class _CmpParams(ctypes.Structure):
    """``CmpParams`` of csrc/cmp/params.cuh; sizes are compared on loading."""

    _fields_ = (
        ("maps", ctypes.c_uint8 * 256),
        ("operands", ctypes.c_uint64 * 16),
        ("task", ctypes.c_uint32 * 32),
        ("grid", ctypes.c_uint32 * 6),
        ("num_tokens", ctypes.c_uint32),
        ("trigger", ctypes.c_uint32),
        ("table", ctypes.c_uint64),
        ("stamps", ctypes.c_uint64),
        ("delay_ns", ctypes.c_uint64),
        ("in_flight", ctypes.c_uint32),
        ("padding", ctypes.c_uint8 * 4),
    )


@dataclass(frozen=True)
class _Loaded:
    module: Module
    function: Any
    threads: int
    shared_bytes: int


def _shape(kernel: StandaloneKernel, tuned: Tuning) -> Shape:
    pages, ctas, at_once = tuned.weight_pages, tuned.ctas, tuned.at_once
    return kernel_shape(kernel, pages, ctas, at_once, tuned.registers)


def _compile(kernel: StandaloneKernel, tuned: Tuning, trace: bool) -> None:
    """Into the cache."""
    shape = _shape(kernel, tuned)
    compile_kernel(kernel.specialization, kernel.part, shape, wait=tuned.wait, trace=trace)


_LOADED: dict[tuple[int, Specialization, Part, Shape, Wait, bool], _Loaded] = {}


def _load(kernel: StandaloneKernel, shape: Shape, wait: Wait, trace: bool) -> _Loaded:
    """A compiled kernel on the current device; loaded once."""
    key = torch.cuda.current_device(), kernel.specialization, kernel.part, shape, wait, trace
    if key not in _LOADED:
        driver = driver_api()
        cubin = compile_kernel(kernel.specialization, kernel.part, shape, wait=wait, trace=trace)
        if cubin.constant("megamoe_cmp_param_bytes") != ctypes.sizeof(_CmpParams):
            raise MegaMoeError("the kernel's parameters are not those of megamoe/cmp/bound.py")
        module = Module(cubin.image)
        function = module.function("megamoe_cmp")
        shared = cubin.constant("megamoe_cmp_shared_bytes")
        names = driver.CUfunction_attribute
        for attribute, value in (
            (names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            # All of it, so that kernels side by side do not ask for other splits of L1.
            (names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            what = f"{kernel.name}: {shared} bytes of shared memory"
            check(driver.cuFuncSetAttribute(function, attribute, value), what)
        _LOADED[key] = _Loaded(module, function, cubin.constant("megamoe_cmp_threads"), shared)
    return _LOADED[key]


@dataclass
class BoundKernel:
    """A kernel with its launch shape and parameters.

    Attributes:
        kernel: what it is.
        function: the driver's handle.
        threads: of a CTA.
        shared_bytes: of a CTA.
        priority: see ``Tuning``.
        params: copied by every launch.
    """

    kernel: StandaloneKernel
    function: Any
    threads: int
    shared_bytes: int
    priority: int
    params: ctypes.Structure

    @property
    def pointers(self) -> int:
        """Address of the array of parameter addresses."""
        self._array = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        return ctypes.addressof(self._array)


class BoundCmp:
    """A plan as standalone kernels on one set of tensors.

    Args:
        plan: made with ``final="rows"`` or ``"all"``.
        tensors: every buffer that the plan names, on the current device.
        tuning: by kernel name; the others take ``TUNING``'s.
        like: another one of the same plan and tuning, on other tensors: what does not depend on
            these is taken from it.
        only: names of the kernels to run, where not all.
        trace: whether kernels note when their CTAs entered, had their inputs, and ended.

    Attributes:
        kernels: in an order in which each follows its producers.
        edges: (producer, consumer), by data.

    Raises:
        BackendUnavailable: no Hopper GPU.
        SpecError: a tensor does not fit, or the plan has no standalone form.
    """

    def __init__(
        self,
        plan: KernelPlan,
        tensors: Mapping[str, Tensor],
        *,
        tuning: Mapping[str, Tuning] | None = None,
        like: BoundCmp | None = None,
        only: Collection[str] = (),
        trace: bool = False,
    ) -> None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            raise BackendUnavailable("these kernels need a Hopper GPU (compute capability 9.0)")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.plan = plan
        wanted = {**TUNING, **(tuning or {})}
        self._every: tuple[tuple[StandaloneKernel, ...], EncodedPlan]
        if like is None:
            columns = {name: tuned.columns for name, tuned in wanted.items()}
            rows_of = {name: tuned.rows for name, tuned in wanted.items()}
            self._every = standalone_kernels(plan, columns, rows_of), encode(plan)
        else:
            self._every = like._every
        parts = [k for k in self._every[0] if not only or k.name in only]
        encoded = self._every[1]
        self.edges: tuple[Edge, ...] = data_edges(parts)
        for name, buffer in encoded.buffers.items():
            if name not in tensors:
                raise SpecError(f"no tensor {name!r}: the plan needs {', '.join(encoded.buffers)}")
            check_tensor(buffer, tensors[name], self.device)
        table = operand_table(encoded, {n: tensors[n].data_ptr() for n in encoded.buffers})
        rows = mapped_rows(encoded)
        self._tensors = dict(tensors)  # kept alive
        self._tables: list[Tensor] = []
        self.kernels: list[BoundKernel] = []
        self._stamps: dict[str, Tensor] = {}
        if like is None:
            with ThreadPoolExecutor(8) as pool:  # the compiler runs without Python's lock
                list(pool.map(lambda k: _compile(k, wanted.get(k.name, Tuning()), trace), parts))
        for part in parts:
            row = plan.rows.index(part.row)
            maps = bytes(256)
            if row in rows and part.specialization.opcode == rows[row].opcode:
                stage = plan.operands[row]
                operands = {role: tensors[name] for role, name in stage.items()}
                maps = stage_maps(rows[row], operands)
            tuned = wanted.get(part.name, Tuning())
            self.kernels.append(self._bind(part, tuned, table[row], maps, trace))

    def _bind(
        self,
        part: StandaloneKernel,
        tuned: Tuning,
        operands: NDArray[np.uint64],
        maps: bytes,
        trace: bool,
    ) -> BoundKernel:
        loaded = _load(part, _shape(part, tuned), tuned.wait, trace)
        params = _CmpParams(num_tokens=self.plan.batch.rows, trigger=TRIGGERS.index(tuned.trigger))
        pages = _shape(part, tuned).weight_pages
        params.in_flight = min(tuned.in_flight or pages, pages)
        params.maps[:] = maps
        params.operands[:] = operands.tolist()
        params.task[:] = part.task.tolist()
        if part.grid is not None:
            params.grid[:] = list(part.grid.words)
        if part.table is not None:
            table = torch.from_numpy(part.table.view(np.int32)).to(self.device)
            self._tables.append(table)
            params.table = table.data_ptr()
        if trace:
            self._stamps[part.name] = torch.zeros(
                part.ctas, _STAMPS, dtype=torch.int64, device=self.device
            )
            params.stamps = self._stamps[part.name].data_ptr()
        return BoundKernel(
            part, loaded.function, loaded.threads, loaded.shared_bytes, tuned.priority, params
        )

    def delay(self, name: str, microseconds: float) -> None:
        """Makes a kernel sleep between its wait and its body, in graphs made from now on.

        For tests: a consumer that does not wait for it then reads what was there before.
        """
        for bound in self.kernels:
            if bound.kernel.name == name:
                bound.params.delay_ns = int(microseconds * 1e3)
                return
        raise SpecError(
            f"no kernel {name!r}: there are {', '.join(b.kernel.name for b in self.kernels)}"
        )

    def stamps(self) -> dict[str, NDArray[np.int64]]:
        """With ``trace``, ns of the last run, [CTAs, 7].

        Entered, producers done, none, first operands there, main loop done, stored; last the SM.
        """
        return {name: t.cpu().numpy() for name, t in self._stamps.items()}

    def span_us(self) -> float:
        """With ``trace``: from the first CTA's entry to the last one's end, in the last run."""
        stamps = self.stamps().values()
        first = min(int(s[:, 0].min()) for s in stamps)
        return (max(int(s[:, 5].max()) for s in stamps) - first) / 1e3


def with_wait(tuning: Mapping[str, Tuning], name: str, wait: Wait) -> dict[str, Tuning]:
    """The tuning with another place of one kernel's wait."""
    return {**tuning, name: replace(tuning.get(name, Tuning()), wait=wait)}
