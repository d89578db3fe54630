"""Figures of the layer service over CPU ranks, into ``benchmarks/results/service_cpu.json``.

python benchmarks/service_load.py                 # all three, about four minutes
python benchmarks/service_load.py --seconds 5 --no-write

python benchmarks/service_load.py --only steps --backend cuda --ranks 2 --shape v4-flash \
    --clients 32 --seconds 15 --output benchmarks/results/service_h200x2.json

1. ``load``: 64 concurrent clients, every answer compared with the bits that the same request got
   alone; latencies; resident memory of every process at a sixth of the time and at the end.
2. ``kill``: the same while a rank is killed and the group restarts; every request is answered
   right or refused cleanly, none hangs.
3. ``cost``: requests of 128 x 7168 BF16, less their time in the layer, against a bare echo of the
   same body through the same HTTP stack, alternating in one loop. Where others use the machine too,
   run it as ``chrt -r 1 python … --only cost``: else it mostly measures who waits for a core.
4. ``steps`` (on request, meant for GPUs): time in the layer of the step sizes that occurred most,
   against the bare layer on as many rows, and what the sensors' sampler costs the bare layer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import tritonclient.http.aio as aio
from fastapi import FastAPI, Request
from starlette.responses import Response
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.service.served import Served, inputs_of, make_tokens, output_bits  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "service_cpu.json"
LOAD_SHAPE = "hidden=512,inter=256,experts=16,topk=4"
COST_SHAPE = "hidden=7168,inter=128,experts=8,topk=2"
HANG_S = 30.0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def resident(served: Served) -> dict[str, float]:
    """MiB by kind of process; ``HTTP`` without the shared arena would be less."""
    found: dict[str, float] = {}
    served.note_processes()
    for process in served.seen.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            kind = "http" if "-m service" in line else "rank" if "-u -m launcher" in line else ""
            if kind:
                found[kind] = found.get(kind, 0.0) + process.memory_info().rss / (1 << 20)
    return {kind: round(mib, 1) for kind, mib in found.items()}


async def drive(served: Served, cases, want, clients: int, seconds: float, kill_at: float | None):
    """Closed-loop clients; returns what became of every request."""
    latencies: list[float] = []
    refused: dict[str, int] = {}
    wrong: list[str] = []
    slowest = 0.0
    end = time.monotonic() + seconds
    memory: list[dict[str, float]] = []

    async def one(number: int) -> None:
        nonlocal slowest
        inputs = inputs_of(*cases[number])
        async with aio.InferenceServerClient(
            f"127.0.0.1:{served.port}", conn_timeout=HANG_S
        ) as client:
            while time.monotonic() < end:
                begun = time.monotonic()
                try:
                    result = await client.infer("moe", inputs)
                    bits = result.as_numpy("output").view(np.uint16)
                    if bits.shape != want[number].shape or (bits != want[number]).any():
                        wrong.append(f"client {number}: other bits")
                    latencies.append(time.monotonic() - begun)
                except InferenceServerException as error:
                    key = f"{error.status()}: {error.message()}"
                    refused[key] = refused.get(key, 0) + 1
                    await asyncio.sleep(0.05)
                except Exception as error:  # noqa: BLE001 - a lost answer is what we count
                    wrong.append(f"client {number}: {type(error).__name__}: {error}")
                slowest = max(slowest, time.monotonic() - begun)

    async def watch() -> None:
        await asyncio.sleep(seconds / 6)
        memory.append(await asyncio.to_thread(resident, served))
        if kill_at is not None:
            await asyncio.sleep(max(0.0, kill_at - seconds / 6))
            await asyncio.to_thread(served.fault, 1, "kill")
        await asyncio.sleep(max(0.0, end - time.monotonic() - 1.0))
        memory.append(await asyncio.to_thread(resident, served))

    await asyncio.gather(watch(), *(one(number) for number in range(clients)))
    return latencies, refused, wrong, slowest, memory


def load_row(name: str, clients: int, seconds: float, *, kill: bool) -> dict:
    options = ["--fault-injection", "--heartbeat", "1", "--timeout", "10"]
    with Served(*options, shape=LOAD_SHAPE) as served:
        served.wait_ready()
        cases = [
            make_tokens(1 + seed * 5 % 16, seed, hidden=512, experts=16, topk=4)
            for seed in range(clients)
        ]
        with served.client() as client:
            want = [output_bits(client, *case) for case in cases]
        steps = served.metric('megamoe_steps_total{kind="work"}')
        outcome = drive(served, cases, want, clients, seconds, seconds / 3 if kill else None)
        latencies, refused, wrong, slowest, memory = asyncio.run(outcome)
        steps = served.metric('megamoe_steps_total{kind="work"}') - steps
        row = {
            "name": name,
            "shape": LOAD_SHAPE,
            "ranks": 2,
            "clients": clients,
            "seconds": seconds,
            "answers": len(latencies),
            "wrong_or_lost": len(wrong),
            "refused": refused,
            "answers_per_s": round(len(latencies) / seconds, 1),
            "requests_per_step": round(len(latencies) / max(1.0, steps), 2),
            "p50_ms": round(percentile(latencies, 0.50) * 1e3, 2),
            "p99_ms": round(percentile(latencies, 0.99) * 1e3, 2),
            "slowest_s": round(slowest, 3),
            "rss_mib_early": memory[0],
            "rss_mib_end": memory[-1],
            "generations": int(served.metric("megamoe_group_generation")),
        }
        for line in wrong[:5]:
            print(line, file=sys.stderr)
        if kill:
            served.wait_ready(generation=2)
            with served.client() as client:
                after = [output_bits(client, *case) for case in cases[:8]]
            row["same_bits_after_restart"] = all(
                (a == b).all() for a, b in zip(after, want, strict=False)
            )
    return row


# ---------------------------------------------------------------------- cost


def echo_server() -> None:
    """A FastAPI app that gives a body back, on the service's own uvicorn settings."""
    from service.config import ServiceConfig
    from service.server import bind_tcp, make_server

    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")

    config = ServiceConfig(port=0)
    sock = bind_tcp(config)
    print(sock.getsockname()[1], flush=True)
    make_server(app, config).run([sock])


