"""Steps of the layer service against the bare layer, and what its telemetry costs.

Part of ``service_load.py`` (``--only steps``, ``--only telemetry``), meant for GPUs:

1. ``steps``: time in the layer of the step sizes that occurred most, against the bare layer on as
   many rows, one after the other on the same devices.
2. ``telemetry``: closed-loop clients on one service, in blocks of seconds with sensors read and
   ``/metrics`` scraped, and without either, in the order on off off on. The cost is the mean log
   ratio of neighbouring blocks, with the half width of its 95 % confidence interval. Reading more
   often than a service does makes a small cost visible: both are given per reading a second too.
   ``--null`` leaves both kinds of block without: the interval must then hold 0.

Run by itself, under torchrun, it is a rank of the bare layer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.service.served import Served, inputs_of, make_tokens  # noqa: E402

REQUEST_TOKENS = 128
MOST_COMMON = 4
"""Step sizes that are compared with the bare layer."""
SETTLE_S = 0.25
"""Between the switch of telemetry and a block: readings and requests under way end."""


class Answer(NamedTuple):
    """What an answer said of its step, and when it came."""

    at: float
    step: int
    step_tokens: int
    kernel_s: float
    host_s: float


class Clients:
    """Closed-loop clients of 128-token requests, in threads, while the context is open."""

    def __init__(self, served: Served, spec, count: int) -> None:
        self.port = served.port
        self.answers: list[Answer] = []
        self.stop = threading.Event()
        sizes = {"hidden": spec.hidden, "experts": spec.num_experts, "topk": spec.topk}
        self.threads = [
            threading.Thread(target=self.work, args=(make_tokens(REQUEST_TOKENS, seed, **sizes),))
            for seed in range(count)
        ]

    def work(self, case) -> None:
        """One client, until told to stop."""
        from tritonclient.http import InferenceServerClient

        body, size = InferenceServerClient.generate_request_body(inputs_of(*case))
        body, headers = bytes(body), {"Inference-Header-Content-Length": str(size)}
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        while not self.stop.is_set():
            _, fields, data = post(link, "/v2/models/moe/infer", body, headers)
            head = int(fields["inference-header-content-length"])
            told = json.loads(data[:head])["parameters"]
            self.answers.append(
                Answer(
                    time.monotonic(),
                    told["step"],
                    told["step_tokens"],
                    told["kernel_us"] * 1e-6,
                    told["host_us"] * 1e-6,
                )
            )

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def between(self, begin: float, end: float) -> list[Answer]:
        """Answers that came in a stretch of the monotonic clock."""
        return [answer for answer in self.answers if begin <= answer.at < end]


def post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: dict):
    """(seconds, response headers, body)."""
    begun = time.perf_counter()
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    took = time.perf_counter() - begun
    assert answer.status == 200, data[:300]
    return took, dict(answer.getheaders()), data


@contextlib.contextmanager
def service(args: argparse.Namespace, *options: str):
    """A service on the chosen backend, and its spec."""
    from launcher.serving.source import random_spec

    if args.backend == "cuda":
        # For ranks that share a GPU; no others look at it.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    tokens = str(max_tokens(args))
    options = ("--backend", args.backend, "--max-tokens", tokens, "--heartbeat", "5", *options)
    with Served(*options, ranks=args.ranks, shape=args.shape) as served:
        served.wait_ready(500)
        yield served, random_spec(args.shape)


def max_tokens(args: argparse.Namespace) -> int:
    """Of a rank: a step holds every client's request."""
    return -(-args.clients * REQUEST_TOKENS // args.ranks)


# ---------------------------------------------------------------------- steps


def steps_row(args: argparse.Namespace) -> dict:
    """The service's steps against the bare layer on as many rows, one after the other."""
    name, phases = "megamoe_step_seconds", ("queue", "host", "kernel")

    def sums() -> dict[str, float]:
        found = {p: served.metric(f'{name}_sum{{phase="{p}"}}') for p in phases}
        return {**found, "steps": served.metric(f'{name}_count{{phase="kernel"}}')}

    with service(args) as (served, spec):
        before = sums()
        with Clients(served, spec, args.clients) as clients:
            begun = time.monotonic()
            time.sleep(max(0.0, args.seconds - 1.5))
            sensors = {
                name: served.metric(f"megamoe_gpu_{name}") / args.ranks
                for name in ("sm_clock_hertz", "power_watts", "temperature_celsius")
            }
            time.sleep(max(0.0, begun + args.seconds - time.monotonic()))
            answers = clients.between(begun, time.monotonic())
        after = sums()
        spans = host_spans(served)
    steps = after["steps"] - before["steps"]
    kernels: dict[int, list[float]] = {}
    for answer in {a.step: a for a in answers}.values():
        kernels.setdefault(answer.step_tokens, []).append(answer.kernel_s)
    common = sorted(sorted(kernels, key=lambda n: -len(kernels[n]))[:MOST_COMMON])
    told = bare_layer(args, common)
    compared = []
    for n in common:
        served_ms, bare_ms = statistics.median(kernels[n]) * 1e3, told["bare_ms"][str(n)]
        compared.append(
            {
                "tokens": n,
                "steps": len(kernels[n]),
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
        "devices": told["devices"],
        "clients": args.clients,
        "seconds": args.seconds,
        "requests_per_s": round(len(answers) / args.seconds, 1),
        "steps_per_s": round(steps / args.seconds, 1),
        "mean_ms": {p: round((after[p] - before[p]) / steps * 1e3, 3) for p in phases},
        "rank_ms": spans,
        "timed_by": told["timed_by"],
        "compared": compared,
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


# ---------------------------------------------------------------------- telemetry


class Scraper:
    """Reads ``/metrics`` so many times a second while it is on."""

    def __init__(self, port: int, per_second: float) -> None:
        self.port, self.period = port, 1 / per_second
        self.on, self.ended = threading.Event(), threading.Event()
        self.scrapes = 0
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        """Scrapes until the context ends."""
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        while not self.ended.wait(self.period):
            if self.on.is_set():
                link.request("GET", "/metrics")
                assert link.getresponse().read()
                self.scrapes += 1

    def __enter__(self) -> Scraper:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()


def telemetry_row(args: argparse.Namespace) -> dict:
    """The same load with sensors read and metrics scraped, and without, in turns."""
    interval = ("--telemetry-interval", str(1 / args.per_second), "--fault-injection")
    blocks: dict[bool, list[list[Answer]]] = {True: [], False: []}
    with (
        service(args, *interval) as (served, spec),
        Scraper(served.port, args.per_second) as scraper,
        Clients(served, spec, args.clients) as clients,
    ):

        def block(on: bool) -> None:
            for rank in range(args.ranks):
                served.fault(rank, "see" if on and not args.null else "blind")
            (scraper.on.set if on and not args.null else scraper.on.clear)()
            time.sleep(SETTLE_S)
            begun = time.monotonic()
            time.sleep(args.block_s)
            blocks[on].append(clients.between(begun, begun + args.block_s))

        block(True)
        block(False)
        for kind in blocks.values():
            kind.clear()  # a warm-up
        pairs = max(2, round(args.seconds / (2 * (args.block_s + SETTLE_S))))
        for pair in range(pairs):
            for on in (True, False) if pair % 2 else (False, True):
                block(on)
        scrapes = scraper.scrapes

    def compare(cost: Callable[[list[Answer]], float]) -> dict[str, float]:
        """How much higher ``cost`` is in blocks with telemetry."""
        on, off = ([cost(block) for block in blocks[kind]] for kind in (True, False))
        ratios = [math.log(a / b) for a, b in zip(on, off, strict=True)]
        half = t_95(pairs - 1) * statistics.stdev(ratios) / math.sqrt(pairs)
        mean = statistics.fmean(ratios)
        return {
            "overhead": round(mean, 5),
            "ci95": round(half, 5),
            "overhead_at_1_per_s": round(mean / args.per_second, 5),
            "ci95_at_1_per_s": round(half / args.per_second, 5),
        }

    def per_token(block: list[Answer]) -> float:
        steps = {answer.step: answer for answer in block}.values()
        return sum(s.kernel_s for s in steps) / sum(s.step_tokens for s in steps)

    def rate(kind: bool) -> float:
        return round(sum(map(len, blocks[kind])) / pairs / args.block_s, 1)

    return {
        "name": "telemetry",
        "shape": args.shape,
        "backend": args.backend,
        "ranks": args.ranks,
        "clients": args.clients,
        "null": args.null,
        "readings_and_scrapes_per_s": args.per_second,
        "scrapes": scrapes,
        "pairs": pairs,
        "block_s": args.block_s,
        "requests_per_s": {"on": rate(True), "off": rate(False)},
        "time_per_request": compare(lambda block: 1 / len(block)),
        "kernel_time_per_token": compare(per_token),
    }


def t_95(freedom: int) -> float:
    """97.5 % quantile of Student's t: Cornish-Fisher expansion about the normal's 1.95996.

    Abramowitz and Stegun, 26.7.5; 0.1 % off at 5 degrees of freedom.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


# ---------------------------------------------------------------------- the bare layer


def bare_layer(args: argparse.Namespace, batches: list[int]) -> dict:
    """Times of the layer alone, by the number of rows of a step, as its ranks told them."""
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={args.ranks}", __file__, "--backend", args.backend, "--shape",
        args.shape, "--max-tokens", str(max_tokens(args)), "--calls", str(args.calls),
        "--batches", ",".join(map(str, batches)),
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def bare_rank(args: argparse.Namespace) -> None:
    """One rank of the bare layer; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from launcher.ranks import device_of
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
    config = EpConfig(num_ranks=ranks, max_tokens=args.max_tokens)
    times: dict[int, list[float]] = {}
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

        def call(inputs: list) -> float:
            """Seconds in the layer, of the slower rank."""
            dist.all_reduce(torch.zeros(1))
            begun = time.perf_counter()
            layer.run(*inputs)
            took = time.perf_counter() - begun
            slowest = torch.tensor([layer.call_seconds() or took], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            return float(slowest)

        for n in map(int, args.batches.split(",")):
            inputs = tensors(n)
            times[n] = [call(inputs) for _ in range(args.calls + 10)][10:]
    if rank == 0:
        told = {
            "timed_by": "wall clock" if device == "cpu" else "CUDA events, staging included",
            "devices": 0 if device == "cpu" else min(ranks, torch.cuda.device_count()),
            "bare_ms": {n: statistics.median(taken) * 1e3 for n, taken in times.items()},
        }
        print(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One rank of the bare layer.")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--batches", required=True)
    bare_rank(parser.parse_args())
