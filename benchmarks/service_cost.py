"""The service's own cost: requests less their time in the layer, beside a bare echo.

128 x 7168 BF16 go to the service and, as the same body, to an app that gives it back, through the
same HTTP stack, alternating in one loop. What a process pays for memory of this size depends on the
state that its allocator has come to, and stays so as long as it lives: the echo takes 4 or 6 ms,
the service 6.5 or 9. So both are started several times; the ratio is the median of the starts', and
all of them are kept.

Part of ``service_load.py`` (``--only cost``). Run by itself it is the echo.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.service_steps import post  # noqa: E402
from tests.service.served import Served, inputs_of, make_tokens  # noqa: E402

SHAPE = "hidden=7168,inter=128,experts=8,topk=2"
TOKENS, HIDDEN = 128, 7168
WARM = 10


class Times(NamedTuple):
    """Seconds of one request."""

    echo: float
    own: float
    kernel: float
    queue: float
    host: float


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


def one_start(requests: int) -> list[Times]:
    """Requests to an echo and a service that were started for it."""
    from tritonclient.http import InferenceServerClient

    case = make_tokens(TOKENS, 1, hidden=HIDDEN)
    body, size = InferenceServerClient.generate_request_body(inputs_of(*case))
    body, headers = bytes(body), {"Inference-Header-Content-Length": str(size)}
    found: list[Times] = []
    echo = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        assert echo.stdout is not None
        port = int(echo.stdout.readline())
        with Served("--heartbeat", "2", shape=SHAPE) as served:
            served.wait_ready()
            to_echo = http.client.HTTPConnection("127.0.0.1", port)
            to_service = http.client.HTTPConnection("127.0.0.1", served.port)
            for _ in range(requests + WARM):
                echoed, _, data = post(to_echo, "/echo", body, {})
                assert data == body
                took, fields, data = post(to_service, "/v2/models/moe/infer", body, headers)
                head = int(fields["inference-header-content-length"])
                assert len(data) - head == TOKENS * HIDDEN * 2
                told = json.loads(data[:head])["parameters"]
                kernel, queue, host = (told[f"{n}_us"] * 1e-6 for n in ("kernel", "queue", "host"))
                found.append(Times(echoed, took - kernel, kernel, queue, host))
    finally:
        echo.kill()
        echo.wait()
    return found[WARM:]


def cost_row(requests: int, starts: int) -> dict:
    """The row of ``--only cost``; ``requests`` are those of one start."""
    each = [one_start(requests) for _ in range(starts)]
    every = [times for start in each for times in start]

    def ms(name: str) -> float:
        return round(statistics.median(getattr(times, name) for times in every) * 1e3, 3)

    def ratio(start: list[Times]) -> float:
        own = statistics.median(times.own for times in start)
        return own / statistics.median(times.echo for times in start)

    ratios = sorted(ratio(start) for start in each)
    return {
        "name": "cost",
        "shape": SHAPE,
        "tokens": TOKENS,
        "requests": requests * starts,
        "starts": starts,
        "echo_ms": ms("echo"),
        "service_less_kernel_ms": ms("own"),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(value, 3) for value in ratios],
        "scheduler": {0: "normal", 2: "SCHED_RR"}.get(os.sched_getscheduler(0), "other"),
        "kernel_ms": ms("kernel"),
        "queue_ms": ms("queue"),
        "host_ms": ms("host"),
    }


if __name__ == "__main__":
    echo_server()