def post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict):
    """(seconds, response headers, body)."""
    begun = time.perf_counter()
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    took = time.perf_counter() - begun
    assert answer.status == 200, data[:300]
    return took, dict(answer.getheaders()), data


def cost_row(requests: int) -> dict:
    from tritonclient.http import InferenceServerClient

    tokens, hidden = 128, 7168
    case = make_tokens(tokens, 1, hidden=hidden)
    body, size = InferenceServerClient.generate_request_body(inputs_of(*case))
    body, headers = bytes(body), {"Inference-Header-Content-Length": str(size)}
    argv = [sys.executable, __file__, "--echo-server"]
    echo = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        port = int(echo.stdout.readline())
        with Served("--heartbeat", "2", shape=COST_SHAPE) as served:
            served.wait_ready()
            to_echo = http.client.HTTPConnection("127.0.0.1", port)
            to_service = http.client.HTTPConnection("127.0.0.1", served.port)
            echoed, total, kernel, queue, host = [], [], [], [], []
            for turn in range(requests + 10):
                took_echo, _, data = post(to_echo, "/echo", body, {})
                assert data == body
                took, fields, data = post(to_service, "/v2/models/moe/infer", body, headers)
                head = int(fields["inference-header-content-length"])
                times = json.loads(data[:head])["parameters"]
                assert len(data) - head == tokens * hidden * 2
                if turn < 10:
                    continue
                echoed.append(took_echo)
                total.append(took)
                kernel.append(times["kernel_us"] * 1e-6)
                queue.append(times["queue_us"] * 1e-6)
                host.append(times["host_us"] * 1e-6)
    finally:
        echo.kill()
        echo.wait()
    own = [t - k for t, k in zip(total, kernel, strict=True)]

    def ms(values: list[float]) -> float:
        return round(statistics.median(values) * 1e3, 3)

    return {
        "name": "cost",
        "shape": COST_SHAPE,
        "tokens": tokens,
        "body_bytes": len(body),
        "requests": requests,
        "echo_ms": ms(echoed),
        "service_less_kernel_ms": ms(own),
        "ratio": round(statistics.median(own) / statistics.median(echoed), 3),
        "scheduler": {0: "normal", 2: "SCHED_RR"}.get(os.sched_getscheduler(0), "other"),
        "ratio_of_minima": round(min(own) / min(echoed), 3),
        "kernel_ms": ms(kernel),
        "queue_ms": ms(queue),
        "host_ms": ms(host),
    }


# ---------------------------------------------------------------------- steps

MOST_COMMON = 4
"""Step sizes that are compared with the bare layer."""
BLOCKS, BLOCK_S = 7, 0.9
"""Of the bare layer; in every second block the sampler reads."""
OFTEN: Final = 20
"""Readings a second there; a service takes one. The cost, and its noise, is divided by this."""


