"""The layer that users open: check, stage, run, read.

    with open_layer(spec, EpConfig(num_ranks=2, max_tokens=64)) as layer:
        layer.load_weights(iter_local_experts(checkpoint, 3, layer.rank, 2))
        y = layer.run(x, topk_idx, topk_weight)      # collective over the ranks

Shapes: T tokens of this rank (0..max_tokens, different on every rank), H hidden, K top-k.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import TracebackType
from typing import Literal, Self

import torch
from torch import Tensor

from megamoe.attention_layer import open_attention_pre as attention_pre
from megamoe.backends.base import Counters, Session, device_name, hopper_available
from megamoe.backends.trace import LayerTrace
from megamoe.errors import CapacityError, InputError, SpecError
from megamoe.spec import GROUP, EpConfig, MoESpec
from megamoe.symmetric.base import Rendezvous, agree, find_rendezvous
from megamoe.tuning import TUNABLE, tuned
from megamoe.weights import ExpertWeights, kind_of, need_values

__all__ = [
    "Backend",
    "MoELayer",
    "attention_pre",
    "choose_backend",
    "open_layer",
    "tuned_together",
]

Backend = Literal["auto", "cpu", "cuda"]


class MoELayer:
    """One rank's handle on an expert-parallel MoE layer. Not thread-safe.

    Attributes:
        spec: the layer.
        config: how the group runs it, every 0 replaced by what the backend chose.
        rank: this rank.
        backend: ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, spec: MoESpec, session: Session, rank: int, backend: str) -> None:
        self.spec = spec
        self.config = session.config
        self.rank = rank
        self.backend = backend
        self._session = session

    def load_weights(self, experts: Iterable[ExpertWeights]) -> None:
        """Takes this rank's experts, streaming.

        Raises:
            InputError: an expert's index, shape, dtype or scales do not fit the layer, or a tensor
                has no values.
        """
        if not isinstance(experts, Iterable):
            raise InputError(
                f"experts is a {kind_of(experts)}: must be an iterable of ExpertWeights, one or "
                "more"
            )
        self._session.load_weights(experts)

    def run(
        self, x: Tensor | tuple[Tensor, Tensor], topk_idx: Tensor, topk_weight: Tensor
    ) -> Tensor:
        """Collective: the layer's output for this rank's tokens.

        Args:
            x: BF16 ``[T,H]``; for FP8 layers also ``(e4m3 [T,H], FP32 scales [T,H/128])``.
            topk_idx: int32 or int64 ``[T,K]``, expert ids or -1 for none; duplicates count twice.
            topk_weight: FP32 ``[T,K]``.

        Returns:
            BF16 ``[T,H]``.

        Raises:
            InputError: wrong shape, dtype or device, or an id outside -1..E-1. Nothing was sent.
            CapacityError: more than ``max_tokens`` tokens. Nothing was sent.
            PeerTimeout: a rank did not come, or came too late; see ``reset``.
        """
        hidden, scale = _rows_and_scales(x)
        self._check(hidden, scale, topk_idx, topk_weight)
        out = torch.empty(hidden.shape, dtype=torch.bfloat16, device=hidden.device)
        self._session.stage(hidden, scale)
        self._session.run_moe(topk_idx.int().contiguous(), topk_weight.contiguous(), out)
        return out

    def input_buffers(self) -> tuple[Tensor, Tensor | None] | None:
        """This rank's rows in the window, to be written in place: a call then stages nothing.

        Write T rows on the stream of the calls, and pass ``x[:T]`` (FP8 layers: ``(x[:T],
        scale[:T])``) to ``run``. The rows are free again as soon as the call has run.

        Returns:
            e4m3 ``[T_max,H]`` and FP32 ``[T_max,H/128]``; for BF16 layers BF16 ``[T_max,H]`` and
            None. None altogether on CPU ranks.
        """
        return self._session.input_buffers()

    def counters(self) -> Counters:
        """Ring high-water marks, back-pressure events and sizes of this rank."""
        return self._session.counters()

    def trace(self) -> LayerTrace:
        """What every role of this rank did in the last call, with ``MEGAMOE_TRACE=1``.

        Raises:
            MegaMoeError: ``MEGAMOE_TRACE`` was not set when the layer was opened.
        """
        return self._session.trace_events()

    def check(self) -> None:
        """Waits for calls on the current stream, such as those of replayed CUDA graphs.

        Raises:
            PeerTimeout: one of them timed out; ``run`` says so by itself, a graph cannot.
        """
        self._session.check()

    def time_calls(self) -> None:
        """From now on CUDA events time every call, for ``call_seconds``; not while capturing."""
        self._session.time_calls()

    def call_seconds(self) -> float | None:
        """GPU time of the last call; None on CPU ranks, or without ``time_calls``."""
        return self._session.call_seconds()

    def clear_counters(self) -> None:
        """Starts the counters again from zero."""
        self._session.clear_counters()

    def reset(self, limit_s: float = 30.0) -> None:
        """Collective: makes a complete group usable again after ``PeerTimeout``.

        Raises:
            GroupBroken: a rank is missing; the survivors need a new group.
            InputError: a limit that is none. Nothing was sent.
        """
        if not isinstance(limit_s, int | float) or not 0 <= limit_s < math.inf:
            raise InputError(f"limit_s = {limit_s!r}: must be a number of seconds, 0 or more")
        self._session.reset(limit_s)

    def close(self) -> None:
        """Frees weights and windows. Not collective."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(
        self, x: Tensor, scale: Tensor | None, topk_idx: Tensor, topk_weight: Tensor
    ) -> None:
        """Everything that can be wrong with a call."""
        spec = self.spec
        for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weight", topk_weight)):
            need_values(name, tensor)
        if scale is not None:
            need_values("x scales", scale)
        if x.dim() != 2 or x.shape[1] != spec.hidden:
            raise InputError(f"x has shape {tuple(x.shape)}: must be [T, {spec.hidden}]")
        num_tokens = x.shape[0]
        if num_tokens > self.config.max_tokens:
            raise CapacityError(
                f"{num_tokens} tokens, but this group was opened for at most "
                f"{self.config.max_tokens} per rank: split the batch, or open the layer with a "
                "larger max_tokens"
            )
        if scale is None:
            if x.dtype != torch.bfloat16:
                raise InputError(
                    f"x is {x.dtype}: must be bfloat16, or a pair (float8_e4m3fn, float32 scales)"
                )
        else:
            want = (num_tokens, spec.hidden // GROUP)
            if spec.weight_dtype != "fp8":
                raise InputError("x comes with scales, but the layer's weights are bf16: pass BF16")
            if x.dtype != torch.float8_e4m3fn:
                raise InputError(f"x with scales is {x.dtype}: must be float8_e4m3fn")
            if scale.dtype != torch.float32 or tuple(scale.shape) != want:
                raise InputError(
                    f"x scales are {scale.dtype} {tuple(scale.shape)}: must be float32 {list(want)}"
                )
        routes = (num_tokens, spec.topk)
        if topk_idx.dtype not in (torch.int32, torch.int64) or tuple(topk_idx.shape) != routes:
            raise InputError(
                f"topk_idx is {topk_idx.dtype} {tuple(topk_idx.shape)}: must be int32 or int64 "
                f"{list(routes)}"
            )
        if topk_weight.dtype != torch.float32 or tuple(topk_weight.shape) != routes:
            raise InputError(
                f"topk_weight is {topk_weight.dtype} {tuple(topk_weight.shape)}: must be float32 "
                f"{list(routes)}"
            )
        devices = {t.device for t in (x, scale, topk_idx, topk_weight) if t is not None}
        if len(devices) > 1 or x.device.type != self.backend:
            given = ", ".join(sorted(map(str, devices)))
            raise InputError(
                f"tensors are on {given}: put all of them on one {self.backend} device"
            )
        # While a graph is captured nothing can be read back: the capturer answers for the ids.
        capturing = topk_idx.is_cuda and torch.cuda.is_current_stream_capturing()
        if num_tokens and not capturing:
            low, high = (int(v) for v in topk_idx.aminmax())
            if low < -1 or high >= spec.num_experts:
                bad = low if low < -1 else high
                row, col = (topk_idx == bad).nonzero()[0].tolist()
                raise InputError(
                    f"topk_idx[{row}, {col}] = {bad}: must be an expert 0..{spec.num_experts - 1}, "
                    "or -1 for none"
                )


def _rows_and_scales(x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The rows of a call, and their scales or None.

    Raises:
        InputError: it is neither a tensor nor a pair of tensors.
    """
    if isinstance(x, Tensor):
        return x, None
    if isinstance(x, tuple | list) and len(x) == 2 and all(isinstance(t, Tensor) for t in x):
        return x[0], x[1]
    raise InputError(
        f"x is a {kind_of(x)}: must be a torch.Tensor, or a pair of them (e4m3 rows, float32 "
        "scales)"
    )


