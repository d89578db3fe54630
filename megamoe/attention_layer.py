"""The attention-pre layer that users open: weights once, then a call per decode step.

    with open_attention_pre(spec, weights, num_pages=4096) as layer:
        out = layer.run(x, residual, new_tokens=[8, 8], context_lens=[8192, 700], block_table=table)

Shapes: M token rows of all requests, B requests, H hidden, N main heads of D columns, Lkv latent
columns, I index heads. The layer owns both caches, which a call writes; a page holds 64 keys.

On a Hopper GPU a call runs as one resident kernel (``"megakernel"``) or as eleven kernels in a
graph with branches and programmatic edges (``"cmp"``), whichever was measured to be faster for the
call's shape (``megamoe.cmp.choice``; the environment variable MEGAMOE_ATTENTION_ENGINE overrides
it). Elsewhere it runs on the CPU (``"oracle"``): the same results, for development and tests, not
fast.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.attention_step import Step, check_positions, check_requests, check_rows, make_step
from megamoe.backends.attention import AttentionKernel, BoundPlan
from megamoe.backends.attention_operands import TORCH_DTYPES
from megamoe.backends.base import hopper_available
from megamoe.cmp.bound import BoundCmp
from megamoe.cmp.choice import choose_engine
from megamoe.cmp.graphs import CmpGraph
from megamoe.errors import BackendUnavailable, CapacityError, InputError, SpecError
from megamoe.reference.attention_pre import AttentionPreOracle
from megamoe.spec import INDEX_DIM, INDEX_PAGE, AttentionPreSpec

__all__ = ["AttentionPre", "AttentionPreOutput", "Engine", "open_attention_pre"]

Engine = Literal["auto", "megakernel", "cmp", "oracle"]
_KEPT: Final = 32
"""Batch buckets whose buffers are kept."""
_MOST_PAGES: Final = 1 << 24


class AttentionPreOutput(NamedTuple):
    """What one call makes, besides its rows of both caches.

    Attributes:
        residual: BF16 [M, H], ``x + residual``.
        queries: BF16 [M, N, D], main queries (q_b), the last R columns rotated.
        absorbed: BF16 [M, N, Lkv], queries without position times W_UK.
        index_weights: FP32 [M, I]: weight of an index head, scale of its e4m3 query included.
        logits: FP32 [M, keys]: index scores against keys ``0 … context_len - 1`` of the row's
            request; -inf where a token may not look and past the request's length.
    """

    residual: Tensor
    queries: Tensor
    absorbed: Tensor
    index_weights: Tensor
    logits: Tensor


class _Runner(Protocol):
    """What an engine does with a step."""

    def run(self, step: Step) -> AttentionPreOutput: ...

    def close(self) -> None: ...


class AttentionPre:
    """One layer from Add + RMSNorm to the index scores. Not thread-safe.

    Attributes:
        spec: the layer.
        backend: ``"cpu"`` or ``"cuda"``: where tensors of a call must be.
        num_pages: pages of each cache.
        latent_cache: bytes [num_pages * 64, row]; see ``reference.attention_pre``.
        index_cache: bytes [num_pages, 64 * 132].
    """

    def __init__(
        self, spec: AttentionPreSpec, weights: Mapping[str, Tensor], num_pages: int, engine: Engine
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        self.engine = engine
        self.backend = "cpu" if engine == "oracle" else "cuda"
        device = torch.device(self.backend)
        self.max_positions = weights["rope_table"].shape[0]
        self.latent_cache = torch.zeros(
            num_pages * INDEX_PAGE, spec.latent_row_bytes, dtype=torch.uint8, device=device
        )
        self.index_cache = torch.zeros(
            num_pages, INDEX_PAGE * (INDEX_DIM + 4), dtype=torch.uint8, device=device
        )
        caches = {"latent_cache": self.latent_cache, "index_cache": self.index_cache}
        self._closed = False
        self._runner: _Runner
        if engine == "oracle":
            self._runner = _OracleRunner(spec, weights, caches)
        else:
            self._runner = _DeviceRunner(spec, weights, caches, engine)

    def run(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        new_tokens: Sequence[int],
        context_lens: Sequence[int],
        block_table: Tensor,
        positions: Tensor | None = None,
    ) -> AttentionPreOutput:
        """One call: M token rows, the requests' in order.

        Args:
            x: BF16 [M, H], output of the layer before.
            residual: BF16 [M, H].
            new_tokens: tokens of each request in this call; their sum is M.
            context_lens: keys of each request, the new tokens' included.
            block_table: int32 [B, pages]: page of each request's keys 64 i … 64 i + 63, on any
                device. Keys of new tokens are written there, both caches alike.
            positions: int32 [M], row of the rotation table; by default a token's place among the
                keys of its request.

        Raises:
            InputError: a shape, dtype, device, page or position that does not fit, two new tokens
                in one place, or a closed layer.
            CapacityError: more keys than pages of the table, or than positions.
        """
        if self._closed:
            raise InputError("the layer is closed: open another one")
        batch, table = check_requests(
            new_tokens, context_lens, block_table, self.num_pages, self.max_positions
        )
        for name, t in (("x", x), ("residual", residual)):
            check_rows(name, t, batch.rows, self.spec.hidden, self.backend)
        if positions is not None:
            check_positions(positions, batch.rows, self.max_positions)
        return self._runner.run(make_step(batch, table, x, residual, positions))

    def prepare(self, rows: Sequence[int]) -> None:
        """Plans calls of one request of so many rows, before the first of them.

        That one then compiles what all of them need; else a call compiles anew, for tens of
        seconds, when it is the first that needs a body of its own. Nothing to do on the CPU.
        """
        if isinstance(self._runner, _DeviceRunner):
            self._runner.plan_ahead([Batch(((count, count),)) for count in rows])

    def close(self) -> None:
        """Frees weights and caches."""
        self._closed = True
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _OracleRunner:
    """The CPU: FP64, rounded where the kernels round."""

    def __init__(
        self, spec: AttentionPreSpec, weights: Mapping[str, Tensor], caches: Mapping[str, Tensor]
    ) -> None:
        self._spec = spec
        self._oracle = AttentionPreOracle(spec, {n: t.cpu() for n, t in weights.items()})
        self._caches = dict(caches)

    def run(self, step: Step) -> AttentionPreOutput:
        new = [n for n, _ in step.batch.requests]
        detail = self._oracle.run({**step.tensors, **self._caches}, new)
        scales = detail.index_query.scales
        assert scales is not None
        logits = torch.full((step.batch.rows, step.batch.logits_stride), -torch.inf)
        row = 0
        for count, scores in zip(new, detail.scores, strict=True):
            logits[row : row + count, : scores.shape[1]] = scores.float()
            row += count
        return AttentionPreOutput(
            detail.residual.bfloat16(),
            detail.queries.bfloat16(),
            detail.absorbed.bfloat16(),
            (detail.index_weights * scales.squeeze(-1)).float(),
            logits,
        )

    def close(self) -> None:
        self._caches.clear()


_MEMBERS: Final = {
    "residual": "A0.add.out",
    "queries": "D0.rope.out",
    "absorbed": "D2.bmm.out",
    "index_weights": "D1.fold.out",
    "logits": "E1.paged_logits.out",
}
"""Buffers of the graph by the output's members."""


