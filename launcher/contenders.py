"""What ``bench moe`` times: our layer, and what a user would run without it on the same machine.

A contender is prepared, checked on a sample of tokens, and only then timed. All of its methods are
collective; a rank that has no part in the work returns at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from launcher.ranks import Group, cores_per_rank
from launcher.verify import Verdict, against_oracle, judge
from megamoe.layer import MoELayer
from megamoe.reference.quant import dequantize_128x128
from megamoe.reference.tolerance import unquantised_tolerance
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights, random_expert, random_experts

__all__ = [
    "HF_CONTENDERS",
    "Batch",
    "Contender",
    "HfExperts",
    "HfWeights",
    "OurLayer",
    "Unavailable",
    "gather_experts",
]


class Unavailable(Exception):
    """A contender that cannot run this shape here; the text is the reason for its null."""


@dataclass(frozen=True)
class Batch:
    """One call's inputs on this rank, and the sample that is compared.

    Attributes:
        spec: the layer.
        counts: T of every rank.
        x: BF16 [T, H].
        topk_idx: int64 [T, K].
        topk_weight: FP32 [T, K].
        sample: int64 [N], rows of this rank that are compared.
        seed: of the weights.
    """

    spec: MoESpec
    counts: list[int]
    x: Tensor
    topk_idx: Tensor
    topk_weight: Tensor
    sample: Tensor
    seed: int

    def expert(self, global_id: int) -> ExpertWeights:
        """A routed expert, made from the seed."""
        return random_expert(self.spec, global_id, 0, self.seed)


class Contender(Protocol):
    """One of those that are timed."""

    name: str

    def prepare(self, batch: Batch) -> None:
        """Collective: takes a new batch.

        Raises:
            Unavailable: on every rank alike.
        """
        ...

    def call(self) -> object:
        """Collective: the timed region."""
        ...

    def check(self, oracle: Tensor | None) -> tuple[Verdict, Tensor | None]:
        """Collective: compares this rank's sample.

        Args:
            oracle: the oracle's rows of this rank's sample, if some contender made them before.

        Returns:
            The verdict, and the oracle's rows.
        """
        ...


class OurLayer:
    """``MoELayer.run``: staging, quantisation and the call."""

    name = "megamoe"

    def __init__(self, group: Group, layer: MoELayer) -> None:
        self._group = group
        self._layer = layer
        self._batch: Batch | None = None

    def prepare(self, batch: Batch) -> None:
        """Takes a new batch."""
        self._batch = batch

    def call(self) -> Tensor:
        """Runs the layer; BF16 [T, H] of this rank."""
        batch = self._need_batch()
        return self._layer.run(batch.x, batch.topk_idx, batch.topk_weight)

    def check(self, oracle: Tensor | None) -> tuple[Verdict, Tensor | None]:
        """Compares with the oracle, and leaves its rows for others."""
        batch = self._need_batch()
        return against_oracle(
            batch.spec,
            batch.sample,
            batch.x,
            batch.topk_idx,
            batch.topk_weight,
            self.call(),
            batch.expert,
            on_gpu=batch.x.is_cuda,
        )

    def _need_batch(self) -> Batch:
        assert self._batch is not None, "prepare first"
        return self._batch


HF_CONTENDERS: Final = {
    "hf_grouped_mm": ("grouped_mm", torch.bfloat16),
    "hf_eager": ("eager", torch.bfloat16),
    "hf_eager_fp32": ("eager", torch.float32),
}
"""Contenders on CPU ranks: transformers' experts implementation, and the dtype it runs in.

