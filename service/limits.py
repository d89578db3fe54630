"""Bounds on what a client can make the process hold: body bytes, body time, response time.

``BodyGuard`` is the outermost ASGI layer; ``DeadlineProtocol`` adds to uvicorn the limits that
it lacks: a deadline for headers, one for unread responses, and a cap on connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from typing import Any, Final

import h11
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.config import ServiceConfig
from service.engine import Segments
from service.errors import ServiceError, busy, error_response

__all__ = ["BodyGuard", "ByteBudget", "make_protocol", "read_body"]

LINGER_S: Final = 2.0
LINGER_BYTES: Final = 64 << 20
SMALL_BYTES: Final = 4096
"""Pieces of a body that are shorter are put together; larger ones are not copied."""


class ByteBudget:
    """A counted bound shared by all requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, nbytes: int) -> None:
        """Reserves bytes.

        Raises:
            ServiceError: 429 when that would exceed the limit.
        """
        if self.held + nbytes > self.limit:
            raise busy(
                f"request bodies in flight hold {self.held} bytes and this one needs {nbytes} of "
                f"at most {self.limit}: retry later"
            )
        self.held += nbytes

    def hold(self, nbytes: int) -> None:
        """Counts bytes that are there already; new ones find so much less room."""
        self.held += nbytes

    def give(self, nbytes: int) -> None:
        """Returns reserved bytes."""
        self.held -= nbytes


class _Body:
    """State of one request's body, and the receive/send pair that keeps it within bounds."""

    def __init__(
        self, guard: BodyGuard, scope: Scope, receive: Receive, send: Send, declared: int | None
    ) -> None:
        """``declared``: Content-Length, 0 where there is no body, None for one in chunks."""
        self.config = guard.config
        self.budget = guard.budget
        self.headers = dict(scope["headers"])
        self.receive_next = receive
        self.send_next = send
        self.chunked = declared is None
        self.seen = 0
        self.reserved = 0
        self.unread = 0
        self.complete = declared == 0
        self.deadline = asyncio.get_running_loop().time() + self.config.body_timeout_s

    def reserve(self, nbytes: int) -> None:
        self.budget.take(nbytes)
        self.reserved += nbytes

    async def pass_on(self, message: Message) -> None:
        """Sends a part of an answer, which is held memory until the client has taken it.

        That is when ``send`` of the part behind it returns; so a large last one gets an empty one
        behind it. A stream holds its last part only, however long it lives.
        """
        body = message.get("body", b"")
        if len(body) > SMALL_BYTES and not message.get("more_body", False):
            await self._pass_on({**message, "more_body": True})
            message = {**message, "body": b""}
        await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        nbytes = len(message.get("body", b""))
        self.budget.hold(nbytes)
        self.reserved += nbytes
        await self.send_next(message)
        self.budget.give(self.unread)
        self.reserved -= self.unread
        self.unread = nbytes

    def release(self) -> None:
        self.budget.give(self.reserved)
        self.reserved = self.unread = 0

    async def receive(self) -> Message:
        """The app's ``receive``.

        Raises:
            ServiceError: 408 too slow, 413 too large, 429 too much in flight.
        """
        if self.complete:
            return await self.receive_next()
        try:
            async with asyncio.timeout_at(self.deadline):
                message = await self.receive_next()
        except TimeoutError:
            raise ServiceError(
                408,
                f"the request body did not arrive within {self.config.body_timeout_s:g} s "
                f"({self.seen} bytes came)",
            ) from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.seen += size
            if self.seen > self.config.max_body_bytes:
                raise too_large(f"more than {self.config.max_body_bytes}", self.config)
            if self.chunked:
                self.reserve(size)
            self.complete = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """The app's ``send``; an answer that overtakes the body ends the connection.

        The client may finish writing for a while first: closing at once would reset the
        connection, and many clients would never read why.
        """
        if self.complete:
            await self.pass_on(message)
        elif message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (b"connection", b"close")]
            await self.pass_on({**message, "headers": headers})
        elif message.get("more_body", False):
            await self.pass_on(message)
        else:
            await self.pass_on({**message, "more_body": True})
            self.release()  # what still comes is dropped: it may not shut others out
            await self.linger()
            await self.send_next({"type": "http.response.body", "body": b""})

    async def linger(self) -> None:
        if b"expect" in self.headers:
            return
        dropped = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while dropped < LINGER_BYTES:
                    message = await self.receive_next()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    dropped += len(message.get("body", b""))