def choose_backend(backend: Backend) -> Literal["cpu", "cuda"]:
    """What ``"auto"`` stands for on this machine; the others stand for themselves.

    Raises:
        SpecError: no such backend.
    """
    if backend == "auto":
        return "cuda" if hopper_available() else "cpu"
    if backend not in ("cpu", "cuda"):
        raise SpecError(f"backend = {backend!r}: must be 'auto', 'cpu' or 'cuda'")
    return backend


def tuned_together(
    spec: MoESpec, config: EpConfig, backend: str, rendezvous: Rendezvous
) -> EpConfig:
    """Collective: ``config`` with what ``megamoe tune`` found here, if all ranks found the same.

    Caches of ranks may differ: on other machines, or while a search writes its result.

    Args:
        spec: the layer.
        config: the group; with a tunable field set it stays as it is.
        backend: ``"cpu"`` or ``"cuda"``.
        rendezvous: how ranks find each other.
    """
    found = tuned(spec, config, device_name(backend))
    said = agree(rendezvous, "opening the layer", {f: getattr(found, f) for f in TUNABLE})
    return found if all(other == said[0] for other in said) else config


def open_layer(
    spec: MoESpec,
    config: EpConfig,
    *,
    backend: Backend = "auto",
    rendezvous: Rendezvous | None = None,
) -> MoELayer:
    """Collective: opens an expert-parallel layer on every rank of a group.

    Args:
        spec: the layer's mathematics; equal on every rank.
        config: how the group runs it; equal on every rank. Where block, rings, wave and lag are all
            0, what ``megamoe tune`` found on this machine is taken.
        backend: ``"cuda"`` needs a Hopper GPU per rank; ``"auto"`` takes it where there is one.
        rendezvous: how ranks find each other; by default the ``torch.distributed`` group.

    Raises:
        SpecError, CapacityError: a setting that no call could serve.
        SymmetricMemoryError: a window could not be allocated or mapped, on any rank.
        BackendUnavailable: ``"cuda"`` asked for on a machine that cannot run it.
    """
    if not isinstance(spec, MoESpec) or not isinstance(config, EpConfig):
        raise SpecError(
            f"open_layer got a {kind_of(spec)} and a {kind_of(config)}: must be a MoESpec and an "
            "EpConfig, in this order"
        )
    chosen = choose_backend(backend)
    config.resolved(spec)  # a setting that cannot work is refused before any rank is asked
    rendezvous = rendezvous or find_rendezvous(config.num_ranks)
    config = tuned_together(spec, config, chosen, rendezvous)
    session: Session
    if chosen == "cuda":
        from megamoe.backends.cuda import CudaSession

        session = CudaSession(spec, config, rendezvous)
    else:
        from megamoe.backends.cpu import CpuSession

        session = CpuSession(spec, config, rendezvous)
    return MoELayer(spec, session, rendezvous.rank, chosen)
