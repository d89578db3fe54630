"""GPU ranks: one persistent kernel per rank and call on a Hopper GPU.

``run_moe`` launches and then waits for the call, so that a timeout is raised where it happened.
``launch`` only enqueues, for CUDA graphs and for callers that look later with ``check``.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from megamoe import jit, native
from megamoe.backends.base import Counters, hopper_available, need_same_layer, not_loaded
from megamoe.backends.cuda_barrier import HostBarrier
from megamoe.backends.cuda_build import BOXES, MoEParams, check_params, compile_moe, cuda_config
from megamoe.backends.cuda_driver import (
    Kernel,
    Module,
    copy_from_device,
    fill_device,
    tensor_map,
)
from megamoe.backends.cuda_halves import near_half
from megamoe.backends.cuda_pack import TILE_N
from megamoe.backends.cuda_placing import find_swapped, weight_maps
from megamoe.backends.cuda_recorder import Recorder
from megamoe.backends.cuda_weights import allocate_weights
from megamoe.backends.trace import NOT_TRACED, LayerTrace, trace_wanted
from megamoe.errors import (
    BackendUnavailable,
    FaultRecord,
    GroupBroken,
    MegaMoeError,
    PeerTimeout,
    SpecError,
)
from megamoe.layout import window_layout
from megamoe.spec import EpConfig, MoESpec
from megamoe.symmetric.base import Rendezvous, agree
from megamoe.symmetric.choice import Provider, symmetric_memory
from megamoe.weights import ExpertWeights

__all__ = ["CudaSession", "Provider", "compile_moe", "cuda_config"]

_OPEN_LIMIT_S = 600.0


class CudaSession:
    """A session over GPU ranks (``megamoe.backends.base.Session``).

    A call's kernel stages its tokens itself: ``stage`` launches nothing.
    """

    def __init__(
        self,
        spec: MoESpec,
        config: EpConfig,
        rendezvous: Rendezvous,
        provider: Provider | None = None,
    ) -> None:
        """Collective: compiles, allocates the window, maps the peers' and meets them.

        Args:
            spec: the layer.
            config: how the group runs it; zeros are chosen by ``cuda_config``.
            rendezvous: how ranks find each other.
            provider: of symmetric memory between processes; default ``$MEGAMOE_SYMMETRIC``, or
                torch.

        Raises:
            BackendUnavailable: no Hopper GPU, or a missing package; on every rank.
            SymmetricMemoryError: a rank could not compile, allocate (its window or its weights) or
                map; on every rank.
            SpecError: ranks disagree about the layer; on every rank.
        """
        if not hopper_available():
            raise BackendUnavailable("the CUDA backend needs a Hopper GPU (compute capability 9.0)")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._spec, self.config = spec, cuda_config(spec, config)
        self._rank = rendezvous.rank
        self._trace = trace_wanted()
        units, sharing = self._choose_units(rendezvous)
        self._shape = native.make_shape(
            spec, self.config, num_units=units, num_pullers=units, l2_tile_n=TILE_N
        )
        need_same_layer(rendezvous, spec, self._shape)
        cubin = self._compile(rendezvous)
        self._layout = window_layout(self._shape)
        memory = symmetric_memory(rendezvous, self._device, provider)
        self._window = memory.allocate(self._layout.nbytes)
        self._control = self._address("control")
        self._abort_offset = cubin.constant("megamoe_abort_offset")
        self._epoch_offset = cubin.constant("megamoe_epoch_offset")
        module = Module(cubin.image)
        self._kernel = Kernel(
            module,
            "megamoe_moe",
            threads=cubin.constant("megamoe_moe_threads"),
            shared_bytes=cubin.constant("megamoe_moe_shared_bytes"),
            # Ranks that share a GPU split its SMs; a cooperative grid would wait for all of them.
            cooperative=not sharing,
        )
        self._staged: tuple[Tensor, Tensor | None] | None = None
        # Before weights take the memory: the probe is loaded now.
        self._near = near_half(
            self._shape, self._device, cubin.constant("megamoe_moe_most_streams")
        )
        self._weights = allocate_weights(spec, self.config.num_ranks, self._device, rendezvous)
        if self._near is not None:
            self._weights.place(find_swapped(self._weights.tiles, self._near))
        self._params = self._make_params(cubin)
        self._own_rows = self._address("input"), self._address("input_scale")
        begin = self._window.bases[self._rank]
        self._own_addresses = range(begin, begin + self._window.nbytes)
        self._recorder: Recorder | None = None
        if self._trace:
            slots = cubin.constant("megamoe_trace_slots")
            self._recorder = Recorder(self._shape, slots, self._device)
            self._params.trace = self._recorder.address
        self._num_tokens = 0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        lines = [self._address("host_barrier", rank) for rank in range(self.config.num_ranks)]
        self._barrier = HostBarrier(lines, self._rank)
        self._faulted: FaultRecord | None = None
        self._broken: GroupBroken | None = None
        self._closed = False
        self._meet(_OPEN_LIMIT_S)

    # ------------------------------------------------------------ opening

    def _choose_units(self, rendezvous: Rendezvous) -> tuple[int, bool]:
        """CTAs per rank, the same on all ranks; and whether ranks share this GPU."""
        properties = torch.cuda.get_device_properties(self._device)
        free = properties.multi_processor_count - self.config.reserved_sms
        mine = {"gpu": str(getattr(properties, "uuid", self._device.index)), "free": free}
        every = agree(rendezvous, "looking at GPUs", mine)
        units = []
        for rank in every:
            sharers = sum(other["gpu"] == rank["gpu"] for other in every)
            units.append(rank["free"] // sharers)
        if min(units) < 1:
            raise SpecError(
                f"reserved_sms = {self.config.reserved_sms} leaves no SM of "
                f"{properties.multi_processor_count} to a rank"
            )
        sharing = sum(other["gpu"] == mine["gpu"] for other in every) > 1
        chosen = min(units)
        return min(chosen, self.config.num_workers or chosen), sharing

    def _compile(self, rendezvous: Rendezvous) -> jit.Cubin:
        """Rank 0 compiles; the others find the cubin in the cache, or compile for themselves."""
        result: dict[str, str] | Exception = {}
        cubin: jit.Cubin | None = None
        tail_rows = self.config.tail_rows
        if rendezvous.rank == 0:
            try:
                cubin = compile_moe(self._spec, tail_rows=tail_rows, trace=self._trace)
            except MegaMoeError as e:
                result = e
        agree(rendezvous, "compiling the kernel", result)
        return cubin or compile_moe(self._spec, tail_rows=tail_rows, trace=self._trace)

    def _address(self, region: str, rank: int | None = None) -> int:
        base = self._window.bases[self._rank if rank is None else rank]
        return base + self._layout.regions[region].offset

    def _make_params(self, cubin: jit.Cubin) -> MoEParams:
        spec, config = self._spec, self.config
        element = 1 if spec.weight_dtype == "fp8" else 2
        params = MoEParams(
            rank=self._rank,
            timeout_ns=int(config.timeout_s * 1e9),
            w1_scale=self._weights.scales[0].data_ptr(),
            w2_scale=self._weights.scales[1].data_ptr(),
            swiglu_clamp=math.inf if spec.swiglu_clamp is None else spec.swiglu_clamp,
        )

        def put(field: str, data: bytes) -> None:
            target = getattr(params, field)
            size = ctypes.sizeof(target)
            assert size == len(data), f"{field}: {len(data)} bytes for {size}"
            ctypes.memmove(target, data, len(data))

        words = self._weights.words
        for linear, of_linear in enumerate(words or ()):
            params.placed[linear] = of_linear.data_ptr()
        maps = [weight_maps(w, placed=words is not None) for w in self._weights.tiles]
        put("w", b"".join(maps))
        rings = (
            ("x", "l1_ring", spec.hidden, config.ring_l1_blocks),
            ("h", "l2_ring", spec.inter, config.ring_l2_blocks),
        )
        for field, region, columns, blocks in rings:
            maps = [
                tensor_map(
                    self._address(region),
                    columns=columns,
                    rows=blocks * config.block_m,
                    box=(128 // element, box),
                    element_bytes=element,
                )
                for box in BOXES
            ]
            put(field, b"".join(maps))
        put("shape", self._shape.to_bytes())
        put("layout", native.window_layout_bytes(self._shape))
        for rank, base in enumerate(self._window.bases):
            params.bases[rank] = base
        params.num_streams = 1 if self._near is None else 2
        params.near_half[:] = self._near or [0] * len(params.near_half)
        check_params(cubin)
        return params

    @property
    def num_streams(self) -> int:
        """Streams of tickets in this rank's calls (``near_half``)."""
        return int(self._params.num_streams)

    @property
    def placed(self) -> bool:
        """Whether weights lie near to the SMs that read them (``cuda_placing``)."""
        return bool(self._params.placed[0])

    # ------------------------------------------------------------ weights and calls

    def load_weights(self, experts: Iterable[ExpertWeights]) -> None:
        """Packs this rank's experts on the GPU, one at a time."""
        self._need_open()
        for expert in experts:
            self._weights.take(expert)

    def input_buffers(self) -> tuple[Tensor, Tensor | None]:
        """The window's own rows of x and scales; the first of them are not staged again."""
        self._need_open()
        x = self._layout.view(self._window.local, "input")
        if self._spec.weight_dtype == "bf16":
            return x.view(torch.bfloat16), None
        scale = self._layout.view(self._window.local, "input_scale")
        return x.view(torch.float8_e4m3fn), scale.view(torch.float32)

    def stage(self, x: Tensor, x_scale: Tensor | None) -> None:
        """Says which tokens the next launch puts (and quantises) into the own window, first of all.

        They must live until it is enqueued, and be read on the same stream.
        """
        self._need_open()
        if self._events is not None:
            self._events[0].record()
        params = self._params
        self._num_tokens = x.shape[0]
        if self._in_window(x, x_scale):
            params.stage_x = 0
            return
        x = self._stageable(x)
        x_scale = None if x_scale is None else self._stageable(x_scale)
        self._staged = x, x_scale
        params.stage_x = x.data_ptr()
        params.stage_scale = 0 if x_scale is None else x_scale.data_ptr()
        params.stage_is_bf16 = int(x_scale is None)

    def _stageable(self, rows: Tensor) -> Tensor:
        """The rows, or a copy of them where the kernel cannot read them while it writes its own.

        It loads 16 bytes at a time; and other rows of the window would be read while they are
        overwritten.
        """
        rows = rows.contiguous()
        address = rows.data_ptr()
        return rows.clone() if address % 16 or address in self._own_addresses else rows

    def _in_window(self, x: Tensor, x_scale: Tensor | None) -> bool:
        """Whether the caller wrote the tokens where staging would put them."""
        rows, scales = self._own_rows
        if x.data_ptr() != rows or not x.is_contiguous():
            return False
        if x_scale is None:
            return self._spec.weight_dtype == "bf16"  # an FP8 layer's BF16 rows want quantising
        return x_scale.data_ptr() == scales and x_scale.is_contiguous()

    def launch(self, topk_idx: Tensor, topk_weight: Tensor, out: Tensor) -> None:
        """Enqueues the call on the current stream; tensors must live until it has run.

        Safe to capture in a CUDA graph. ``check`` later tells of a timeout.
        """
        params = self._params
        params.num_tokens = self._num_tokens
        params.topk_idx = topk_idx.data_ptr()
        params.topk_weight = topk_weight.data_ptr()
        params.y = out.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        self._kernel.launch(self._shape.num_units, params, stream)
        params.stage_x, self._staged = 0, None
        if self._events is not None:
            self._events[1].record()

    def time_calls(self) -> None:
        """From now on events before ``stage`` and after ``launch`` time every call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._events = begin, end

    def call_seconds(self) -> float | None:
        """Between the last call's events, staging included; the call must have run."""
        if self._events is None:
            return None
        begin, end = self._events
        return float(begin.elapsed_time(end)) * 1e-3

    def run_moe(self, topk_idx: Tensor, topk_weight: Tensor, out: Tensor) -> None:
        """Collective: runs the staged tokens and waits for the result, unless captured."""
        self._need_open()
        if self._weights.missing:
            raise not_loaded(self._weights.missing)
        if self._faulted is not None:
            raise PeerTimeout(self._faulted, self.config.timeout_s)
        assert topk_idx.is_contiguous()
        assert topk_weight.is_contiguous()
        assert out.is_contiguous()
        assert topk_idx.shape[0] == self._num_tokens == out.shape[0]
        self.launch(topk_idx, topk_weight, out)
        if not torch.cuda.is_current_stream_capturing():
            self.check()

    def check(self) -> None:
        """Waits for the current stream's work.

        Raises:
            PeerTimeout: a wait of a call expired on any rank.
        """
        torch.cuda.current_stream(self._device).synchronize()
        abort = self._read_word(self._control + self._abort_offset)
        if not abort:
            return
        names = native.describe()["fault_fields"]
        region = self._layout.regions["fault"]
        address = self._address("fault") + (abort - 1) * region.stride
        words = struct.unpack(f"<{len(names)}I", copy_from_device(address, 4 * len(names)))
        self._faulted = native.fault_record(dict(zip(names, words, strict=True)))
        raise PeerTimeout(self._faulted, self.config.timeout_s)

    def stamps(self) -> Tensor:
        """Stamps and waits of the last call, int64 ``[CTAs, slots]``; with ``MEGAMOE_TRACE=1``."""
        return self._recorded().stamps.cpu()

    def trace_events(self) -> LayerTrace:
        """Events of the last call of the current stream; with ``MEGAMOE_TRACE=1``.

        Not of the device: kernels of other ranks on it may wait for this rank's next call.
        """
        return self._recorded().events(self._rank, self._num_tokens)

    def _recorded(self) -> Recorder:
        """What records, after the current stream's work."""
        torch.cuda.current_stream(self._device).synchronize()
        if self._recorder is None:
            raise MegaMoeError(NOT_TRACED)
        return self._recorder

    # ------------------------------------------------------------ the rest of the interface

    def counters(self) -> Counters:
        """Sizes and calls; the kernel counts no waits."""
        self._need_open()
        return Counters(
            backend="cuda",
            device=torch.cuda.get_device_name(self._device),
            epoch=self._read_word(self._control + self._epoch_offset),
            num_units=self._shape.num_units,
            window_bytes=self._window.nbytes,
            ring_l1_blocks=self._shape.ring_l1,
            ring_l2_blocks=self._shape.ring_l2,
            high_water_l1=None,
            high_water_l2=None,
            backpressure_events=None,
            blocked={},
        )

    def clear_counters(self) -> None:
        """Nothing is counted on the GPU."""

    def reset(self, limit_s: float) -> None:
        """Collective: no call runs any more, then state is cleared, then all go on."""
        self._need_open()
        torch.cuda.synchronize(self._device)
        self._meet(limit_s)
        first, end = native.clear_span(self._shape)
        fill_device(self._window.bases[self._rank] + first, end - first)
        self._faulted = None
        self._meet(limit_s)

    def close(self) -> None:
        """Frees weights and window. Not collective; peers' mappings stay valid for them."""
        if not self._closed:
            torch.cuda.synchronize(self._device)
            self._closed = True
            self._weights.free()
            self._window.close()

    def _need_open(self) -> None:
        if self._closed:
            raise MegaMoeError("the layer is closed: open a new one")
        if self._broken is not None:
            raise self._broken

    def _read_word(self, address: int) -> int:
        word: int = struct.unpack("<I", copy_from_device(address, 4))[0]
        return word

    def _meet(self, limit_s: float) -> None:
        try:
            self._barrier.meet(limit_s)
        except GroupBroken as broken:
            self._broken = broken
            raise