def too_large(given: str, config: ServiceConfig) -> ServiceError:
    return ServiceError(
        413,
        f"the request body has {given} bytes, at most {config.max_body_bytes} are allowed: send "
        "fewer tokens in a request, or start the service with a larger --max-body-mib",
    )


class BodyGuard:
    """ASGI middleware: no request body exceeds its size, its time or the shared budget."""

    def __init__(self, app: ASGIApp, config: ServiceConfig) -> None:
        self.app = app
        self.config = config
        self.budget = ByteBudget(config.body_budget_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # What comes in one piece passes h11's bound on what is incomplete.
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self.config.max_header_bytes:
            limit = self.config.max_header_bytes
            message = f"request line and headers have {size} bytes, at most {limit} are allowed"
            await error_response(400, message, {"Connection": "close"})(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length")
        chunked = b"transfer-encoding" in headers
        length: int | None = None  # chunks count as they come, whatever was declared
        if not chunked:
            length = int(declared or b"0")
        body = _Body(self, scope, receive, send, length)
        try:
            if length:
                if length > self.config.max_body_bytes:
                    raise too_large(str(length), self.config)
                body.reserve(length)
            await self.app(scope, body.receive, body.send)
        except ServiceError as error:
            response = error_response(error.status, error.message, error.headers)
            await response(scope, body.receive, body.send)
        finally:
            body.release()


async def read_body(request: Request, config: ServiceConfig) -> Segments:
    """The whole body of a request, decompressed.

    Raises:
        ServiceError: 400 broken compression, 413 too large once decompressed, 415 an encoding
            other than gzip or deflate, and what ``BodyGuard`` raises.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise ServiceError(
            415, f"Content-Encoding {encoding[:40]!r} is not supported: use gzip, deflate or none"
        )
    body: list[bytes | bytearray] = []
    async for chunk in request.stream():
        if len(chunk) >= SMALL_BYTES:
            body.append(chunk)
        elif body and isinstance(body[-1], bytearray):
            body[-1] += chunk  # a byte at a time would be two hundred of memory each
        elif chunk:
            body.append(bytearray(chunk))
    if encoding == "identity":
        return Segments(body)
    packed = b"".join(body)
    return Segments([await asyncio.to_thread(_decompress, packed, config.max_body_bytes)])


def _decompress(body: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # 32: gzip or zlib, by their header
    try:
        data = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise ServiceError(400, f"cannot decompress the request body: {error}") from None
    if len(data) > limit:
        raise ServiceError(
            413, f"the decompressed request body exceeds {limit} bytes, the most that is allowed"
        )
    if not stream.eof or stream.unused_data:
        raise ServiceError(400, "cannot decompress the request body: it is cut off or has a tail")
    return data


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines and JSON errors. See ``make_protocol``."""

    settings: ServiceConfig

    _refused = False
    _header_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock for the first request's headers, or refuses the connection."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            self._refuse(503, f"more than {self.settings.max_connections} connections are open")
            self.transport.close()  # these are bounded, too
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._cancel_header_timer()
        self._cancel_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; headers that are still incomplete run against the clock."""
        if self._refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self._header_timer is None and not self.transport.is_closing():
                self._arm()
        else:
            self._cancel_header_timer()

    def on_response_complete(self) -> None:
        """The next request on this connection gets a clock of its own."""
        self._cancel_header_timer()
        super().on_response_complete()
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun and self._header_timer is None and not self.transport.is_closing():
            self._arm()

    def pause_writing(self) -> None:
        """The client does not read: it has ``stall_timeout_s`` to go on."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self.settings.stall_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        """The client reads again."""
        self._cancel_stall_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, in the one error shape."""
        self._refuse(400, msg)

    def _arm(self) -> None:
        self._header_timer = self.loop.call_later(self.settings.header_timeout_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        limit = self.settings.header_timeout_s
        self._refuse(408, f"the request headers did not arrive within {limit:g} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = json.dumps({"error": message}).encode()
        phrase = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        # Not through h11: its state may allow no response, e.g. after a parse error.
        self.transport.write(head.encode() + body)
        # Closing with bytes of the client's unread would reset the connection: what it sends goes
        # nowhere for a while, in which it can read why.
        self._refused = True
        self._cancel_header_timer()
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None


def make_protocol(config: ServiceConfig) -> type[DeadlineProtocol]:
    """The protocol class with these settings; uvicorn makes one instance per connection."""
    members: dict[str, Any] = {"settings": config}
    return type("DeadlineProtocol", (DeadlineProtocol,), members)
