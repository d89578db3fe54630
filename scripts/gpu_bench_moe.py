"""Times the MoE layer on GPUs beside public kernels, and writes ``benchmarks/results`` rows.

    torchrun --nproc-per-node 2 scripts/gpu_bench_moe.py --models v4-flash --tokens 8,64

Contenders: the fused SM90 kernel of sgl-deep-gemm ("peer"), an unfused pipeline of NCCL all-to-all,
DeepGEMM grouped GEMMs and a Triton SwiGLU with all index work done before ("unfused"), and the two
grouped GEMMs alone ("gemms"). All start from the same FP8 activations and include staging.

Each is checked against the oracle on sampled tokens before it is timed. A time is the maximum
over ranks of one call; L2 is flushed before each call, ranks meet on the stream, and the GPU is
kept busy until the host has enqueued the call. Shape legend: T tokens, H hidden, E experts.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_contenders import CLAMP, F8, Ours, Peer, Unfused

from megamoe.spec import MODELS, MoESpec

FLOP_RATE, READ_RATE, LINK_RATE = 1250e12, 4.70e12, 335e9


def say(*words):
    if dist.get_rank() == 0:
        print(*words, flush=True)


# ---------------------------------------------------------------- inputs


def quantise(x):
    """e4m3 [T, H] and FP32 scales [T, H/128] by the layer's rule."""
    v = x.float().view(x.shape[0], -1, 128)
    scale = v.abs().amax(-1).clamp(min=1e-30) / 448.0
    q = (v * scale.reciprocal()[..., None]).clamp(-448, 448).to(F8)
    return q.view(x.shape), scale.contiguous()


