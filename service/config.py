"""Settings of the HTTP process, checked once when they are made."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

__all__ = ["ConfigError", "ServiceConfig", "is_loopback"]

MIN_KEY_CHARS = 16


class ConfigError(ValueError):
    """A setting that would make the service unsafe or useless; the message says what to change."""


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Limits and addresses of the HTTP process. Durations are seconds, sizes bytes.

    Attributes:
        host: bind address; anything but loopback needs ``api_key``.
        port: TCP port; 0 lets the system choose.
        api_key: secret that every path but live and ready asks for; None on loopback only.
        fault_injection: whether ``POST /debug/fault`` exists.
        max_body_bytes: largest request body, also after decompression.
        max_json_bytes: largest JSON part of a request.
        body_budget_bytes: bodies held at once over all requests; more is answered 429.
        max_connections: open connections; more are closed at once.
        max_header_bytes: largest request line and headers.
        header_timeout_s: from connect, or the first byte of a next request, to the end of headers.
        body_timeout_s: from the end of headers to the end of the body.
        stall_timeout_s: how long a client may leave its response unread.
        keep_alive_s: idle time of a connection between requests.
        queue_requests: requests in the engine at once; more is answered 429.
        queue_tokens: tokens in the engine at once; 0 means four steps' worth.
        request_timeout_s: limit of one request in the engine.
        drain_s: after SIGTERM, how long requests in flight may finish. torchrun kills after 30.
        progress_timeout_s: ready turns false when no step (heartbeats included) ended for so long.
        event_clients: dashboards that may watch at once.
        sequence_idle_s: a sequence of attention_pre unused for so long may lose its pages to
            another that needs them.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    fault_injection: bool = False
    max_body_bytes: int = 256 << 20
    max_json_bytes: int = 32 << 20
    body_budget_bytes: int = 1 << 30
    max_connections: int = 512
    max_header_bytes: int = 32 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 30.0
    keep_alive_s: float = 30.0
    queue_requests: int = 256
    queue_tokens: int = 0
    request_timeout_s: float = 60.0
    drain_s: float = 20.0
    progress_timeout_s: float = 10.0
    event_clients: int = 8
    sequence_idle_s: float = 600.0

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.api_key is None:
            raise ConfigError(
                f"host = {self.host!r} can be reached from other machines and no API key is set: "
                "set MEGAMOE_API_KEY (or --api-key-file), or bind 127.0.0.1"
            )
        if self.api_key is not None and len(self.api_key) < MIN_KEY_CHARS:
            raise ConfigError(
                f"the API key has {len(self.api_key)} characters: it must have at least "
                f"{MIN_KEY_CHARS}"
            )
        if self.api_key is not None and not self.api_key.isascii():
            raise ConfigError("the API key has characters outside ASCII: HTTP headers carry none")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port}: must be in 0..65535")
        if not 0 < self.drain_s < 30:
            raise ConfigError(
                f"drain_s = {self.drain_s}: must be in (0, 30), torchrun kills its ranks after 30 s"
            )
        for name in (
            "max_body_bytes",
            "max_json_bytes",
            "body_budget_bytes",
            "max_connections",
            "max_header_bytes",
            "header_timeout_s",
            "body_timeout_s",
            "stall_timeout_s",
            "keep_alive_s",
            "queue_requests",
            "request_timeout_s",
            "progress_timeout_s",
            "event_clients",
            "sequence_idle_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")
        if self.queue_tokens < 0:
            raise ConfigError(f"queue_tokens = {self.queue_tokens}: must be 0 (choose) or positive")
        if self.max_body_bytes > self.body_budget_bytes:
            raise ConfigError(
                f"max_body_bytes = {self.max_body_bytes} exceeds body_budget_bytes = "
                f"{self.body_budget_bytes}: no such body could ever be accepted"
            )
