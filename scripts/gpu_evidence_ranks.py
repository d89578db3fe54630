"""Traces, what tracing costs, and the power experiment, in one process per rank: GPU time is dear.

    torchrun --nproc-per-node 2 scripts/gpu_evidence_ranks.py --out DIR

``scripts/gpu_evidence`` builds, compiles and starts it.

Writes ``trace_T.json.gz``, ``timeline_T.svg`` and ``trace.json`` (sums and problems), and
``power.json`` in the form of ``megamoe bench power``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from launcher.bench_power import VARIANTS
from launcher.meta import run_meta
from launcher.models import published_layer
from launcher.moe_perfetto import chrome_trace
from launcher.moe_timeline import timeline_svg
from launcher.moe_trace import trace_figures, trace_problems
from launcher.power import measure
from launcher.ranks import process_group, sampler_of
from launcher.trace_moe import trace_call, write_trace
from megamoe.spec import EpConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--inter", type=int, default=0)
    parser.add_argument("--tokens", default="64,8192")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--backend", default="cuda")
    options = parser.parse_args()
    spec = published_layer(
        options.model, experts=options.experts, hidden=options.hidden, inter=options.inter
    )
    size = int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("RANK", "0")
    with process_group(size, options.backend) as group:
        started = time.monotonic()
        options.out.mkdir(parents=True, exist_ok=True)

        def say(*words: object) -> None:
            if group.first:
                print(f"{time.monotonic() - started:6.1f} s", *words, flush=True)

        found = []
        for tokens in options.tokens.split(","):
            os.environ["MEGAMOE_TRACE"] = "1"
            config = EpConfig(num_ranks=size, max_tokens=1, timeout_s=10)
            traces, samples = trace_call(
                group, spec, config, tokens, "uniform", 3, 0.3, 1, options.backend
            )
            del os.environ["MEGAMOE_TRACE"]
            problems = [f"rank {t.rank}: {p}" for t in traces for p in trace_problems(t)]
            figures = [trace_figures(t) for t in traces]
            found.append({"tokens": int(tokens), "ranks": figures, "problems": problems})
            say("trace", tokens, json.dumps(figures[0]), problems[:5])
            if group.first:
                write_trace(options.out / f"trace_{tokens}.json.gz", chrome_trace(traces, samples))
                title = f"{options.model}, {spec.num_experts} experts, {tokens} tokens per rank, "
                title += f"rank 0 of {size}"
                svg = timeline_svg(traces[0], title=title)
                (options.out / f"timeline_{tokens}.svg").write_text(svg)
            if options.backend != "cpu":
                torch.cuda.empty_cache()
        meta = {}
        if group.first:
            limit = sampler_of(group.device).read().values
            meta = run_meta(
                command=f"torchrun --nproc-per-node {size} {' '.join(sys.argv)}",
                power=f"as found; enforced limit {limit.get('power_limit_watts')} W",
                clocks="as found, never set",
            )
        if group.first:
            text = json.dumps({"meta": meta, "rows": found}, indent=1)
            (options.out / "trace.json").write_text(text + "\n")
        rows = []
        for tokens in map(int, options.tokens.split(",")):
            seconds = options.seconds if tokens >= 1024 else options.seconds / 2
            rows += measure(
                group, spec, options.model, tokens, options.variants.split(","), seconds,
                options.rounds, 1,
            )  # fmt: skip
            for row in rows[-len(options.variants.split(",")) :]:
                say({k: v for k, v in row.items() if k not in ("series", "reasons", "model")})
            if group.first:
                text = json.dumps({"meta": meta, "rows": rows})
                (options.out / "power.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
