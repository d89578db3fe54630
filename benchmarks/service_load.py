"""Figures of the layer service over CPU ranks, into ``benchmarks/results/service_cpu.json``.

python benchmarks/service_load.py                 # all three, about four minutes
python benchmarks/service_load.py --seconds 5 --no-write

python benchmarks/service_load.py --only steps --backend cuda --ranks 2 --shape v4-flash \
    --clients 32 --seconds 15 --output benchmarks/results/service_h200x2.json
python benchmarks/service_load.py --only steps telemetry --backend cuda --ranks 1 \
    --shape v4-flash --clients 32 --seconds 5 \
    --output benchmarks/results/service_h200x1.json

1. ``load``: 64 concurrent clients, every answer compared with the bits that the same request got
   alone; latencies; resident memory of every process at a sixth of the time and at the end.
2. ``kill``: the same while a rank is killed and the group restarts; every request is answered
   right or refused cleanly, none hangs.
3. ``cost``: see ``service_cost.py``. Where others use the machine too, run it as ``chrt -r 1
   python … --only cost``: else it measures who waits for a core.
4. ``steps`` and ``telemetry`` (on request, meant for GPUs): see ``service_steps.py`` and
   ``service_telemetry.py``. Both together take one service.

Every row carries the commit and the load of the machine that it was measured on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http.aio as aio
from tritonclient.utils import InferenceServerException

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_cost import cost_row  # noqa: E402
from benchmarks.service_steps import (  # noqa: E402
    BareLayer,
    service,
    steps_row,
    watch_steps,
)
from benchmarks.service_telemetry import telemetry_row  # noqa: E402
from tests.service.served import Served, inputs_of, make_tokens, output_bits  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "service_cpu.json"
LOAD_SHAPE = "hidden=512,inter=256,experts=16,topk=4"
HANG_S = 30.0
NAMES = ["load", "kill", "cost", "steps", "telemetry"]


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


# ---------------------------------------------------------------------- steps, telemetry


def service_rows(args: argparse.Namespace) -> Iterator[dict]:
    """The rows that are wanted, of one service."""
    interval = 1 / args.per_second if "telemetry" in args.only else 1.0
    options = ("--telemetry-interval", str(interval), "--fault-injection")
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(BareLayer(args)) if "steps" in args.only else None
        with service(args, *options) as (served, spec):
            seen = watch_steps(args, served, spec) if bare is not None else None
            if "telemetry" in args.only:
                yield telemetry_row(args, served, spec)
        if bare is not None and seen is not None:
            yield steps_row(*seen, bare)


def machine(backend: str) -> dict:
    """What the rows of a file have in common."""
    import torch

    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if backend == "cuda" else None,
        "notes": "clients, HTTP process and ranks share the cores"
        + ("" if backend == "cuda" else "; power and clocks cannot be read"),
    }


def origin() -> dict:
    """Of one row: when it was measured, of what, and what else the machine did."""
    commit = os.environ.get("MEGAMOE_COMMIT") or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return {
        "commit": commit,
        "command": " ".join(["python benchmarks/service_load.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average_1min": round(os.getloadavg()[0], 1),
    }


def key(row: dict) -> tuple:
    """A newer row takes the place of an older one that measured the same."""
    if row["name"] in ("steps", "telemetry"):
        return row["name"], row["ranks"], row.get("readings_and_scrapes_per_s"), row.get("null")
    return (row["name"],)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=40, help="of the cost, per start")
    parser.add_argument("--starts", type=int, default=7, help="of the cost")
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES[:3])
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"], help="of steps")
    parser.add_argument("--shape", default=LOAD_SHAPE, help="of steps")
    parser.add_argument("--ranks", type=int, default=2, help="of steps")
    parser.add_argument("--calls", type=int, default=100, help="of the bare layer, per step size")
    parser.add_argument("--per-second", type=float, default=20.0, help="readings and scrapes")
    parser.add_argument("--telemetry-seconds", type=float, default=60.0, help="in all")
    parser.add_argument("--block-s", type=float, default=0.4, help="of telemetry on, or off")
    parser.add_argument("--null", action="store_true", help="telemetry: off in every block")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    makers = {
        "load": lambda: [load_row("load", args.clients, args.seconds, kill=False)],
        "kill": lambda: [load_row("kill", args.clients, args.seconds, kill=True)],
        "cost": lambda: [cost_row(args.requests, args.starts)],
        "service": lambda: service_rows(args),
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that services end too
    failed = False
    for name, make in makers.items():
        if name in args.only or (name == "service" and {"steps", "telemetry"} & set(args.only)):
            began = origin()
            for row in make():
                row |= began
                failed |= bool(row.get("wrong_or_lost"))
                print(json.dumps(row, indent=1), flush=True)
                if not args.no_write:
                    keep(row, args.output, args.backend)
    return int(failed)


def keep(row: dict, path: Path, backend: str) -> None:
    """Writes a row into a file of results, in the place of an older one of its kind."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [old for old in rows if key(old) != key(row)] + [row]
    rows.sort(key=lambda row: (NAMES.index(row["name"]), *key(row)[1:2]))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"meta": machine(backend), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