@dataclass(frozen=True)
class _Prepared:
    """A batch bucket on the device: its buffers, and how to run it."""

    tensors: Mapping[str, Tensor]
    run: Callable[[], None]
    close: Callable[[], None] = lambda: None


class _DeviceRunner:
    """A Hopper GPU. Every batch bucket keeps its buffers; inputs are copied into them.

    Kernels are compiled when a bucket first needs them: 17 s for the megakernel's, which few
    buckets share, a second for eleven small ones.
    """

    def __init__(
        self,
        spec: AttentionPreSpec,
        weights: Mapping[str, Tensor],
        caches: Mapping[str, Tensor],
        engine: Engine,
    ) -> None:
        self._engine = engine
        self._held = {n: t.cuda().contiguous() for n, t in weights.items()} | dict(caches)
        self._planner = Planner(
            attention_pre_graph(spec),
            torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count,
        )
        self._prepared: OrderedDict[tuple[Batch, str], _Prepared] = OrderedDict()
        self._kernel: AttentionKernel | None = None

    def run(self, step: Step) -> AttentionPreOutput:
        engine = self._engine
        if engine == "auto":
            engine = choose_engine(step.batch.rows, max(keys for _, keys in step.batch.requests))
        key = step.batch.bucket(), engine
        if key not in self._prepared:
            self._prepared[key] = self._prepare(step, engine)
            while len(self._prepared) > _KEPT:
                torch.cuda.synchronize()
                self._prepared.popitem(last=False)[1].close()
        self._prepared.move_to_end(key)
        found = self._prepared[key]
        for name, value in step.tensors.items():
            found.tensors[name].copy_(value)
        found.run()
        return AttentionPreOutput(
            **{member: found.tensors[name].clone() for member, name in _MEMBERS.items()}
        )

    def plan_ahead(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._planner.plan(batch)

    def _prepare(self, step: Step, engine: Engine) -> _Prepared:
        plan = self._planner.plan(step.batch)
        encoded = encode(plan)
        tensors = dict(self._held)
        for name, buffer in encoded.buffers.items():
            if name not in tensors:
                shape = tuple(int(d) for d in buffer.shape)
                tensors[name] = torch.zeros(shape, dtype=TORCH_DTYPES[buffer.dtype], device="cuda")
        # No task stores tiles past a request's last one.
        tensors[_MEMBERS["logits"]].fill_(-torch.inf)
        if engine == "cmp":
            graph = CmpGraph([BoundCmp(plan, tensors)], "branches_pdl")
            return _Prepared(
                tensors,
                lambda: graph.launch(torch.cuda.current_stream().cuda_stream),
                graph.close,
            )
        wanted = self._planner.specializations
        if self._kernel is None or not set(encoded.specializations) <= set(self._kernel.specs):
            self._kernel = AttentionKernel(wanted)
        return _Prepared(tensors, BoundPlan(self._kernel, encoded, tensors).run)

    def close(self) -> None:
        torch.cuda.synchronize()
        for prepared in self._prepared.values():
            prepared.close()
        self._prepared.clear()
        self._held.clear()


def open_attention_pre(
    spec: AttentionPreSpec,
    weights: Mapping[str, Tensor],
    *,
    num_pages: int,
    engine: Engine = "auto",
) -> AttentionPre:
    """Opens an attention-pre layer on this process's device.

    Args:
        spec: the layer's mathematics (``megamoe.spec.ATTENTION_MODELS`` by name).
        weights: by the names of ``attention_pre.graphs.attention_pre_graph``: ``input_norm``,
            ``w_qkv_a`` (+ ``_scales``), ``q_norm``, ``kv_norm``, ``w_gate``, ``w_index_k``
            (+ ``_scales``), ``index_norm``, ``index_norm_bias``, ``w_index_q`` (+ ``_scales``),
            ``w_q_b`` (+ ``_scales``), ``w_uk``, ``rope_table``; on any device.
        num_pages: pages of 64 keys in each cache.
        engine: ``"oracle"`` runs on the CPU; ``"megakernel"`` and ``"cmp"`` need a Hopper GPU;
            ``"auto"`` takes what was measured to be faster for each call's shape, and the oracle
            where there is no such GPU.

    Raises:
        SpecError: an unknown engine, or a weight that is missing or not as the graph has it.
        CapacityError: no such number of pages.
        BackendUnavailable: an engine that this machine cannot run.
    """
    if engine not in ("auto", "megakernel", "cmp", "oracle"):
        raise SpecError(
            f"engine = {engine!r}: must be 'auto', 'megakernel', 'cmp' or 'oracle' (the CPU)"
        )
    if type(num_pages) is not int or not 1 <= num_pages <= _MOST_PAGES:
        raise CapacityError(f"num_pages = {num_pages!r}: must be in 1..{_MOST_PAGES}")
    _check_weights(spec, weights)
    if engine == "auto" and not hopper_available():
        engine = "oracle"
    if engine != "oracle" and not hopper_available():
        raise BackendUnavailable(
            f"engine = {engine!r} needs a Hopper GPU (compute capability 9.0): engine='oracle' "
            "runs on the CPU"
        )
    return AttentionPre(spec, weights, num_pages, engine)


def _check_weights(spec: AttentionPreSpec, weights: Mapping[str, Tensor]) -> None:
    tensors = attention_pre_graph(spec).tensors.values()
    needed = {t.name: t for t in tensors if t.kind == "weight"}
    if missing := [name for name in needed if name not in weights]:
        raise SpecError(f"no weight {', '.join(missing)}: the layer needs {', '.join(needed)}")
    for name, want in needed.items():
        have = weights[name]
        fits = len(have.shape) == len(want.shape) and all(
            n == size or (size == "?" and n > 0)
            for n, size in zip(have.shape, want.shape, strict=True)
        )
        if not fits or have.dtype != TORCH_DTYPES[want.dtype]:
            shape = ", ".join(map(str, want.shape))
            raise SpecError(
                f"weight {name} is {have.dtype} {list(have.shape)}: must be "
                f"{TORCH_DTYPES[want.dtype]} [{shape}]"
            )
