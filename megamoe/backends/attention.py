"""The attention-pre megakernel on a Hopper GPU: plans compiled, bound to memory, launched.

    compile_attention   specialisations -> cubin (no GPU needed)
    AttentionKernel     cubin -> loaded kernel, shared by the plans that need no other body
    BoundPlan           plan + tensors -> launches

A plan is bound once. New addresses rebuild the operand table and the tensor maps (``rebind``), a
new plan uploads its instructions; the kernel is compiled again only when a plan asks for a
specialisation that it lacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from megamoe import jit
from megamoe.attention_pre.encode import EncodedPlan, instruction_format, operand_table
from megamoe.attention_pre.tiling import Specialization
from megamoe.backends.attention_operands import NO_PAGES, check_tensor, mapped_rows, stage_maps
from megamoe.backends.cuda_driver import Kernel, Module
from megamoe.errors import BackendUnavailable, MegaMoeError, SpecError
from megamoe.spec import GROUP

__all__ = [
    "IN_FLIGHT",
    "AttentionFault",
    "AttentionKernel",
    "BoundPlan",
    "compile_attention",
    "spec_macro",
]

_MAX_BAND: Final = 128
_MAX_TILES: Final = 2
_MAX_OPERAND_ROWS: Final = 16
_FAULT_WORDS: Final = 7
_STAMPS: Final = 7
IN_FLIGHT: Final = 3
"""48 KiB per SM reach 94 % of the memory's rate; with more, fences and inputs queue longer."""
AHEAD_PAGES: Final = 24
"""With 132 CTAs 52 MB, what an H200's L2 holds beside inputs and partial sums."""
AHEAD_CYCLES: Final = 900
"""A page per SM and 0.45 µs is three quarters of what the memory can deliver."""


class AttentionFault(MegaMoeError, TimeoutError):
    """A CTA waited too long for an event; the plan must be ``reset`` before it runs again."""


