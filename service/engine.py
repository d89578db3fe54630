"""What the HTTP side asks of whoever executes a layer.

``remote.RemoteEngine`` is the real one; tests bring their own. Nothing here knows HTTP, and
nothing behind it knows OIP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from service.reports import EngineStatus, Observers

__all__ = [
    "AttentionInfo",
    "AttentionRequest",
    "AttentionResult",
    "Engine",
    "EngineBusy",
    "EngineUnavailable",
    "LayerInfo",
    "MoERequest",
    "MoEResult",
    "RequestExpired",
    "Segments",
]


class EngineBusy(Exception):
    """A bound of the queue is reached; the message says which."""


class EngineUnavailable(Exception):
    """No group of ranks serves, or it broke under this request; the message names the rank."""


class RequestExpired(Exception):
    """The request's own time limit passed before its step began."""


class Segments:
    """Bytes as they came in, in pieces: large tensors are copied once, to where they are needed."""

    __slots__ = ("nbytes", "parts")

    def __init__(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        self.parts = [memoryview(part) for part in parts]
        self.nbytes = sum(part.nbytes for part in self.parts)

    def slice(self, begin: int, end: int) -> Segments:
        """Bytes ``begin`` to ``end``, without copying."""
        found = []
        at = 0
        for part in self.parts:
            low, high = max(begin - at, 0), min(end - at, part.nbytes)
            if low < high:
                found.append(part[low:high])
            at += part.nbytes
            if at >= end:
                break
        return Segments(found)

    def join(self) -> memoryview:
        """The bytes in one piece; copies unless they are."""
        return self.parts[0] if len(self.parts) == 1 else memoryview(b"".join(self.parts))

    def copy_to(self, target: memoryview) -> None:
        """Writes the bytes to ``target``, which is as long."""
        at = 0
        for part in self.parts:
            target[at : at + part.nbytes] = part
            at += part.nbytes


class AttentionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The attention-pre layer that rank 0 holds beside its part of the MoE layer.

    Attributes:
        name: what it is, for people.
        hidden: H, columns of a token.
        num_heads: N, main heads.
        head_dim: D, columns of a main head.
        kv_lora: Lkv, columns of the key/value latent.
        index_heads: I.
        latent_row_bytes: of a key in the latent cache.
        num_pages: pages of 64 keys in each cache.
        max_tokens: new tokens of one request.
        backend: ``"cpu"`` or ``"cuda"``.
    """

    name: str
    hidden: int
    num_heads: int
    head_dim: int
    kv_lora: int
    index_heads: int
    latent_row_bytes: int
    num_pages: int
    max_tokens: int
    backend: str

    @property
    def max_keys(self) -> int:
        """Keys of the longest sequence: all pages."""
        return self.num_pages * 64

    @property
    def index_row_bytes(self) -> int:
        """Of a key in the index cache: 128 codes and an FP32 scale."""
        return 132


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The layer that a group of ranks holds.

    Attributes:
        name: what it is, for people: checkpoint and layer number.
        hidden: H, columns of a token.
        inter: I, columns of an expert's intermediate.
        num_experts: E, over all ranks.
        topk: K, routes per token.
        num_shared: shared experts.
        num_ranks: R.
        max_tokens: tokens that one rank holds in one step.
        weight_dtype: ``"fp8"`` or ``"bf16"``; FP8 activations are accepted with ``"fp8"`` only.
        has_router: whether the layer can choose routes itself.
        backend: ``"cpu"`` or ``"cuda"``.
        ring_blocks: capacity of the L1 and L2 ring of a rank, in blocks.
        attention: the attention-pre layer beside it, if there is one.
    """

    name: str
    hidden: int
    inter: int
    num_experts: int
    topk: int
    num_shared: int
    num_ranks: int
    max_tokens: int
    weight_dtype: Literal["fp8", "bf16"]
    has_router: bool
    backend: str
    ring_blocks: tuple[int, int]
    attention: AttentionInfo | None = None

    @property
    def capacity(self) -> int:
        """Tokens of one step over all ranks, hence of one request."""
        return self.num_ranks * self.max_tokens

    @property
    def num_groups(self) -> int:
        """Scales of one FP8 token: one per 128 columns."""
        return self.hidden // 128


@dataclass(slots=True, kw_only=True)
class MoERequest:
    """Checked input of one request; buffers are C-contiguous and little-endian.

    Attributes:
        num_tokens: n >= 1; requests of no tokens do not come here.
        hidden: [n, H] BF16, or e4m3 when ``scales`` is given.
        scales: [n, H/128] float32, or None.
        topk_ids: [n, K] int32, or None for the layer's router.
        topk_weights: [n, K] float32, or None.
        deadline: ``time.monotonic()`` after which it need not start.
        routes: whether the routes used are part of the answer (needed when the router chose).
    """

    num_tokens: int
    hidden: Segments
    scales: memoryview | None = None
    topk_ids: memoryview | None = None
    topk_weights: memoryview | None = None
    deadline: float = float("inf")
    routes: bool = False


@dataclass(slots=True, kw_only=True)
class AttentionRequest:
    """Checked input of one attention-pre request; B requests of the layer in one.

    Attributes:
        generation: group of ranks whose pages these are.
        num_tokens: M >= 1, rows of all B.
        hidden: [M, H] BF16.
        residual: [M, H] BF16.
        new_tokens: B counts; their sum is M.
        context_lens: B key counts, the new ones included.
        block_table: B lists of pages of the ranks' caches.
        positions: [M] int32, or None for each token's place among its keys.
        upload: pages to fill before the call, and their bytes [len, 64 * 132].
        rows: whether the rows that the call wrote to the caches are part of the answer.
        deadline: ``time.monotonic()`` after which it need not start.
    """

    generation: int
    num_tokens: int
    hidden: Segments
    residual: Segments
    new_tokens: list[int]
    context_lens: list[int]
    block_table: list[list[int]]
    positions: memoryview | None = None
    upload: tuple[list[int], Segments] | None = None
    rows: bool = False
    deadline: float = float("inf")

    @property
    def num_keys(self) -> int:
        """Columns of the scores: keys of the longest."""
        return max(self.context_lens)


def _nothing() -> None:
    pass


@dataclass(slots=True, kw_only=True)
class MoEResult:
    """Answer to one request.

    Attributes:
        output: [n, H] BF16; valid until ``release`` is called, which the caller must do once.
        topk_ids: [n, K] int32 that were used, if asked for.
        topk_weights: [n, K] float32 that were used, if asked for.
        queue_s: from submission to the begin of its step.
        host_s: the rest of its time in the engine, outside queue and layer.
        kernel_s: slowest rank's time in the layer.
        step: number of the step that carried it.
        step_tokens: tokens of that step, its neighbours' included.
        high_water: see ``StepRecord``.
    """

    output: memoryview
    topk_ids: bytes | None = None
    topk_weights: bytes | None = None
    queue_s: float = 0.0
    host_s: float = 0.0
    kernel_s: float = 0.0
    step: int = 0
    step_tokens: int = 0
    high_water: tuple[tuple[int, int], ...] = ()
    release: Callable[[], None] = _nothing


@dataclass(slots=True, kw_only=True)
class AttentionResult:
    """Answer to one attention-pre request; buffers are valid until ``release`` is called once.

    Attributes:
        tensors: ``residual`` BF16 [M, H], ``queries`` BF16 [M, N, D], ``absorbed`` BF16
            [M, N, Lkv], ``index_weights`` FP32 [M, I], ``logits`` FP32 [M, keys]; if asked for,
            ``latent_rows`` and ``index_rows``, bytes of the new keys in the caches.
        queue_s, host_s, kernel_s, step, step_tokens: see ``MoEResult``.
    """

    tensors: dict[str, memoryview]
    queue_s: float = 0.0
    host_s: float = 0.0
    kernel_s: float = 0.0
    step: int = 0
    step_tokens: int = 0
    release: Callable[[], None] = _nothing


class Engine(Protocol):
    """Executes a layer for the HTTP process."""

    observers: Observers

    @property
    def layer(self) -> LayerInfo | None:
        """The layer being served; None until a group of ranks has reported it."""
        ...

    def status(self) -> EngineStatus:
        """The present state, without waiting."""
        ...

    async def run_moe(self, request: MoERequest) -> MoEResult:
        """Executes one request. Cancelling the awaiting task withdraws it.

        Raises:
            EngineBusy: the queue is full.
            EngineUnavailable: no group serves, or it broke meanwhile.
            RequestExpired: the request's deadline passed in the queue.
        """
        ...

    async def run_attention(self, request: AttentionRequest) -> AttentionResult:
        """Executes one attention-pre request; as ``run_moe``."""
        ...

    def begin_drain(self) -> None:
        """Refuses new requests from now on; those in flight go on."""
        ...

    def inject_fault(self, rank: int, action: str) -> None:
        """Breaks a rank on purpose (``kill``, ``stop``, ``continue``, ``blind``, ``see``).

        Raises:
            ValueError: no such rank or action.
            EngineUnavailable: no group serves.
        """
        ...
