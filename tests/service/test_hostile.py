"""Clients that mean harm: each gets a clean refusal, and the next honest request its bits."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import random
import socket
import struct
import time
from typing import ClassVar

import httpx
import numpy as np
import pytest
import tritonclient.http as oip

from service.config import ServiceConfig
from service.limits import BodyGuard, read_body
from service.routes import TensorResponse
from tests.service.echo import Server, echo
from tests.service.served import HTTP, inputs_of, make_tokens

INFER = "/v2/models/moe/infer"
HOST = b"Host: localhost\r\n"
POST = b"POST /v2/models/moe/infer HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def whole_request(seed: int = 1, tokens: int = 3) -> tuple[bytes, int]:
    """A good body, and the bytes of its JSON part."""
    body, size = oip.InferenceServerClient.generate_request_body(
        inputs_of(*make_tokens(tokens, seed))
    )
    return bytes(body), size


def assert_refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"]


def assert_answers(server: Server) -> None:
    body, size = whole_request()
    headers = {"Inference-Header-Content-Length": str(size)}
    answer = HTTP.post(server.url + INFER, content=body, headers=headers)
    assert answer.status_code == 200, answer.text


RAW = {
    "long-url": b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
    "huge-header": b"GET /v2 HTTP/1.1\r\n" + HOST + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "many-headers": b"GET /v2 HTTP/1.1\r\n" + HOST + b"X: 1\r\n" * 20_000 + b"\r\n",
    "no-host": b"GET /v2 HTTP/1.1\r\n\r\n",
    "two-hosts": b"GET /v2 HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(200),
    "zeros": bytes(200),
    "header-nul": b"GET /v2 HTTP/1.1\r\n" + HOST + b"X: a\0b\r\n\r\n",
    "two-lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "negative-length": POST + b"Content-Length: -5\r\n\r\nabc",
    "length-of-5000-digits": POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\nabc",
    "length-too-large": POST + b"Content-Length: 99999999999999\r\n\r\nabc",
    "two-header-lengths": POST
    + b"Inference-Header-Content-Length: 1\r\n" * 2
    + b"Content-Length: 2\r\n\r\n{}",
    "gzip-transfer": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "bad-chunk": CHUNKED + b"ZZ\r\nabc\r\n",
    "huge-chunk": CHUNKED + b"FFFFFFFFFFFFFFFF\r\nabc\r\n",
    "long-chunk-extension": CHUNKED + b"1;" + b"a" * 60_000 + b"\r\nx\r\n",
    "long-trailer": CHUNKED + b"0\r\nX: " + b"a" * 60_000 + b"\r\n\r\n",
    "other-host": b"GET http://evil.example/v2 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_on_the_wire(server, name):
    with socket.create_connection(("127.0.0.1", server.port), timeout=15) as conn:
        conn.sendall(RAW[name])
        answer = http.client.HTTPResponse(conn)
        answer.begin()  # never a reset: the answer would be lost
        body = answer.read()
    assert 400 <= answer.status < 500, body
    assert json.loads(body)["error"]
    assert_answers(server)


def test_a_second_request_cannot_hide_in_a_body(server):
    """Content-Length and Transfer-Encoding together: what follows is no request of its own."""
    hidden = b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n"
    both = POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % len(hidden)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as conn:
        conn.sendall(both + hidden)
        conn.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: conn.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    if b"HTTP/1.1 200" in answer:  # both ends count by chunks: a request after the body, no more
        assert answer.count(b"HTTP/1.1 ") == 2


@pytest.mark.parametrize("timeout", [10**400, -(10**400), 10**18])
def test_a_timeout_beyond_every_clock(server, timeout):
    body, size = whole_request()
    head = {**json.loads(body[:size])}
    head["parameters"]["timeout"] = timeout
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = HTTP.post(server.url + INFER, content=text + body[size:], headers=headers)
    if timeout < 0:
        assert_refused(answer)
    else:
        assert answer.status_code == 200  # the service's own limit is the shorter one


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/moe/load",
        "/v2/repository/models/moe/unload",
        "/v2/systemsharedmemory/region/a/register",
        "/v2/logging",
        "/v2/trace/setting",
        "/debug/fault",
        "/static/%2e%2e/%2e%2e/config.py",
        "/v2/models/%2e%2e/infer",
        "/v2/models/moe%00/infer",
        "/v2/models/" + "a" * 5000,
    ],
)
def test_what_is_not_offered(server, path):
    for method in ("GET", "POST", "DELETE", "PROPFIND"):
        assert_refused(HTTP.request(method, server.url + path, content=b"{}"))


def test_bodies_with_damaged_bytes(server):
    """Bytes changed, cut out, doubled or swapped anywhere in a request, its length included."""
    rng = random.Random(7)
    whole, size = whole_request()
    codes = set()
    with httpx.Client(base_url=server.url) as client:
        for _ in range(400):
            body, length = bytearray(whole), size
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(size + 40)  # the JSON part, and a little of the tensors
                kind = rng.randrange(5)
                if kind == 0:
                    body[at] = rng.randrange(256)
                elif kind == 1:
                    del body[at : at + rng.randrange(1, 30)]
                elif kind == 2:
                    body[at:at] = body[at : at + rng.randrange(1, 30)]
                elif kind == 3:
                    body[at : at + 1] = rng.choice([b"-1", b"1e9", b"null", b"[]", b'"', b"9" * 40])
                else:
                    length += rng.choice([-1, 1, -size, 5, len(whole)])
            headers = {"Inference-Header-Content-Length": str(length)}
            answer = client.post(INFER, content=bytes(body), headers=headers)
            codes.add(answer.status_code)
            if answer.status_code != 200:
                assert_refused(answer)
    assert codes == {200, 400}, codes
    assert_answers(server)


def test_every_bit_pattern_of_activations_and_weights(server):
    """NaN of every payload, infinities, negative zeros: the answer has the bits of the echo."""
    rng = np.random.default_rng(3)
    x, ids, weights = make_tokens(8, 1)
    x = rng.integers(0, 1 << 16, x.shape, np.uint16).view(x.dtype)
    weights = rng.integers(0, 1 << 32, weights.shape, np.uint32).view(np.float32)
    with oip.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        have = client.infer("moe", inputs_of(x, ids, weights)).as_numpy("output")
    want = echo(x.view(np.uint16), None, ids, weights)
    assert (have.view(np.uint16) == want).all()


def test_half_a_body_is_no_bug_of_ours(make_running, caplog):
    running = make_running()
    with caplog.at_level(logging.WARNING, "megamoe.service"):
        conn = socket.create_connection(("127.0.0.1", running.port))
        conn.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
        time.sleep(0.1)
        # Reset, not closed: the body's end will never come.
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        conn.close()
        line = 'megamoe_http_responses_total{code="499",path="/v2/models/{model}/infer"} 1.0'
        deadline = time.monotonic() + 5
        while line not in (text := HTTP.get(running.url + "/metrics").text):
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
    assert not caplog.records, caplog.records[0].getMessage()
    assert 'code="500"' not in text


def test_an_unread_answer_holds_no_memory_of_the_ranks():
    """The arena's block is free before the client takes a byte, however many tensors it asked."""

    async def main():
        released = asyncio.Event()
        sent = []

        async def send(message):
            sent.append(message)
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()  # a client that never reads

        parts = [memoryview(b"ab"), memoryview(b"cd")]
        answer = TensorResponse(b"{}", parts, {}, released.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer({"type": "http"}, None, send), 0.05)
        assert released.is_set()
        assert sent[1]["body"] == b"{}abcd"

    asyncio.run(main())


