r"""Times our layer alone under several configurations, for work on the MoE kernel.

    torchrun --nproc-per-node 2 scripts/gpu_configs.py --model v4-flash --tokens 4096 \
        --configs 128:0:0:0:0,128:64:64:8:20 --stamps

`megamoe bench moe` is for figures beside other kernels, with checks; `megamoe tune` searches. Here
every configuration is named, its output is compared with the first one's bits, and `--stamps` shows
the time stamps and sums of `csrc/device/trace.cuh`, which change the times.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor

from launcher.gpu_contenders import GpuBatch, GpuWeights, OurKernel
from launcher.gpu_timing import GpuTimer
from launcher.models import published_layer
from launcher.ranks import Group, process_group
from launcher.script import run_script
from launcher.workloads import random_activations, route
from megamoe import native
from megamoe.reference.quant import quantize_1x128
from megamoe.spec import MODELS, EpConfig, MoESpec

#: Columns of ``CudaSession.stamps``, in the order of ``TraceSlot``: stamps, sums and counts.
STAMPS = (
    *("start", "staged", "listed", "counts", "first rows", "tiles done", "combined", "pulled"),
    "end",
)
SUMS = (
    *("stage x", "stage w", "math", "first stages", "epilogue 1", "epilogue 2"),
    *("cycles", "tiles 1", "tiles 2"),
    *native.describe()["tags"],
)


def batch_of(group: Group, spec: MoESpec, routing: str, tokens: int) -> GpuBatch:
    """The same inputs for every configuration."""
    ids, weight = route(routing, spec, group.num_ranks, group.rank, tokens, 1)
    x = random_activations(spec, group.rank, tokens, 1).to(group.device)
    values, scale = quantize_1x128(x) if spec.weight_dtype == "fp8" else (x, None)
    ids, weight = ids.to(group.device), weight.to(group.device)
    counts = [tokens] * group.num_ranks
    return GpuBatch(spec, counts, x, values, scale, ids, weight, torch.zeros(0, dtype=torch.int64))


def config_of(text: str, num_ranks: int, tokens: int) -> EpConfig:
    """A configuration from ``block_m:ring_l1:ring_l2:wave:lag``."""
    block_m, ring_l1, ring_l2, wave, lag = (int(v) for v in text.split(":"))
    return EpConfig(
        num_ranks=num_ranks,
        max_tokens=max(tokens, 128),
        block_m=block_m,
        ring_l1_blocks=ring_l1,
        ring_l2_blocks=ring_l2,
        wave_blocks=wave,
        l2_lag_blocks=lag,
        timeout_s=10,
    )


def stamps_text(trace: Tensor) -> str:
    """Min / median / max over CTAs: stamps in µs after the first CTA's start, sums in µs."""
    t = trace.double()
    if t.shape[1] != len(STAMPS) + len(SUMS):
        raise SystemExit(f"{t.shape[1]} slots: the names here are not those of device/trace.cuh")
    us = (t[:, : len(STAMPS)] - t[:, 0].min()) / 1e3
    sums = dict(zip(SUMS, t[:, len(STAMPS) :].T, strict=True))
    mhz = (sums.pop("cycles") / (us[:, -1] - us[:, 0])).median().item()
    columns = dict(zip(STAMPS, us.T, strict=True))
    columns |= {name: v if name.startswith("tiles") else v / mhz for name, v in sums.items()}
    words = (f"{n} {v.min():.0f}/{v.median():.0f}/{v.max():.0f}" for n, v in columns.items())
    return "; ".join([f"{mhz:.0f} MHz", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="v4-flash", choices=sorted(MODELS))
    parser.add_argument("--experts", type=int, default=0, help="fewer than the model has")
    parser.add_argument("--tokens", default="64,4096", help="per rank, with commas")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--configs", default="0:0:0:0:0", help="block_m:ring_l1:ring_l2:wave:lag,…")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--stamps", action="store_true", help="a build with time stamps")
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, a rank per GPU: see the docstring")
    if options.stamps:
        os.environ["MEGAMOE_TRACE"] = "1"
        others = os.environ.get("MEGAMOE_DEFINES")
        os.environ["MEGAMOE_DEFINES"] = ",".join(filter(None, [others, "MEGAMOE_TRACE_WAITS=1"]))
    spec = published_layer(options.model, experts=options.experts)
    with process_group(int(os.environ["WORLD_SIZE"]), "cuda") as group:
        timer, weights = GpuTimer(group), GpuWeights(group, spec, 1)
        for tokens in map(int, options.tokens.split(",")):
            batch = batch_of(group, spec, options.routing, tokens)
            first: Tensor | None = None
            for text in options.configs.split(","):
                ours = OurKernel(spec, config_of(text, group.num_ranks, tokens), weights)
                ours.prepare(batch)
                y = ours.call().view(torch.int16).clone()
                ours.session.check()
                first = y if first is None else first
                same = all(group.gather(torch.equal(y, first)))
                found = timer.bursts({"us": ours.call}, options.rounds, options.calls)["us"]
                ours.session.check()
                if group.first:
                    print(
                        f"{options.model} T={tokens} {text}: {found.median_us:.1f} µs, "
                        f"p99 {found.p99_us:.1f}{'' if same else ', OTHER BITS'}",
                        *([stamps_text(ours.session.stamps())] if options.stamps else []),
                        sep="\n    ",
                        flush=True,
                    )
                ours.session.close()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    run_script(main)
