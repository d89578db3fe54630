"""Slow and greedy clients lose their own connection, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import numpy as np
import pytest
import tritonclient.http as oip

from service.config import ConfigError, ServiceConfig
from service.errors import ServiceError
from service.limits import ByteBudget
from service.server import bind_tcp
from tests.service.echo import CONFIG, EchoEngine, tokens
from tests.service.served import HTTP

INFER = b"POST /v2/models/moe/infer HTTP/1.1\r\nhost: localhost\r\n"


def closed_after(conn: socket.socket) -> tuple[float, bytes]:
    begun, answer = time.monotonic(), b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while chunk := conn.recv(65536):
            answer += chunk
    return time.monotonic() - begun, answer


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def assert_alive(server) -> None:
    assert HTTP.get(server.url + "/health", timeout=5).status_code == 200


def test_silent_connections_are_closed(server):
    with connect(server) as conn:
        waited, answer = closed_after(conn)
    assert CONFIG.header_timeout_s * 0.9 < waited < CONFIG.header_timeout_s + 2
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_slow_headers_have_a_deadline(server):
    """Slowloris: a header line now and then, for ever."""
    with connect(server) as conn:
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                conn.sendall(b"GET / HTTP/1.1\r\n")
                while not stop.wait(0.1):
                    conn.sendall(b"x-a: b\r\n")

        thread = threading.Thread(target=drip)
        thread.start()
        waited, answer = closed_after(conn)
        stop.set()
        thread.join()
    assert waited < CONFIG.header_timeout_s + 2
    assert not answer or b" 408 " in answer[:20]
    assert_alive(server)


def test_a_second_request_has_its_own_header_deadline(server):
    with connect(server) as conn:
        conn.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /heal")
        waited, answer = closed_after(conn)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer
    assert waited < CONFIG.header_timeout_s + 2


def test_slow_bodies_have_a_deadline(server):
    with connect(server) as conn:
        conn.sendall(INFER + b"content-length: 1000\r\n\r\n")
        stop = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.1):
                    conn.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        waited, answer = closed_after(conn)
        stop.set()
        thread.join()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    # The answer comes at the deadline; the connection lingers at most two seconds more.
    assert waited < CONFIG.body_timeout_s + 4
    assert_alive(server)


def test_half_a_body_and_gone(server):
    before = server.engine.steps
    with connect(server) as conn:
        conn.sendall(INFER + b"content-length: 1000\r\n\r\n{")
    time.sleep(0.1)
    assert_alive(server)
    assert server.engine.steps == before


def test_a_reader_that_stops_is_cut_off(make_running):
    running = make_running(max_body_bytes=1 << 24, body_budget_bytes=1 << 26)
    big = json.dumps({"inputs": [{"name": "x" * 200, "shape": [1], "datatype": "INT32"}]})
    with connect(running) as conn:
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Many answers are asked for, none is read: the server's write buffer fills.
        request = INFER + f"content-length: {len(big)}\r\n\r\n{big}".encode()
        conn.settimeout(0.5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(60_000):
                conn.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        conn.settimeout(10)
        del request
        waited, _ = closed_after(conn)
    assert waited < 10
    assert_alive(running)


def test_a_client_that_hangs_up_withdraws_its_request(make_running):
    running = make_running()
    running.engine.hold.set()
    hidden, _, _ = tokens(4)
    tensor = oip.InferInput("hidden_states", [4, 256], "BF16")
    tensor.set_data_from_numpy(hidden)
    body, size = oip.InferenceServerClient.generate_request_body([tensor])
    head = f"inference-header-content-length: {size}\r\ncontent-length: {len(body)}\r\n\r\n"
    with connect(running) as conn:
        conn.sendall(INFER + head.encode() + bytes(body))
        until = time.monotonic() + 5
        while not running.engine.running:
            assert time.monotonic() < until
            time.sleep(0.01)
    until = time.monotonic() + 5
    while running.engine.running:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert running.engine.withdrawn == 1
    assert_alive(running)


def test_connections_are_bounded(make_running):
    running = make_running(max_connections=3, header_timeout_s=5.0)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(running))
        time.sleep(0.1)
        extra = stack.enter_context(connect(running))
        _, answer = closed_after(extra)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"more than 3 connections" in answer
    time.sleep(0.1)
    assert_alive(running)


def test_bodies_in_flight_share_a_budget(make_running):
    running = make_running(EchoEngine(), max_body_bytes=1 << 16, body_budget_bytes=(1 << 16) + 100)
    with connect(running) as conn:
        conn.sendall(INFER + b"content-length: 60000\r\n\r\n{")
        time.sleep(0.1)
        with httpx.Client(base_url=running.url) as http:
            answer = http.post("/v2/models/moe/infer", content=bytes(30_000))
            assert answer.status_code == 429
            assert answer.headers["retry-after"]
    time.sleep(0.2)
    answer = HTTP.post(running.url + "/v2/models/moe/infer", content=b"{}" + b" " * 60_000)
    assert answer.status_code == 400  # the budget came back


def test_small_answers_do_not_wait_for_acknowledgements():
    async def main():
        reached = asyncio.get_running_loop().create_future()

        def seen(_, writer):
            reached.set_result(writer.get_extra_info("socket"))

        with bind_tcp(CONFIG) as sock:
            server = await asyncio.start_server(seen, sock=sock)
            _, writer = await asyncio.open_connection(*sock.getsockname())
            connection = await asyncio.wait_for(reached, 5)
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            server.close()

    asyncio.run(main())


def test_byte_budget():
    budget = ByteBudget(10)
    budget.take(7)
    with pytest.raises(ServiceError, match="hold 7 bytes and this one needs 4 of at most 10"):
        budget.take(4)
    budget.give(7)
    budget.take(10)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"host": "0.0.0.0"}, "no API key"),
        ({"host": "192.168.1.4"}, "no API key"),
        ({"host": "::"}, "no API key"),
        ({"host": "example.org"}, "no API key"),
        ({"api_key": "short"}, "at least 16"),
        ({"api_key": "k" * 15 + "é"}, "ASCII"),
        ({"port": 70000}, "0..65535"),
        ({"drain_s": 31.0}, "torchrun kills"),
        ({"queue_requests": 0}, "positive"),
        ({"queue_tokens": -1}, "positive"),
        ({"max_body_bytes": 2 << 30}, "body_budget_bytes"),
    ],
)
def test_unsafe_settings_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        ServiceConfig(**settings)


def test_safe_settings_pass():
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        ServiceConfig(host=host)
    ServiceConfig(host="0.0.0.0", api_key="k" * 16)


def test_one_request_does_not_see_another(server):
    """32 threads, each with tensors of its own; every answer is its own."""
    from tests.service.echo import echo

    wrong: list[str] = []

    def work(seed: int) -> None:
        with oip.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            for turn in range(4):
                hidden, ids, weights = tokens(1 + (seed * 7 + turn) % 40, seed * 10 + turn)
                inputs = []
                for name, array, datatype in (
                    ("hidden_states", hidden, "BF16"),
                    ("topk_ids", ids, "INT32"),
                    ("topk_weights", weights, "FP32"),
                ):
                    tensor = oip.InferInput(name, list(array.shape), datatype)
                    tensor.set_data_from_numpy(array)
                    inputs.append(tensor)
                output = client.infer("moe", inputs).as_numpy("output").view(np.uint16)
                if (output != echo(hidden.view(np.uint16), None, ids, weights)).any():
                    wrong.append(f"{seed}.{turn}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