def test_bodies_announced_without_a_key_keep_nobody_out(make_running):
    """Refused before the body came: while the client may read why, its room is others'."""
    running = make_running(api_key="k" * 32, body_budget_bytes=1 << 20, max_body_bytes=1 << 20)
    body, size = whole_request()
    headers = {"Inference-Header-Content-Length": str(size), "X-API-Key": "k" * 32}
    conns = []
    for _ in range(8):
        conn = socket.create_connection(("127.0.0.1", running.port), timeout=5)
        conn.sendall(POST + b"Content-Length: 1000000\r\n\r\n{")
        assert conn.recv(12) == b"HTTP/1.1 401"
        conns.append(conn)
        answer = HTTP.post(running.url + INFER, content=body, headers=headers)
        assert answer.status_code == 200, answer.text
    for conn in conns:
        conn.close()


def test_a_body_in_crumbs_is_put_together():
    """A piece costs two hundred bytes whatever it holds: those of one byte are joined."""
    rng = random.Random(2)
    whole = rng.randbytes(60_000)
    sizes = [1] * 20_000 + [5000, 1, 0, 4096, 3, 10_000]
    sizes.append(len(whole) - sum(sizes))

    class Crumbs:
        headers: ClassVar[dict] = {}

        async def stream(self):
            at = 0
            for size in sizes:
                yield whole[at : at + size]
                at += size

    body = asyncio.run(read_body(Crumbs(), ServiceConfig()))
    assert bytes(body.join()) == whole
    assert len(body.parts) == 7


def test_unread_answers_count_as_memory():
    """As long as the answer is on its way, its bytes take room from new bodies."""

    async def main():
        held = []

        async def app(scope, receive, send):
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(500), "more_body": True})
            held.append(guard.budget.held)
            await send({"type": "http.response.body", "body": b""})

        async def receive():
            return {"type": "http.request", "body": bytes(100), "more_body": False}

        async def send(_):
            pass

        guard = BodyGuard(app, ServiceConfig())
        scope = {"type": "http", "headers": [(b"content-length", b"100")]}
        scope |= {"raw_path": b"/v2", "query_string": b""}
        await guard(scope, receive, send)
        assert held == [600]
        assert guard.budget.held == 0

    asyncio.run(main())


def test_answers_to_requests_without_a_body_count_as_memory():
    """Of a stream its last part, however long it lives; of a large answer all, until it is read."""

    async def main():
        held = []

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(3):
                await send({"type": "http.response.body", "body": bytes(500), "more_body": True})
                held.append(guard.budget.held)
            await send({"type": "http.response.body", "body": bytes(9000)})

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        sent = []

        async def send(message):
            sent.append((len(message.get("body", b"")), message.get("more_body", False)))
            if message.get("body") == b"":
                held.append(guard.budget.held)

        guard = BodyGuard(app, ServiceConfig())
        await guard(
            {"type": "http", "headers": [], "raw_path": b"/", "query_string": b""}, receive, send
        )
        assert held == [500, 500, 500, 9000]
        assert guard.budget.held == 0
        assert sent == [(0, False), (500, True), (500, True), (500, True), (9000, True), (0, False)]

    asyncio.run(main())