CPUs without BF16 instructions emulate them, so the fastest of transformers may be FP32 there.
"""


class HfExperts:
    """The experts of Hugging Face's Qwen3 MoE block, in rank 0 on all ranks' cores.

    It gets the tokens of all ranks at once, with their routes, so its time holds no router either.

    Attributes:
        threads: that rank 0 runs it with.
    """

    def __init__(self, group: Group, name: str, weights: HfWeights) -> None:
        self.name = name
        self._group = group
        self._implementation, self._dtype = HF_CONTENDERS[name]
        self._weights = weights
        self.threads = 1
        self._inputs: tuple[Tensor, Tensor, Tensor] | None = None
        self._batch: Batch | None = None

    def prepare(self, batch: Batch) -> None:
        """Brings every rank's tokens to rank 0."""
        if any(self._group.gather(bool((batch.topk_idx < 0).any()))):
            raise Unavailable("its experts take no masked routes")
        self._weights.load(batch)
        parts = [
            self._group.collect_rows(t, batch.counts)
            for t in (batch.x, batch.topk_idx, batch.topk_weight)
        ]
        x, idx, weight = parts
        if x is not None and idx is not None and weight is not None:
            self._inputs = (x.to(self._dtype), idx, weight.to(self._dtype))
            self.threads = self._choose_threads()
        self._batch = batch

    def _choose_threads(self) -> int:
        """One thread or all cores, whichever is faster.

        The other ranks wait, so all cores are free for it; but where the machine does other work,
        threads that wait for each other can be slower than one.
        """
        took = {}
        for threads in {1, cores_per_rank(1)}:
            self.threads = threads
            self.call()
            start = time.perf_counter()
            self.call()
            took[threads] = time.perf_counter() - start
        return min(took, key=lambda n: took[n])

    def call(self) -> Tensor | None:
        """[sum T, H] on rank 0."""
        if self._inputs is None:
            return None
        module = self._weights.modules[self._dtype]
        module.config._experts_implementation = self._implementation
        torch.set_num_threads(self.threads)
        with torch.inference_mode():
            y: Tensor = module(*self._inputs)
        return y

    def check(self, oracle: Tensor | None) -> tuple[Verdict, Tensor | None]:
        """Compares with the oracle's rows, within what FP8 activations may differ from BF16."""
        batch = self._batch
        assert batch is not None, "prepare first"
        assert oracle is not None, "our layer is checked first"
        samples = self._group.gather((batch.sample, oracle))
        y = self.call()
        if y is None:
            return Verdict(0, 0.0, 0.0, 0.0, ""), oracle
        starts = [sum(batch.counts[:r]) for r in range(self._group.num_ranks)]
        rows = torch.cat([s + start for (s, _), start in zip(samples, starts, strict=True)])
        expected = torch.cat([o for _, o in samples])
        tolerance = unquantised_tolerance(batch.spec, len(rows))
        return judge(y[rows], expected, tolerance), oracle


class HfWeights:
    """Modules of ``HfExperts`` with the layer's weights, one per dtype, on rank 0; made once.

    Attributes:
        modules: on rank 0, after ``load``.
    """

    def __init__(self, group: Group, names: Sequence[str]) -> None:
        self._group = group
        self._dtypes = {HF_CONTENDERS[name][1] for name in names}
        self.modules: dict[torch.dtype, Any] = {}
        self._loaded = False

    def load(self, batch: Batch) -> None:
        """Collective: builds the modules and fills them from every rank's experts."""
        spec = batch.spec
        if spec.swiglu_clamp is not None:
            raise Unavailable("its SwiGLU has no clamp")
        if spec.num_shared:
            raise Unavailable("its block has no shared experts")
        if self._loaded:
            return
        if self._group.first:
            self.modules = {dtype: _hf_module(spec, dtype) for dtype in self._dtypes}
        for global_id, expert in gather_experts(self._group, spec, batch.seed):
            for name, w, scale in (
                ("gate_up_proj", expert.w1, expert.w1_scale),
                ("down_proj", expert.w2, expert.w2_scale),
            ):
                plain = w if scale is None else dequantize_128x128(w, scale)
                for module in self.modules.values():
                    getattr(module, name).data[global_id].copy_(plain)
        self._loaded = True


def _hf_module(spec: MoESpec, dtype: torch.dtype) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=spec.hidden,
        moe_intermediate_size=spec.inter,
        num_experts=spec.num_experts,
        num_experts_per_tok=spec.topk,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config).to(dtype)
    return module.to_empty(device="cpu")


def gather_experts(group: Group, spec: MoESpec, seed: int) -> Iterator[tuple[int, ExpertWeights]]:
    """Collective: every rank makes its random experts; rank 0 gets all of them, by global id.

    Other ranks yield nothing; run the iterator to its end all the same.
    """
    import torch.distributed as dist

    local = spec.experts_per_rank(group.num_ranks)
    for index, expert in enumerate(random_experts(spec, group.rank, group.num_ranks, seed)):
        tensors = [expert.w1, expert.w1_scale, expert.w2, expert.w2_scale]
        if not group.first:
            for t in tensors:
                if t is not None:
                    dist.send(t.view(torch.uint8), 0)
            continue
        yield index, expert
        for rank in range(1, group.num_ranks):
            received = [None if t is None else torch.empty_like(t) for t in tensors]
            for t in received:
                if t is not None:
                    dist.recv(t.view(torch.uint8), rank)
            w1, w1_scale, w2, w2_scale = received
            assert w1 is not None
            assert w2 is not None
            yield rank * local + index, ExpertWeights(index, w1, w1_scale, w2, w2_scale)