class _AttentionParams(ctypes.Structure):
    """``AttentionParams`` of csrc/attention_pre/params.cuh; sizes are compared on loading."""

    _fields_ = (
        ("instructions", ctypes.c_uint64),
        ("operands", ctypes.c_uint64),
        ("maps", ctypes.c_uint64),
        ("counters", ctypes.c_uint64),
        ("epochs", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("trace", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("depth", ctypes.c_uint32),
        ("num_operand_rows", ctypes.c_uint32),
        ("num_tokens", ctypes.c_uint32),
        ("dynamic", ctypes.c_uint32),
        ("ticket_counter", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32),
        ("ahead_pages", ctypes.c_uint32),
        ("ahead_cycles", ctypes.c_uint32),
    )


def _refuse(spec: Specialization) -> str:
    """Why the kernel has no body of this shape; empty if it has."""
    shape = dict(spec.shape)
    if spec.opcode == "index_score":
        heads = int(shape["heads"])
        if heads % 8 or spec.band * heads not in (8, 16, 32, 64, 128):
            return f"{heads} index heads: must be 8, 16, 32, 64 or 128"
        return ""
    if spec.opcode in NO_PAGES:
        return ""
    if spec.band > _MAX_BAND:
        return f"bands of {spec.band} tokens: at most {_MAX_BAND}"
    if spec.opcode == "absorb_query" and (spec.k % 64 or spec.n % GROUP):
        return f"absorbed heads of {spec.k} by {spec.n}: multiples of 64 by {GROUP} needed"
    if -(-spec.block_n // GROUP) > _MAX_TILES:
        return f"tasks of {spec.block_n} columns: at most {_MAX_TILES * GROUP}"
    return ""


def spec_macro(specs: Sequence[Specialization]) -> str:
    """The specialisations as the kernel's list, one ``X(...)`` each.

    Raises:
        SpecError: the kernel has no body of such a shape.
    """
    items = []
    for i, spec in enumerate(specs):
        if why := _refuse(spec):
            raise SpecError(f"{spec.opcode} on the GPU: {why}")
        shape = dict(spec.shape)
        opcode = "k" + "".join(part.capitalize() for part in spec.opcode.split("_"))
        sizes = [spec.band, spec.n, spec.k, spec.block_n, spec.k_tile]
        names = ("heads", "head_dim", "rope", "q_lora", "kv_lora", "apart")
        sizes += [int(shape.get(name, 0)) for name in names]
        eps = float(shape.get("rmsnorm_eps", shape.get("layernorm_eps", 0)))
        factor = float(shape.get("fold_factor", 0))
        items.append(f"X({i},{opcode},{','.join(map(str, sizes))},{eps!r}f,{factor!r}f)")
    return "".join(items)


def compile_attention(
    specs: Sequence[Specialization],
    *,
    slots: int = 3,
    input_pages: int = 3,
    trace: bool = False,
) -> jit.Cubin:
    """The kernel for these specialisations. Needs no GPU.

    Args:
        specs: by ``spec_id``.
        slots: instruction slots of a CTA: how far its loaders run ahead.
        input_pages: 2 or 3 of the 13 pages for inputs, where no band exceeds 32 tokens.
        trace: stamp every instruction; for diagnosis.
    """
    defines: dict[str, int | str] = {
        "MEGAMOE_ATTENTION_SPECS": spec_macro(specs),
        "MEGAMOE_ATTENTION_SLOTS": slots,
        "MEGAMOE_ATTENTION_NARROW_INPUT_PAGES": input_pages,
    }
    if trace:
        defines["MEGAMOE_ATTENTION_TRACE"] = 1
    return jit.compile_cubin("attention_pre/attention_pre.cu", defines)


class AttentionKernel:
    """A compiled kernel, loaded on the current device.

    Args:
        specs: specialisations of the plans to run: ``Planner.specializations``, or several
            planners' together.
        slots: see ``compile_attention``.
        input_pages: see ``compile_attention``.
        trace: see ``compile_attention``.
        cooperative: ask the driver to refuse a grid that is not resident at once.

    Raises:
        BackendUnavailable: no Hopper GPU.
    """

    def __init__(
        self,
        specs: Sequence[Specialization],
        *,
        slots: int = 3,
        input_pages: int = 3,
        trace: bool = False,
        cooperative: bool = True,
    ) -> None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            raise BackendUnavailable("the megakernel needs a Hopper GPU (compute capability 9.0)")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.specs = tuple(specs)
        self.trace = trace
        cubin = compile_attention(specs, slots=slots, input_pages=input_pages, trace=trace)
        if cubin.constant("megamoe_attention_param_bytes") != ctypes.sizeof(_AttentionParams):
            raise MegaMoeError("the kernel's parameters are not those of backends/attention.py")
        self.weight_pages = cubin.constant("megamoe_attention_weight_pages")
        self.kernel = Kernel(
            Module(cubin.image),
            "megamoe_attention_pre",
            threads=cubin.constant("megamoe_attention_threads"),
            shared_bytes=cubin.constant("megamoe_attention_shared_bytes"),
            cooperative=cooperative,
        )

    def place(self, encoded: EncodedPlan) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """A plan's instructions with this kernel's numbers of specialisations.

        Raises:
            SpecError: the kernel was not compiled for one that the plan uses.
        """
        fmt = instruction_format()
        numbers = {spec: i for i, spec in enumerate(self.specs)}
        words = encoded.instructions.reshape(-1, fmt.words).copy()
        column = fmt.fields["spec_id"][0]
        bodies = words[:, fmt.fields["opcode"][0]] != fmt.opcodes["no_op"]
        used = words[:, column].copy()
        for spec_id in np.unique(used[bodies]).tolist():
            spec = encoded.specializations[spec_id]
            if spec not in numbers:
                raise SpecError(
                    f"the kernel has no {spec}: compile it for the planner's specializations"
                )
            words[bodies & (used == spec_id), column] = numbers[spec]
        return words.reshape(encoded.instructions.shape)


class BoundPlan:
    """A plan on one kernel and one set of tensors.

    Args:
        kernel: compiled for the plan's specialisations.
        encoded: the plan.
        tensors: every buffer the plan names, on the kernel's device.
        timeout_s: limit of every event wait.
        in_flight: weight pages of 16 KiB that a CTA lets be on their way at once.
        ahead_pages: weight pages beyond shared memory that a CTA brings to L2 while it waits.
        ahead_cycles: at least, between two of them: a backlog would delay all other requests.

    Raises:
        SpecError: the kernel lacks a specialisation, or a tensor does not fit.
    """

    def __init__(
        self,
        kernel: AttentionKernel,
        encoded: EncodedPlan,
        tensors: Mapping[str, Tensor],
        *,
        timeout_s: float = 2.0,
        in_flight: int = IN_FLIGHT,
        ahead_pages: int = AHEAD_PAGES,
        ahead_cycles: int = AHEAD_CYCLES,
    ) -> None:
        if not 1 <= in_flight <= kernel.weight_pages:
            raise SpecError(f"in_flight = {in_flight}: must be in 1..{kernel.weight_pages}")
        instructions = kernel.place(encoded)
        sms = torch.cuda.get_device_properties(kernel.device).multi_processor_count
        if encoded.num_workers > sms:
            raise SpecError(f"a plan for {encoded.num_workers} workers: this GPU has {sms} SMs")
        if len(encoded.operand_slots) > _MAX_OPERAND_ROWS:
            raise SpecError(f"{len(encoded.operand_slots)} stages: at most {_MAX_OPERAND_ROWS}")
        self.kernel = kernel
        self.encoded = encoded
        self._fmt = instruction_format()
        device = kernel.device
        self._instructions = _upload(instructions.view(np.int32), device)
        counters = encoded.num_counters * self._fmt.counter_stride
        self._counters = torch.zeros(max(counters, 1), dtype=torch.int32, device=device)
        self._epochs = torch.zeros(encoded.num_workers, dtype=torch.int32, device=device)
        self._fault = torch.zeros(8, dtype=torch.int32, device=device)
        places = encoded.instructions.shape[0] * encoded.instructions.shape[1]
        self._stamps = torch.zeros(
            places * _STAMPS if kernel.trace else 1, dtype=torch.int64, device=device
        )
        rows = len(encoded.operand_slots)
        self._operands = torch.zeros(
            rows, self._fmt.operand_slots, dtype=torch.int64, device=device
        )
        self._maps = torch.zeros(rows, 256, dtype=torch.uint8, device=device)
        self._timeout_s = timeout_s
        self._params = _AttentionParams(
            instructions=self._instructions.data_ptr(),
            operands=self._operands.data_ptr(),
            maps=self._maps.data_ptr(),
            counters=self._counters.data_ptr(),
            epochs=self._epochs.data_ptr(),
            fault=self._fault.data_ptr(),
            trace=self._stamps.data_ptr(),
            timeout_ns=int(timeout_s * 1e9),
            depth=encoded.instructions.shape[1],
            num_operand_rows=rows,
            num_tokens=self._num_tokens(),
            dynamic=int(encoded.dynamic),
            ticket_counter=encoded.num_counters - 1 if encoded.dynamic else 0,
            in_flight=in_flight,
            ahead_pages=ahead_pages,
            ahead_cycles=ahead_cycles,
        )
        self.rebind(tensors)

    def _num_tokens(self) -> int:
        words = self.encoded.instructions.reshape(-1, self._fmt.words).astype(np.int64)
        row, rows = (self._fmt.fields[name][0] for name in ("row", "rows"))
        return int((words[:, row] + words[:, rows]).max(initial=0))

    def rebind(self, tensors: Mapping[str, Tensor]) -> None:
        """Points the plan at other tensors of the same shapes; launches enqueued later see them.

        Raises:
            SpecError: a tensor is missing or does not fit.
        """
        for name, buffer in self.encoded.buffers.items():
            if name not in tensors:
                raise SpecError(
                    f"no tensor {name!r}: the plan needs {', '.join(self.encoded.buffers)}"
                )
            check_tensor(buffer, tensors[name], self.kernel.device)
        table = operand_table(
            self.encoded, {n: tensors[n].data_ptr() for n in self.encoded.buffers}
        )
        maps = np.zeros((len(table), 256), np.uint8)
        for index, row in mapped_rows(self.encoded).items():
            slots = self.encoded.operand_slots[index]
            names = {slot: name for name, slot in self._fmt.operands[row.opcode].items()}
            operands = {names[slot]: tensors[buffer] for slot, buffer in slots.items()}
            maps[index] = np.frombuffer(stage_maps(row, operands), np.uint8)
        self._operands.copy_(torch.from_numpy(table.view(np.int64)))
        self._maps.copy_(torch.from_numpy(maps))
        self._tensors = dict(tensors)  # kept alive

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Enqueues one run, also into a graph under capture; ``check`` looks for faults later."""
        where = stream or torch.cuda.current_stream(self.kernel.device)
        self.kernel.kernel.launch(self.encoded.num_workers, self._params, where.cuda_stream)

    def run(self) -> None:
        """One run on the current stream, to its end.

        Raises:
            AttentionFault: an event never came.
        """
        self.launch()
        self.check()

    def check(self) -> None:
        """Waits for the device, and raises if a run gave up.

        Raises:
            AttentionFault: a run gave up since the last ``reset``.
        """
        torch.cuda.synchronize(self.kernel.device)
        raised, worker, place, event, want, have, epoch = self._fault[:_FAULT_WORDS].tolist()
        if not raised:
            return
        task = self.encoded.tasks[0 if self.encoded.dynamic else worker, place]
        raise AttentionFault(
            f"CTA {worker} waited more than {self._timeout_s:g} s at place {place} of its queue "
            f"(task {task}, run {epoch}): event {event} stands at {have}, not {want}. Call reset()."
        )

    def reset(self) -> None:
        """Counters and faults as before the first run."""
        torch.cuda.synchronize(self.kernel.device)
        for t in (self._counters, self._epochs, self._fault):
            t.zero_()

    def stamps(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """With ``trace``: int64 [queues, depth, 7] ns, the stamps of ``vm.cuh``; 0: not reached."""
        if not self.kernel.trace:
            raise SpecError("this kernel stamps nothing: AttentionKernel(..., trace=True)")
        shape = (*self.encoded.instructions.shape[:2], _STAMPS)
        return self._stamps.cpu().numpy().reshape(shape)


def _upload(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