def make_routes(spec, tokens, routing, generator):
    """Scores and top-k ids of this rank."""
    experts, topk = spec.num_experts, spec.topk
    score = torch.randn(tokens, experts, device="cuda", generator=generator)
    if routing == "zipf":
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(7)).cuda()
        score += torch.log(1.0 / torch.arange(1, experts + 1, device="cuda").float())[order]
    if routing == "hot":
        chosen = torch.rand(tokens, 1, device="cuda", generator=generator) < 0.5
        score[:, :topk] += torch.where(chosen, 100.0, 0.0)
    if routing == "one":
        score[:, experts // dist.get_world_size() :] -= 1e4
    weight, ids = torch.topk(score, topk, dim=-1)
    return ids, weight.softmax(-1).contiguous()


def make_weights(spec, rank, ranks):
    """This rank's experts: e4m3 [E_l, N, K] and FP32 block scales, for both linears."""
    local = spec.num_experts // ranks
    torch.manual_seed(1 + rank)

    def make(n, k):
        w = torch.empty(local, n, k, dtype=F8, device="cuda")
        for e in range(local):
            w[e] = (torch.randn(n, k, device="cuda") * 60).to(F8)
        return w, (torch.rand(local, n // 128, k // 128, device="cuda") + 0.5) * 0.0005

    return make(2 * spec.inter, spec.hidden), make(spec.hidden, spec.inter)


def oracle(spec, weights, x8, sx, ids, weight, sample):
    """FP32 y of the sampled tokens of every rank: each rank does its own experts' part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (w1, s1), (w2, s2) = weights
    local = spec.num_experts // ranks

    def everyone(t):
        out = [torch.empty_like(t) for _ in range(ranks)]
        dist.all_gather(out, t.contiguous())
        return torch.cat(out)

    x = everyone(x8[sample].float().view(len(sample), -1, 128) * sx[sample][..., None])
    x = x.view(len(x), -1)
    ids_all, weight_all = everyone(ids[sample]), everyone(weight[sample])
    slots = torch.zeros(*ids_all.shape, spec.hidden, device="cuda")
    grow = lambda s: s.repeat_interleave(128, 0).repeat_interleave(128, 1)  # noqa: E731
    for e in torch.unique(ids_all).tolist():
        if e // local != rank:
            continue
        token, slot = (ids_all == e).nonzero(as_tuple=True)
        i = e - rank * local
        h = x[token] @ (w1[i].float() * grow(s1[i])).T
        gate, up = h.chunk(2, -1)
        gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
        q, scale = quantise(gate * torch.sigmoid(gate) * up)
        h = (q.float().view(len(q), -1, 128) * scale[..., None]).view(len(q), -1)
        slots[token, slot] = (h @ (w2[i].float() * grow(s2[i])).T).bfloat16().float()
    dist.all_reduce(slots)
    y = (slots * weight_all[..., None]).sum(1)
    return y[rank * len(sample) : (rank + 1) * len(sample)]


# ---------------------------------------------------------------- timing

_flush = None
_one = None


def timed(call, count, warm=3):
    """Times in µs of `count` calls: per call the maximum over ranks."""
    global _flush, _one
    if _flush is None:
        _flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        _one = torch.zeros(1, device="cuda")
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    pairs = []
    for _ in range(count):
        _flush.zero_()
        torch.cuda._sleep(2_000_000)  # about 1 ms: the host runs ahead
        dist.all_reduce(_one)  # after the sleep, which takes longer at a lower clock
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        pairs.append((a, b))
    t = torch.tensor([a.elapsed_time(b) * 1e3 for a, b in pairs], device="cuda")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return sorted(t.tolist())


def sustained(call, seconds):
    """µs per call back to back for a while, joules per call of this GPU, clocks and throttling."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    call()
    torch.cuda.synchronize()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record()
    call()
    b.record()
    torch.cuda.synchronize()
    one = torch.tensor([a.elapsed_time(b)], device="cuda")
    dist.all_reduce(one, op=dist.ReduceOp.MAX)
    n = max(4, int(seconds * 1e3 / one.item()))
    before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    a.record()
    for _ in range(n):
        call()
    b.record()
    time.sleep(seconds * 0.6)
    clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    torch.cuda.synchronize()
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3 / n
    return {
        "us": a.elapsed_time(b) * 1e3 / n,
        "joules": joules,
        "sm_mhz": clock,
        "watts": power,
        "throttle": hex(reasons),
    }


# ---------------------------------------------------------------- one row


def error(y, expected, sample):
    """Largest over ranks of |y - expected| / |expected| over the sampled rows."""
    e = (y[sample].float() - expected).norm() / expected.norm().clamp(min=1e-9)
    e = torch.nan_to_num(e, nan=float("inf"))
    dist.all_reduce(e, op=dist.ReduceOp.MAX)
    return e.item()


def floor_of(spec, ids):
    """µs, bytes and FLOPs of the busiest rank, by the byte model of the results."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    local = spec.num_experts // ranks
    count = torch.bincount(ids.flatten(), minlength=spec.num_experts)
    every = torch.empty(ranks, spec.num_experts, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(every, count)
    mine = every.view(ranks, ranks, local)  # [source, owner, expert]
    rows = mine[:, rank].sum().item()
    active = (mine[:, rank].sum(0) > 0).sum().item()
    came = rows - mine[rank, rank].sum().item()
    went = count.sum().item() - mine[rank, rank].sum().item()
    h, i = spec.hidden, spec.inter
    flops, bytes_w = 6.0 * rows * h * i, 3.0 * active * h * i
    link = max(came * h + went * 2 * h, went * h + came * 2 * h)
    v = torch.tensor([flops, bytes_w, float(link), float(rows)], device="cuda", dtype=torch.float64)
    dist.all_reduce(v, op=dist.ReduceOp.MAX)
    flops, bytes_w, link, most = v.tolist()
    mean = count.sum().item()
    us = max(flops / FLOP_RATE, bytes_w / READ_RATE, link / LINK_RATE) * 1e6
    return us, bytes_w, link, most / max(mean, 1)


def time_ours(ours, spec, tokens, floor, bytes_w, link, expected, sample, options):
    """The part of a row that is about our layer."""
    row = {"ring_tokens": ours.config.ring_l1_blocks * ours.config.block_m}
    row["window_bytes"] = ours.session.counters().window_bytes
    y = ours()
    ours.session.check()
    row["max_rel_err"] = error(y, expected, sample)
    if not row["max_rel_err"] < 2e-2:
        row["reasons"] = {"total_us": f"wrong: {row['max_rel_err']}"}
        return row
    t = timed(ours, options.calls)
    ours.session.check()
    total = statistics.median(t)
    row["total_us"], row["p99_us"] = round(total, 1), round(t[-1], 1)
    if options.trace:
        show_trace(ours)
    row["stage_us"] = round(statistics.median(timed(ours.stage, 7)), 1)
    row["fraction_of_floor"] = round(floor / total, 3)
    row["tflops"] = round(6 * tokens * spec.topk * spec.hidden * spec.inter / total / 1e6, 1)
    row["hbm_gbs"] = round(bytes_w / total / 1e3, 1)
    row["nvlink_gbs"] = round(link / total / 1e3, 1)
    # Host time of a call, with the GPU kept busy so that nothing waits for it.
    torch.cuda._sleep(20_000_000)
    start = time.perf_counter()
    for _ in range(20):
        ours()
    row["host_us"] = round((time.perf_counter() - start) / 20 * 1e6, 1)
    ours.session.check()
    if options.sustain:
        s = sustained(ours, options.sustain)
        row["sustained_us"] = round(s["us"], 1)
        row["joules_per_token"] = s["joules"] / max(tokens, 1)
        row |= {k: s[k] for k in ("sm_mhz", "watts", "throttle")}
        ours.session.check()
    return row


def bench_row(model, spec, routing, tokens, contenders, options, weights):
    generator = torch.Generator("cuda").manual_seed(100 + dist.get_rank())
    x8, sx = quantise(
        torch.randn(tokens, spec.hidden, device="cuda", generator=generator).bfloat16()
    )
    ids, weight = make_routes(spec, tokens, routing, generator)
    sample = torch.linspace(0, tokens - 1, min(tokens, 8)).long().cuda()
    expected = oracle(spec, weights, x8, sx, ids, weight, sample)
    floor, bytes_w, link, skew = floor_of(spec, ids)
    ours = contenders.get("ours")
    row = {
        "model": model,
        "ranks": dist.get_world_size(),
        "tokens": tokens,
        "routing": routing,
        "max_over_mean": round(skew, 3),
        "floor_us": round(floor, 1),
        "reasons": {},
    }
    if ours is not None:
        ours.prepare(x8, sx, ids, weight)
        row |= time_ours(ours, spec, tokens, floor, bytes_w, link, expected, sample, options)
    for name in ("peer", "unfused"):
        if name not in contenders:
            continue
        other = contenders[name]
        started = time.monotonic()
        try:
            other.prepare(x8, sx, ids, weight)
            y = other()
            row[f"{name}_err"] = error(y, expected, sample)
            if row[f"{name}_err"] < 5e-2:
                row[f"{name}_us"] = round(statistics.median(timed(other, options.calls)), 1)
            else:
                row["reasons"][f"{name}_us"] = f"wrong: {row[f'{name}_err']}"
            if name == "unfused":
                row["gemms_us"] = round(statistics.median(timed(other.gemms, options.calls)), 1)
            if hasattr(other, "done"):
                other.done()
        except Exception as e:  # noqa: BLE001 - a contender that cannot run is a row's reason
            row["reasons"][f"{name}_us"] = f"{type(e).__name__}: {str(e)[:200]}"
        say(f"  {name}: {time.monotonic() - started:.1f} s")
    torch.cuda.empty_cache()
    return row


TRACE = (
    *("start", "listed", "counts", "first", "tiles", "combined", "pulled", "end"),
    *("stage_x", "stage_w", "math", "epi1", "epi2", "cycles", "n1", "n2"),
    *("grid_barrier", "counts_flag", "l1_full", "l1_empty", "l2_full", "l2_empty", "token", "host"),
)


def show_trace(ours):
    """Stamps in µs after the first CTA's start, waits in µs: min / median / max."""
    ours()
    t = ours.session.trace().double()
    start = t[:, 0].min()
    mhz = (t[:, TRACE.index("cycles")] / (t[:, 7] - t[:, 0])).median().item() * 1e3
    words = [f"{mhz:.0f} MHz"]
    for i, name in enumerate(TRACE):
        v = t[:, i]
        v = (v - start) / 1e3 if i < 8 else v if name in ("n1", "n2") else v / mhz
        words.append(f"{name} {v.min():.0f}/{v.median():.0f}/{v.max():.0f}")
    say("trace:", "; ".join(words))


def show(row):
    none = float("nan")
    g = lambda k: row.get(k, none)  # noqa: E731
    say(
        f"| {row['model']} {row['routing']} T={row['tokens']} x{row['max_over_mean']} "
        f"{row['config']} | ours "
        f"{g('total_us')} (stage {g('stage_us')}) p99 {g('p99_us')} | floor {row['floor_us']} = "
        f"{g('fraction_of_floor')} | peer {g('peer_us')} = {g('peer_us') / g('total_us'):.2f}x | "
        f"unfused {g('unfused_us')} gemms {g('gemms_us')} | host {g('host_us')} | "
        f"sust {g('sustained_us')} {g('sm_mhz')} MHz | err {g('max_rel_err'):.1e} "
        f"{row['reasons'] or ''}"
    )


def same(a, b):
    """Rows about the same inputs."""
    return all(a.get(k) == b.get(k) for k in ("model", "tokens", "routing", "ranks", "config"))


def merged(rows, row):
    """Rows with `row` added, or its fields put into the row about the same inputs."""
    for i, old in enumerate(rows):
        if same(old, row):
            reasons = old["reasons"] | row["reasons"]
            return [*rows[:i], old | row | {"reasons": reasons}, *rows[i + 1 :]]
    return [*rows, row]


def meta():
    """What the results were measured on."""

    def output(*command):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.split("\n")[0]

    return {
        "commit": output("git", "rev-parse", "HEAD") or os.environ.get("COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "num_gpus": dist.get_world_size(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "clocks": output(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader"
        ),
        "power": output(
            "nvidia-smi", "--query-gpu=power.draw,power.limit", "--format=csv,noheader"
        ),
        "notes": "burst: L2 flushed and ranks aligned before each call, max over ranks",
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="v4-flash,deepseek-v3")
    parser.add_argument("--tokens", default="8,64,512,1024,4096,8192")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--sustain", type=float, default=0.0)
    parser.add_argument(
        "--configs", default="128:0:0:0:0", help="block_m:B1:B2:wave:lag,…; 0 chooses"
    )
    parser.add_argument("--contenders", default="ours,peer,unfused")
    parser.add_argument("--merge", type=Path, help="earlier rows to complete, same inputs")
    parser.add_argument("--trace", action="store_true", help="phases inside the kernel")
    parser.add_argument(
        "--dump-after", type=float, default=600.0, help="seconds until a hang shows"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.trace:
        os.environ["MEGAMOE_TRACE"] = "1"
    # A cache for each rank: the ranks' compilers do not meet.
    os.environ["DG_JIT_CACHE_DIR"] = f"/tmp/deep_gemm_{os.environ['RANK']}"
    faulthandler.dump_traceback_later(options.dump_after, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wanted = options.contenders.split(",")
    rows = json.loads(options.merge.read_text())["rows"] if options.merge else []
    for model in options.models.split(","):
        spec: MoESpec = replace(MODELS[model], num_shared=0, swiglu_clamp=CLAMP)
        if options.experts:
            spec = replace(spec, num_experts=options.experts)
        weights = make_weights(spec, rank, ranks)
        kinds = {"peer": Peer, "unfused": Unfused}
        contenders = {n: kinds[n](spec, weights) for n in wanted if n in kinds}
        for t in (int(v) for v in options.tokens.split(",")):
            for setting in options.configs.split(","):
                if "ours" in wanted:
                    contenders["ours"] = Ours(spec, weights, max(t, 128), setting)
                for routing in options.routing.split(","):
                    row = bench_row(model, spec, routing, t, contenders, options, weights)
                    row["config"] = setting
                    rows = merged(rows, row)
                    show(next(r for r in rows if same(r, row)))
                    if rank == 0 and options.output:
                        options.output.write_text(
                            json.dumps({"meta": meta(), "rows": rows}, indent=1)
                        )
                if "ours" in wanted:
                    contenders["ours"].session.close()
                torch.cuda.empty_cache()
        del weights, contenders
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
