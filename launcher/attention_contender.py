"""Attention-pre from public kernels, one after another: ``python -m launcher.attention_contender``.

What a user can put together today on Hopper: DeepGEMM's block-scaled FP8 GEMMs and paged index
scores, ``torch.bmm`` and ``torch.mm``, row norms with quantisation in Triton; eleven launches in
one CUDA graph on one stream. It is a skeleton for timing, in the contender's favour: rotary
embedding, LayerNorm, cache writes and the gate's fold are left out, so results are not compared.

Cold: the graph rotates over copies of weights and caches that exceed L2 together.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from launcher.attention_rows import Timing, batch_of, table_row, time_graph
from launcher.meta import run_meta
from launcher.script import run_script
from megamoe.errors import BackendUnavailable
from megamoe.spec import ATTENTION_MODELS, GROUP, INDEX_DIM, INDEX_PAGE

__all__ = ["Contender", "contender_rows", "main"]

_NEXT: Final = 2
"""Tokens of a request that DeepGEMM's Hopper kernel of scores takes at once."""


def _norm_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def norm_quant(x, r, w, o, q, s, N: tl.constexpr, NB: tl.constexpr, ADD: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0)
        k = tl.arange(0, NB)
        v = tl.load(x + row * N + k, mask=k < N, other=0.0).to(tl.float32)
        if ADD:
            v += tl.load(r + row * N + k, mask=k < N, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(v * v, 0) / N + 1e-5)
        v = v * scale * tl.load(w + k, mask=k < N, other=0.0).to(tl.float32)
        tl.store(o + row * N + k, v.to(tl.bfloat16), mask=k < N)
        g = tl.reshape(v, [NB // 128, 128])
        a = tl.maximum(tl.max(tl.abs(g), 1), 1e-4) / 448.0
        c = tl.reshape((g / a[:, None]).to(tl.float8e4nv), [NB])
        tl.store(q + row * N + k, c, mask=k < N)
        b = tl.arange(0, NB // 128)
        tl.store(s + row * (N // 128) + b, a, mask=b < N // 128)

    return norm_quant


class Contender:
    """The eleven kernels on ``copies`` sets of weights and caches, for one batch."""

    def __init__(self, rows: int, kv: int, copies: int = 6) -> None:
        import deep_gemm

        self.gemm = deep_gemm
        self.norm = _norm_kernel()
        spec = ATTENTION_MODELS["glm-5.2"]
        self.spec, self.rows, self.kv = spec, rows, kv
        m, h = rows, spec.hidden
        on: dict[str, Any] = {"device": "cuda"}
        e4m3, bf16 = torch.float8_e4m3fn, torch.bfloat16

        def fp8(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            w = (torch.randn(n, k, **on) * 50).to(e4m3)
            return w, (torch.rand(-(-n // GROUP), k // GROUP, **on) + 0.5) * 1e-3

        batch = batch_of(rows, kv)
        pages = len(batch.requests) * (-(-kv // INDEX_PAGE))
        self.sets: list[dict[str, Any]] = []
        for _ in range(copies):
            cache = torch.randint(
                0, 120, (pages, INDEX_PAGE, 1, INDEX_DIM + 4), dtype=torch.uint8, **on
            )
            scales = cache.view(-1, INDEX_PAGE * (INDEX_DIM + 4))[:, INDEX_PAGE * INDEX_DIM :]
            scales.view(torch.float32).fill_(0.01)
            self.sets.append(
                {
                    "b0": fp8(spec.qkv_a_dim, h),
                    "b1": fp8(INDEX_DIM, h),
                    "d0": fp8(spec.num_heads * spec.head_dim, spec.q_lora),
                    "d1": fp8(spec.index_heads * INDEX_DIM, spec.q_lora),
                    "c0": torch.randn(spec.index_heads, h, dtype=bf16, **on),
                    "d2": torch.randn(spec.num_heads, spec.qk_nope, spec.kv_lora, dtype=bf16, **on),
                    "kv": cache,
                }
            )
        ones = {n: torch.ones(n, dtype=bf16, **on) for n in (h, spec.q_lora, INDEX_DIM)}
        self.ones = ones
        self.x, self.r = torch.randn(2, m, h, dtype=bf16, **on)
        heads = m * spec.index_heads
        self.t: dict[str, torch.Tensor] = {
            "n": torch.empty(m, h, dtype=bf16, **on),
            "q": torch.empty(m, h, dtype=e4m3, **on),
            "s": torch.empty(m, h // GROUP, **on),
            "qkv": torch.empty(m, spec.qkv_a_dim, dtype=bf16, **on),
            "key": torch.empty(m, INDEX_DIM, dtype=bf16, **on),
            "key_n": torch.empty(m, INDEX_DIM, dtype=bf16, **on),
            "key_q": torch.empty(m, INDEX_DIM, dtype=e4m3, **on),
            "key_s": torch.empty(m, 1, **on),
            "qr": torch.randn(m, spec.q_lora, dtype=bf16, **on),
            "qn": torch.empty(m, spec.q_lora, dtype=bf16, **on),
            "qq": torch.empty(m, spec.q_lora, dtype=e4m3, **on),
            "qs": torch.empty(m, spec.q_lora // GROUP, **on),
            "main": torch.empty(m, spec.num_heads * spec.head_dim, dtype=bf16, **on),
            "index": torch.empty(m, spec.index_heads * INDEX_DIM, dtype=bf16, **on),
            "index_n": torch.empty(heads, INDEX_DIM, dtype=bf16, **on),
            "index_q": torch.empty(heads, INDEX_DIM, dtype=e4m3, **on),
            "index_s": torch.empty(heads, 1, **on),
            "w": torch.rand(m, spec.index_heads, **on),
        }
        self.together = _NEXT if m % _NEXT == 0 else 1
        groups = m // self.together
        new = batch.requests[0][0]
        self.lens = torch.full((groups, self.together), kv, dtype=torch.int32, **on)
        table = torch.arange(pages, dtype=torch.int32, **on).view(len(batch.requests), -1)
        self.table = table.repeat_interleave(max(1, new // self.together), 0).contiguous()
        self.schedule = deep_gemm.get_paged_mqa_logits_metadata(self.lens, INDEX_PAGE, 132)

    def run(self, copy: int) -> list[Any]:
        """Enqueues the eleven kernels; what is returned must outlive them."""
        t, s, spec, m = self.t, self.sets[copy], self.spec, self.rows
        h, lora = spec.hidden, spec.q_lora

        def norm(
            x: str, o: str, q: str, sc: str, n: int, block: int, rows: int, warps: int
        ) -> None:
            self.norm[(rows,)](
                t[x], t[x], self.ones[n], t[o], t[q], t[sc], n, block, False, num_warps=warps
            )

        self.norm[(m,)](
            self.x, self.r, self.ones[h], t["n"], t["q"], t["s"], h, 8192, True, num_warps=8
        )
        self.gemm.fp8_gemm_nt((t["q"], t["s"]), s["b0"], t["qkv"])
        norm("qr", "qn", "qq", "qs", lora, 2048, m, 4)
        gate = torch.mm(t["n"], s["c0"].t())
        self.gemm.fp8_gemm_nt((t["q"], t["s"]), s["b1"], t["key"])
        norm("key", "key_n", "key_q", "key_s", INDEX_DIM, INDEX_DIM, m, 1)
        self.gemm.fp8_gemm_nt((t["qq"], t["qs"]), s["d0"], t["main"])
        self.gemm.fp8_gemm_nt((t["qq"], t["qs"]), s["d1"], t["index"])
        norm(
            "index", "index_n", "index_q", "index_s", INDEX_DIM, INDEX_DIM, m * spec.index_heads, 1
        )
        main = t["main"].view(m, spec.num_heads, spec.head_dim)[:, :, : spec.qk_nope]
        absorbed = torch.bmm(main.transpose(0, 1), s["d2"])
        scores = self.gemm.fp8_paged_mqa_logits(
            t["index_q"].view(-1, self.together, spec.index_heads, INDEX_DIM),
            s["kv"], t["w"], self.lens, self.table, self.schedule, self.kv, False,
        )  # fmt: skip
        return [gate, absorbed, scores]

    def time(self, l2: str, launches: int = 60, replays: int = 20) -> Timing:
        """Per run of the eleven."""
        copies = len(self.sets) if l2 == "cold" else 1
        keep: list[Any] = [self.run(c) for c in range(copies)]
        torch.cuda.synchronize()

        def launch(copy: int) -> Callable[[torch.cuda.Stream], None]:
            return lambda _stream: keep.append(self.run(copy))

        return time_graph([launch(i % copies) for i in range(launches)], replays)


def contender_rows(
    rows: Sequence[int],
    kv: Sequence[int],
    ours: Sequence[Mapping[str, Any]] = (),
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """Rows ``peer_serial`` of ``attention_pre_h200.json``.

    Args:
        rows: token counts.
        kv: keys of a request.
        ours: rows whose floor the same shape takes.
        on_row: called with each.

    Raises:
        BackendUnavailable: DeepGEMM or Triton is not installed.
    """
    floors = {(r["m"], r["kv"]): r["floor_us"] for r in ours if r["variant"] == "megakernel"}
    found: list[dict[str, Any]] = []
    for m in rows:
        for keys in kv:
            try:
                contender = Contender(m, keys)
            except ImportError as e:
                raise BackendUnavailable(f"the public kernels are not installed: {e}") from e
            floor = floors.get((m, keys))
            for l2 in ("cold", "warm"):
                t = contender.time(l2)
                row = table_row("peer_serial", batch_of(m, keys), l2, t, floor_us=floor)
                fraction = None if floor is None else round(floor / row["us"], 3)
                row |= {"max_rel_err": None, "fraction_of_floor": fraction}
                found.append(row)
                on_row(row)
    return found


def main() -> None:
    """Times the contender alone; prints and writes its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="16")
    parser.add_argument("--kv", default="8192")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        print("| " + " | ".join(f"{k} {v}" for k, v in row.items()) + " |", flush=True)
        if args.output:
            found = {"meta": run_meta(contender="deep_gemm, torch, triton"), "rows": rows}
            args.output.write_text(json.dumps(found, indent=1) + "\n")

    tokens, keys = ([int(v) for v in text.split(",")] for text in (args.tokens, args.kv))
    contender_rows(tokens, keys, on_row=show)


if __name__ == "__main__":
    run_script(main)
