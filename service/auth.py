"""Who may ask: deny by default, everything but liveness and readiness.

With a key, every other path wants it, as ``Authorization: Bearer KEY``, ``X-API-Key: KEY``, or as
the password of HTTP Basic, so that a browser can open the dashboard. Without a key the service is
bound to loopback, and only requests addressed to a loopback name pass: a web page whose name was
rebound to 127.0.0.1 sends its own name.

Any web page may make its reader's browser post to 127.0.0.1, or to a service whose key the browser
remembers. Browsers then say whose page it was (``Origin``): another's changes nothing here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.config import ServiceConfig, is_loopback
from service.errors import error_response

__all__ = ["OPEN_PATHS", "Auth"]

OPEN_PATHS: Final = frozenset({"/v2/health/live", "/v2/health/ready", "/health", "/ready"})


class Auth:
    """ASGI middleware that answers 401 or 403 before a route, or a body, is looked at."""

    def __init__(self, app: ASGIApp, config: ServiceConfig) -> None:
        self.app = app
        self.key = None if config.api_key is None else config.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI scope."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if (
                origin is not None
                and scope["method"] not in ("GET", "HEAD")
                and origin.partition("://")[2] != headers.get("host", "")
            ):
                response = error_response(
                    403,
                    f"a page of {origin[:80]} may not post here: only the service's own pages, and "
                    "clients that are no browsers",
                )
                await response(scope, receive, send)
                return
            if self.key is None:
                if not is_loopback(_host_name(headers.get("host", ""))):
                    response = error_response(
                        403,
                        "without an API key only loopback host names are served: "
                        "connect to 127.0.0.1 or localhost, or set a key",
                    )
                    await response(scope, receive, send)
                    return
            elif not self._matches(headers):
                response = error_response(
                    401,
                    "missing or wrong API key: send Authorization: Bearer KEY",
                    {"WWW-Authenticate": 'Basic realm="megamoe"'},
                )
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _matches(self, headers: Headers) -> bool:
        given = headers.get("x-api-key", "").encode("latin-1")
        scheme, _, value = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            given = value.strip().encode("latin-1")
        elif scheme.lower() == "basic":
            try:
                given = base64.b64decode(value, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                given = b""
        assert self.key is not None
        return hmac.compare_digest(given, self.key)


def _host_name(host: str) -> str:
    """Of a Host header; empty when it is none."""
    name, port = host, ""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
    elif ":" in host:
        name, _, port = host.partition(":")
        port = f":{port}"
    return name if not port or (port[0] == ":" and port[1:].isdigit()) else ""
