"""What the telemetry of a running layer service costs.

Closed-loop clients on one service, in blocks of less than a second with sensors read and
``/metrics`` scraped, and without either, in the order off on on off. The cost is the mean log ratio
of neighbouring blocks, with the half width of its 95 % confidence interval:

- ``step_time``: of a step on the ranks, from the first copy in to the last copy out, against the
  median of the steps of its size: kernel and host, without the HTTP process and the clients;
- ``time_in_layer``: of the part of it in the kernels;
- ``time_per_request``: of everything. Where the HTTP process is what bounds the load, chance moves
  it by several percent from block to block.

Means, not medians over a block's steps: a reading delays the few steps that it meets, which a
median does not see. Reading more often than a service does makes a small cost visible, and a
reading costs what it costs: all are given for one reading a second too. ``--null`` leaves both
kinds of block without: the intervals must then hold 0.

Part of ``service_load.py`` (``--only telemetry``).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import statistics
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.service_steps import Answer, Clients, post
from megamoe.telemetry import Sampler
from tests.service.served import Served

OFTEN = 10
"""Steps of a size below which its median says little."""
JSON = {"Content-Type": "application/json"}
SETTLE_S = 0.12
"""Between the switch of telemetry and a block: readings and requests under way end."""


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


class Step(NamedTuple):
    """A step as its ranks saw it."""

    begun: float
    tokens: int
    seconds: float


class Block(NamedTuple):
    """What a stretch of time showed."""

    answers: list[Answer]
    steps: list[Step]


def traced_steps(port: int) -> list[Step]:
    """The last hundred steps, by ``/trace``: of a rank from gather to scatter, the slowest's."""
    link = http.client.HTTPConnection("127.0.0.1", port)
    link.request("GET", "/trace")
    begins: dict[tuple[int, int], float] = {}
    ends: dict[tuple[int, int], float] = {}
    tokens: dict[int, int] = {}
    for event in json.loads(link.getresponse().read())["traceEvents"]:
        if event["ph"] != "X" or event["name"] not in ("gather", "layer", "scatter"):
            continue
        step, at = event["args"]["step"], event["ts"] * 1e-6
        tokens[step] = event["args"]["tokens"]
        place = step, event["pid"]
        begins[place] = min(begins.get(place, math.inf), at)
        ends[place] = max(ends.get(place, 0.0), at + event["dur"] * 1e-6)
    link.close()
    slowest: dict[int, float] = {}
    for place, end in ends.items():
        slowest[place[0]] = max(slowest.get(place[0], 0.0), end - begins[place])
    return [
        Step(min(at for (step, _), at in begins.items() if step == number), tokens[number], took)
        for number, took in slowest.items()
    ]


def beside_usual(blocks: list[list[tuple[int, float]]]) -> list[float]:
    """Each block's mean of (seconds / median of steps of that size), from (size, seconds).

    Sizes that were not seen often enough to have a median are left out; a block of none is NaN.
    """
    by_size: dict[int, list[float]] = {}
    for block in blocks:
        for size, seconds in block:
            by_size.setdefault(size, []).append(seconds)
    usual = {n: statistics.median(taken) for n, taken in by_size.items() if len(taken) >= OFTEN}
    shares = [[taken / usual[size] for size, taken in block if size in usual] for block in blocks]
    return [statistics.fmean(share) if share else math.nan for share in shares]


def telemetry_row(args: argparse.Namespace, served: Served, spec) -> dict:
    """The same load with sensors read and metrics scraped, and without, in turns."""
    blocks: list[Block] = []
    order: list[bool] = []
    link = http.client.HTTPConnection("127.0.0.1", served.port)
    with (
        Scraper(served.port, args.per_second) as scraper,
        Clients(served, spec, args.clients) as clients,
    ):

        def block(on: bool) -> None:
            for rank in range(args.ranks):
                body = {"rank": rank, "action": "see" if on and not args.null else "blind"}
                post(link, "/debug/fault", json.dumps(body).encode(), JSON)
            (scraper.on.set if on and not args.null else scraper.on.clear)()
            time.sleep(SETTLE_S)
            begun = time.monotonic()
            time.sleep(args.block_s)
            steps = traced_steps(served.port)
            inside = [step for step in steps if begun <= step.begun < begun + args.block_s]
            blocks.append(Block(clients.between(begun, begun + args.block_s), inside))
            order.append(on)

        ends = time.monotonic() + args.telemetry_seconds
        block(True)
        block(False)
        blocks.clear(), order.clear()  # a warm-up
        while time.monotonic() < ends or len(blocks) < 6:
            for on in (True, False) if len(blocks) % 4 else (False, True):
                block(on)
        scrapes = scraper.scrapes
        sampler = Sampler(None if args.backend == "cpu" else 0)
        readings = [time_of_reading(sampler) for _ in range(20)]

    def compare(costs: Iterable[float]) -> dict[str, float] | None:
        """How much higher the costs are in blocks with telemetry; None if too few can say."""
        costs = list(costs)
        ratios = []
        for first in range(0, len(costs), 2):
            on, off = costs[first : first + 2] if order[first] else costs[first : first + 2][::-1]
            if on > 0 and off > 0:
                ratios.append(math.log(on / off))
        if len(ratios) < 3:
            return None
        half = t_95(len(ratios) - 1) * statistics.stdev(ratios) / math.sqrt(len(ratios))
        mean = statistics.fmean(ratios)
        return {
            "overhead": round(mean, 5),
            "ci95": round(half, 5),
            "overhead_at_1_per_s": round(mean / args.per_second, 6),
            "ci95_at_1_per_s": round(half / args.per_second, 6),
        }

    def in_layer(block: Block) -> list[tuple[int, float]]:
        steps = {answer.step: answer for answer in block.answers}.values()
        return [(step.step_tokens, step.kernel_s) for step in steps]

    def rate(kind: bool) -> float:
        counts = [len(b.answers) for b, on in zip(blocks, order, strict=True) if on == kind]
        return round(statistics.fmean(counts) / args.block_s, 1)

    return {
        "name": "telemetry",
        "shape": args.shape,
        "backend": args.backend,
        "ranks": args.ranks,
        "clients": args.clients,
        "null": args.null,
        "readings_and_scrapes_per_s": args.per_second,
        "scrapes": scrapes,
        "pairs": len(blocks) // 2,
        "block_s": args.block_s,
        "steps_seen": sum(len(block.steps) for block in blocks),
        "reading_ms": round(statistics.median(readings) * 1e3, 3) if all(readings) else None,
        "requests_per_s": {"on": rate(True), "off": rate(False)},
        "step_time": compare(
            beside_usual([[(s.tokens, s.seconds) for s in block.steps] for block in blocks])
        ),
        "time_in_layer": compare(beside_usual([in_layer(block) for block in blocks])),
        "time_per_request": compare(
            1 / len(block.answers) if block.answers else math.nan for block in blocks
        ),
    }


def time_of_reading(sampler: Sampler) -> float:
    """Seconds that one look at a GPU's sensors takes this process; 0 if there is none."""
    begun = time.perf_counter()
    return 0.0 if sampler.read().unavailable else time.perf_counter() - begun


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
