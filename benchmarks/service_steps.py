"""Steps of the layer service against the bare layer.

Time in the layer of the step sizes that occurred most, against the bare layer on as many rows, one
after the other on the same devices.

Part of ``service_load.py`` (``--only steps``), meant for GPUs; its clients are the load of ``--only
telemetry`` too. Run by itself, under torchrun, it is a rank of the bare layer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.service.served import Served, inputs_of, make_tokens  # noqa: E402

REQUEST_TOKENS = 128
WAIT_S = 600.0
"""After which a bare layer that nobody asks gives up."""
MOST_COMMON = 4
"""Step sizes that are compared with the bare layer."""


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
        try:
            yield served, random_spec(args.shape)
        except Exception:
            print(served.text()[-4000:], file=sys.stderr)  # else nobody would know why
            raise


def max_tokens(args: argparse.Namespace) -> int:
    """Of a rank: a step holds every client's request."""
    return -(-args.clients * REQUEST_TOKENS // args.ranks)


# ---------------------------------------------------------------------- steps


def watch_steps(
    args: argparse.Namespace, served: Served, spec
) -> tuple[dict, dict[int, list[float]]]:
    """The service under load: what goes into the row, and times in the layer by rows of a step."""
    name, phases = "megamoe_step_seconds", ("queue", "host", "kernel")

    def sums() -> dict[str, float]:
        found = {p: served.metric(f'{name}_sum{{phase="{p}"}}') for p in phases}
        return {**found, "steps": served.metric(f'{name}_count{{phase="kernel"}}')}

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
    steps = after["steps"] - before["steps"]
    kernels: dict[int, list[float]] = {}
    for answer in {a.step: a for a in answers}.values():
        kernels.setdefault(answer.step_tokens, []).append(answer.kernel_s)
    row = {
        "name": "steps",
        "shape": args.shape,
        "backend": args.backend,
        "ranks": args.ranks,
        "clients": args.clients,
        "seconds": args.seconds,
        "requests_per_s": round(len(answers) / args.seconds, 1),
        "steps_per_s": round(steps / args.seconds, 1),
        "mean_ms": {p: round((after[p] - before[p]) / steps * 1e3, 3) for p in phases},
        "rank_ms": host_spans(served),
        "sensors": {k: round(v, 1) for k, v in sensors.items()} if any(sensors.values()) else None,
    }
    print(json.dumps(row), flush=True)  # should the bare layer fail
    return row, kernels


def steps_row(row: dict, kernels: dict[int, list[float]], bare: BareLayer) -> dict:
    """The service's steps against the bare layer on as many rows, one after the other."""
    common = sorted(sorted(kernels, key=lambda n: -len(kernels[n]))[:MOST_COMMON])
    told = bare.times(common)
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
        **row,
        "devices": told["devices"],
        "timed_by": told["timed_by"],
        "compared": compared,
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


# ---------------------------------------------------------------------- the bare layer


class BareLayer:
    """The ranks of the layer alone, opened now and timed when asked.

    They load while the service does, and do nothing while it is measured.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bare-")
        self.go = Path(self.folder.name) / "batches"
        argv = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={args.ranks}", __file__, "--backend", args.backend, "--shape",
            args.shape, "--max-tokens", str(max_tokens(args)), "--calls", str(args.calls),
            "--go", str(self.go),
        ]  # fmt: skip
        self.log = (Path(self.folder.name) / "log").open("w+")
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=self.log, text=True)

    def times(self, batches: list[int]) -> dict:
        """Milliseconds by the number of rows of a step, as rank 0 told them."""
        draft = self.go.with_suffix(".draft")
        draft.write_text(",".join(map(str, batches)))
        draft.rename(self.go)
        said, _ = self.process.communicate(timeout=300)
        if self.process.returncode:
            self.log.seek(0)
            raise RuntimeError(self.log.read()[-4000:])
        return json.loads(said.strip().splitlines()[-1])

    def __enter__(self) -> BareLayer:
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # torchrun ends its ranks
            self.process.wait(40)
        self.log.close()
        self.folder.cleanup()


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

        deadline = time.monotonic() + WAIT_S
        while not args.go.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody wrote {args.go} in {WAIT_S:g} s")
            time.sleep(0.05)
        for n in map(int, args.go.read_text().split(",")):
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
    parser.add_argument("--go", type=Path, required=True, help="rows of steps, once to be timed")
    bare_rank(parser.parse_args())
