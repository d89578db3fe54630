"""What the telemetry of a running layer service costs.

Closed-loop clients on one service, in blocks of seconds with sensors read and ``/metrics`` scraped,
and without either, in the order on off off on. The cost is the mean log ratio of neighbouring
blocks, with the half width of its 95 % confidence interval: of the time per request, and of a
step's time in the layer against the median of steps of its size. Reading more often than a service
does makes a small cost visible: both are given per reading a second too. ``--null`` leaves both
kinds of block without: the interval must then hold 0.

Part of ``service_load.py`` (``--only telemetry``).
"""

from __future__ import annotations

import argparse
import http.client
import math
import statistics
import threading
import time
from collections.abc import Callable

from benchmarks.service_steps import Answer, Clients
from tests.service.served import Served

OFTEN = 10
"""Steps of a size below which its median says little."""
SETTLE_S = 0.25
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


def telemetry_row(args: argparse.Namespace, served: Served, spec) -> dict:
    """The same load with sensors read and metrics scraped, and without, in turns."""
    blocks: dict[bool, list[list[Answer]]] = {True: [], False: []}
    with (
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
        pairs = max(3, round(args.telemetry_seconds / (2 * (args.block_s + SETTLE_S))))
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

    by_size: dict[int, list[float]] = {}
    for block in blocks[True] + blocks[False]:
        for step in {answer.step: answer for answer in block}.values():
            by_size.setdefault(step.step_tokens, []).append(step.kernel_s)
    # Sizes that were seen often enough to have a median, which the mix of a block does not move.
    usual = {n: statistics.median(times) for n, times in by_size.items() if len(times) >= OFTEN}

    def in_layer(block: list[Answer]) -> float:
        steps = {a.step: a for a in block if a.step_tokens in usual}.values()
        return statistics.fmean(s.kernel_s / usual[s.step_tokens] for s in steps)

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
        "time_in_layer": compare(in_layer),
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