def steps_row(args: argparse.Namespace) -> dict:
    """The service's steps against the bare layer on as many rows, one after the other."""
    import threading

    from tritonclient.http import InferenceServerClient

    from launcher.serving.source import random_spec

    spec = random_spec(args.shape)
    max_tokens = -(-args.clients * 128 // args.ranks)
    options = ["--backend", args.backend, "--max-tokens", str(max_tokens), "--heartbeat", "5"]
    kernels: dict[int, list[float]] = {}
    requests = [0]
    end = [0.0]
    phases = ("queue", "host", "kernel")
    with Served(*options, ranks=args.ranks, shape=args.shape) as served:
        served.wait_ready(500)

        def client(seed: int) -> None:
            case = make_tokens(
                128, seed, hidden=spec.hidden, experts=spec.num_experts, topk=spec.topk
            )
            body, size = InferenceServerClient.generate_request_body(inputs_of(*case))
            headers = {"Inference-Header-Content-Length": str(size)}
            link = http.client.HTTPConnection("127.0.0.1", served.port)
            while time.monotonic() < end[0]:
                _, fields, data = post(link, "/v2/models/moe/infer", bytes(body), headers)
                head = int(fields["inference-header-content-length"])
                times = json.loads(data[:head])["parameters"]
                requests[0] += 1
                kernels.setdefault(times["step_tokens"], []).append(times["kernel_us"] * 1e-6)

        def sums() -> dict[str, float]:
            name = "megamoe_step_seconds"
            found = {p: served.metric(f'{name}_sum{{phase="{p}"}}') for p in phases}
            return {**found, "steps": served.metric(f'{name}_count{{phase="kernel"}}')}

        before = sums()
        end[0] = time.monotonic() + args.seconds
        threads = [threading.Thread(target=client, args=(i,)) for i in range(args.clients)]
        for thread in threads:
            thread.start()
        time.sleep(max(0.0, args.seconds - 1.5))
        sensors = {
            name: served.metric(f"megamoe_gpu_{name}") / args.ranks
            for name in ("sm_clock_hertz", "power_watts", "temperature_celsius")
        }
        for thread in threads:
            thread.join()
        after = sums()
        spans = host_spans(served)
        served.note_processes()
    steps = after["steps"] - before["steps"]
    # A step is seen once by each of its requests.
    common = sorted(kernels, key=lambda n: -len(kernels[n]) / n)[:MOST_COMMON]
    batches = ",".join(str(n) for n in sorted(common))
    bare = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={args.ranks}", __file__, "--bare", "--backend", args.backend,
            "--shape", args.shape, "--tokens", str(max_tokens), "--batches", batches,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if bare.returncode:
        raise RuntimeError(bare.stderr[-4000:])
    told = json.loads(bare.stdout.strip().splitlines()[-1])
    compared = []
    for n in sorted(common):
        served_ms = statistics.median(kernels[n]) * 1e3
        bare_ms = told["bare_ms"][str(n)]
        compared.append(
            {
                "tokens": n,
                "steps": round(len(kernels[n]) * 128 / n),
                "kernel_ms": round(served_ms, 4),
                "bare_ms": round(bare_ms, 4),
                "ratio": round(served_ms / bare_ms, 3),
            }
        )
    return {
        "name": "steps",
        "shape": args.shape,
        "backend": args.backend,
        "ranks": args.ranks,
        "clients": args.clients,
        "seconds": args.seconds,
        "requests_per_s": round(requests[0] / args.seconds, 1),
        "steps_per_s": round(steps / args.seconds, 1),
        "mean_ms": {p: round((after[p] - before[p]) / steps * 1e3, 3) for p in phases},
        "rank_ms": spans,
        "timed_by": told["timed_by"],
        "compared": compared,
        "telemetry_overhead": told["telemetry_overhead"],
        "sensors": {k: round(v, 1) for k, v in sensors.items()} if any(sensors.values()) else None,
    }


def host_spans(served: Served) -> dict[str, float]:
    """Median milliseconds of a rank's host in each part of the last hundred steps with work."""
    link = http.client.HTTPConnection("127.0.0.1", served.port)
    link.request("GET", "/trace")
    found: dict[str, list[float]] = {}
    for event in json.loads(link.getresponse().read())["traceEvents"]:
        if event["ph"] == "X" and event["name"] in ("gather", "layer", "scatter"):
            found.setdefault(event["name"], []).append(event["dur"] * 1e-3)
    return {name: round(statistics.median(taken), 3) for name, taken in found.items()}


def bare(args: argparse.Namespace) -> None:
    """One rank of the bare layer; rank 0 prints. Sensors are read in every second block."""
    import torch
    import torch.distributed as dist

    from launcher.ranks import device_of, sampler_of
    from launcher.serving.source import random_spec
    from megamoe.layer import open_layer
    from megamoe.spec import EpConfig
    from megamoe.weights import random_experts
    from service.batching import rank_rows

    spec = random_spec(args.shape)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(int(os.environ["LOCAL_RANK"]), args.backend)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device != "cpu" else "gloo")
    torch.set_num_threads(1)
    config = EpConfig(num_ranks=ranks, max_tokens=args.tokens)
    batches = [int(n) for n in args.batches.split(",")]
    times: dict[int, list[float]] = {n: [] for n in batches}
    means: dict[bool, list[float]] = {False: [], True: []}
    with open_layer(spec, config, backend=args.backend) as layer:
        layer.load_weights(random_experts(spec, rank, ranks, 0, device=device))
        layer.time_calls()

        def tensors(num_tokens: int) -> list:
            rows = len(rank_rows(num_tokens, ranks, rank))
            x, ids, weights = make_tokens(
                rows, rank, hidden=spec.hidden, experts=spec.num_experts, topk=spec.topk
            )
            x = torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
            return [t.to(device) for t in (x, torch.from_numpy(ids), torch.from_numpy(weights))]

        def call(inputs: list) -> tuple[float, float]:
            """Seconds of the kernels and of the whole call, of the slower rank."""
            dist.all_reduce(torch.zeros(1))
            begun = time.perf_counter()
            layer.run(*inputs)
            took = time.perf_counter() - begun
            both = torch.tensor([layer.call_seconds() or took, took], dtype=torch.float64)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            return float(both[0]), float(both[1])

        for n in batches:
            inputs = tensors(n)
            times[n] = [call(inputs)[0] for _ in range(args.calls + 10)][10:]
        for block in range(BLOCKS):
            sampler = sampler_of(device)
            if block % 2:
                sampler.start(lambda _: None, period_s=1 / OFTEN)
            # Rank 0's clock counts: all ranks make the same number of calls.
            wholes = []
            go_on = torch.ones(1)
            end = time.perf_counter() + BLOCK_S
            while go_on:
                wholes.append(call(inputs)[1])
                go_on = torch.tensor([float(time.perf_counter() < end)])
                dist.all_reduce(go_on, dist.ReduceOp.MIN)
            sampler.stop()
            if block:  # the first warms up
                means[bool(block % 2)].append(statistics.fmean(wholes))
    # Of means: a reading holds up the one call that it meets, which a median of calls would hide.
    quiet, sampled = (statistics.median(means[kind]) for kind in (False, True))
    if rank == 0:
        told = {
            "timed_by": "wall clock" if device == "cpu" else "CUDA events, staging included",
            "bare_ms": {n: statistics.median(taken) * 1e3 for n, taken in times.items()},
            "telemetry_overhead": round((sampled / quiet - 1) / OFTEN, 5),
        }
        print(json.dumps(told))
    dist.destroy_process_group()


