"""Rank 0's attention-pre layer: a request's tensors from the arena, through it, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megamoe.attention_layer import AttentionPre, open_attention_pre
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from megamoe.attention_step import key_slots
from megamoe.backends.attention import compile_attention
from megamoe.errors import CapacityError
from megamoe.spec import INDEX_DIM, INDEX_PAGE, AttentionPreSpec
from service import ipc
from service.arena import ATTENTION_OUTPUTS, Arena
from service.engine import AttentionInfo

__all__ = ["AttentionExecutor", "AttentionOptions", "compile_ahead"]

MAX_TOKENS: Final = 128
"""The kernels have no bodies for more rows."""
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Up to each of which the kernels' bodies are the same; below 8 only those of the scores differ."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What attention-pre layer a service has.

    Attributes:
        name: for people.
        spec: of the layer.
        num_pages: pages of 64 keys of each cache.
        seed: of its random weights.
    """

    name: str
    spec: AttentionPreSpec
    num_pages: int
    seed: int

    def open(self, device: str) -> AttentionPre:
        """The layer with its weights, on a rank's device."""
        from megamoe.attention_pre.data import random_weights

        try:
            weights = random_weights(self.spec, self.num_pages * INDEX_PAGE, self.seed)
            layer = open_attention_pre(
                self.spec,
                {name: t.to(device) for name, t in weights.items()},
                num_pages=self.num_pages,
                engine="oracle" if device == "cpu" else "auto",
            )
        except RuntimeError as error:  # torch has a class for it on GPUs only
            if "memory" not in str(error):
                raise
            page = INDEX_PAGE * (self.spec.latent_row_bytes + INDEX_DIM + 4)
            raise CapacityError(
                f"--cache-pages {self.num_pages}: caches of {self.num_pages * page / 2**30:.1f} "
                f"GiB and the layer's weights do not fit into this rank's memory: give fewer"
            ) from None
        if layer.backend != "cpu":
            _compile(layer)
        return layer

    def info(self, layer: AttentionPre) -> AttentionInfo:
        """What the HTTP process needs to know."""
        spec = self.spec
        return AttentionInfo(
            name=self.name,
            hidden=spec.hidden,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            kv_lora=spec.kv_lora,
            index_heads=spec.index_heads,
            latent_row_bytes=spec.latent_row_bytes,
            num_pages=self.num_pages,
            max_tokens=MAX_TOKENS,
            backend=layer.backend,
        )


def compile_ahead(spec: AttentionPreSpec, num_sms: int = 132) -> None:
    """Compiles into the cache what ``AttentionOptions.open`` will want. Needs no GPU.

    Args:
        spec: of the layer.
        num_sms: of the GPU that will run it.
    """
    planner = Planner(attention_pre_graph(spec), num_sms)
    for rows in ROWS:
        planner.plan(Batch(((rows, rows),)))
    compile_attention(planner.specializations)


def _compile(layer: AttentionPre) -> None:
    """Runs once with each number of rows that has kernels of its own.

    Compiling takes tens of seconds, once per machine: not while requests wait.
    """
    layer.prepare(ROWS)
    for rows in ROWS:
        if rows > layer.num_pages * INDEX_PAGE:
            break
        x = torch.zeros(rows, layer.spec.hidden, dtype=torch.bfloat16, device=layer.backend)
        table = torch.arange(-(-rows // INDEX_PAGE), dtype=torch.int32)[None]
        layer.run(x, x, new_tokens=[rows], context_lens=[rows], block_table=table)
    for cache in (layer.latent_cache, layer.index_cache):
        cache.zero_()


class AttentionExecutor:
    """Runs requests one after the other, each alone.

    The kernels' plans depend on a call's rows: in company a request would get other bits.
    """

    def __init__(self, layer: AttentionPre, arena: Arena) -> None:
        self.layer = layer
        self.bytes = torch.frombuffer(arena.view, dtype=torch.uint8)
        self.device = layer.index_cache.device

    def run(self, submit: ipc.SubmitAttention) -> float:
        """Executes a request; returns the seconds in the layer."""
        layer, spec = self.layer, self.layer.spec
        rows = submit.num_tokens
        if submit.upload:
            pages = torch.tensor(submit.upload, device=self.device)
            sent = self._part(submit, "upload", torch.uint8).view(len(pages), -1)
            layer.index_cache[pages] = sent.to(self.device)
        x = self._part(submit, "x", torch.bfloat16).view(rows, spec.hidden)
        residual = self._part(submit, "residual_in", torch.bfloat16).view(rows, spec.hidden)
        positions = None
        if "positions" in submit.parts:
            positions = self._part(submit, "positions", torch.int32)
        width = max(len(row) for row in submit.block_table)
        table = torch.tensor(
            [row + [0] * (width - len(row)) for row in submit.block_table], dtype=torch.int32
        )
        inputs = x.to(self.device), residual.to(self.device)
        begun = time.monotonic()
        out = layer.run(
            *inputs,
            new_tokens=submit.new_tokens,
            context_lens=submit.context_lens,
            block_table=table,
            positions=positions,
        )
        if self.device.type != "cpu":
            torch.cuda.synchronize()
        took = time.monotonic() - begun
        keys = max(submit.context_lens)
        found = {**out._asdict(), "logits": out.logits[:, :keys]}
        if "index_rows" in submit.parts:
            found |= self._cache_rows(submit, table)
        for name in ATTENTION_OUTPUTS:
            if name in submit.parts:
                tensor: Tensor = found[name]
                target = self._part(submit, name, tensor.dtype)
                target.view(tensor.shape).copy_(tensor)
        return took

    def _part(self, submit: ipc.SubmitAttention, name: str, dtype: torch.dtype) -> Tensor:
        begin, nbytes = submit.parts[name]
        return self.bytes[begin : begin + nbytes].view(dtype)

    def _cache_rows(self, submit: ipc.SubmitAttention, table: Tensor) -> Mapping[str, Tensor]:
        """What the call wrote into both caches: bytes [M, row]."""
        requests = list(zip(submit.new_tokens, submit.context_lens, strict=True))
        slots = key_slots(requests, table)[1].to(self.device)
        pages, places_in = self.layer.index_cache[slots // INDEX_PAGE], slots % INDEX_PAGE
        each = torch.arange(len(slots), device=self.device)
        codes = pages[:, : INDEX_PAGE * INDEX_DIM].view(-1, INDEX_PAGE, INDEX_DIM)
        scales = pages[:, INDEX_PAGE * INDEX_DIM :].reshape(-1, INDEX_PAGE, 4)
        index_rows = torch.cat([codes[each, places_in], scales[each, places_in]], 1)
        return {"latent_rows": self.layer.latent_cache[slots], "index_rows": index_rows}