def meta(backend: str) -> dict:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if backend == "cuda" else None,
        "notes": "clients, HTTP process and ranks share the cores"
        + ("" if backend == "cuda" else "; power and clocks cannot be read"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=200, help="of the cost figure")
    parser.add_argument("--only", choices=["load", "kill", "cost", "steps"])
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"], help="of steps")
    parser.add_argument("--shape", default=LOAD_SHAPE, help="of steps")
    parser.add_argument("--ranks", type=int, default=2, help="of steps")
    parser.add_argument("--calls", type=int, default=100, help="of the bare layer, per step size")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=128, help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="128", help=argparse.SUPPRESS)
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--echo-server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo_server:
        echo_server()
        return 0
    if args.bare:
        bare(args)
        return 0
    result = {"meta": meta(args.backend), "rows": []}
    if args.only and args.output.exists():
        # One figure anew, the others as they are.
        old = json.loads(args.output.read_text())["rows"]
        result["rows"] = [row for row in old if row["name"] != args.only]
    makers = {
        "load": lambda: load_row("load", args.clients, args.seconds, kill=False),
        "kill": lambda: load_row("kill", args.clients, args.seconds, kill=True),
        "cost": lambda: cost_row(args.requests),
        "steps": lambda: steps_row(args),
    }
    for name, make in makers.items():
        if args.only == name or (args.only is None and name != "steps"):
            row = make()
            print(json.dumps(row, indent=1))
            result["rows"].append(row)
    result["rows"].sort(key=lambda row: list(makers).index(row["name"]))
    if not args.no_write:
        args.output.parent.mkdir(exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(row.get("wrong_or_lost") for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
