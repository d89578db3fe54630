"""Every answer that is not a success: one exception, one body shape ``{"error": "..."}``.

FastAPI's own ``{"detail": ...}`` breaks Open Inference Protocol clients, which read ``error``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "CLIENT_GONE",
    "BugShield",
    "ServiceError",
    "busy",
    "error_response",
    "install",
    "unavailable",
]

_log = logging.getLogger("megamoe.service")
RETRY_AFTER_S = 1
CLIENT_GONE = 499
"""What the counters say of a request whose client hung up; nobody receives it."""


class ServiceError(Exception):
    """An HTTP error answer.

    Attributes:
        status: HTTP status code, 4xx or 5xx.
        message: what was given, what is allowed, what to do.
        headers: extra response headers.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.headers = dict(headers or {})


def busy(message: str) -> ServiceError:
    """429: a bound is reached now; the same request may pass later."""
    return ServiceError(429, message, {"Retry-After": str(RETRY_AFTER_S)})


def unavailable(message: str) -> ServiceError:
    """503: no rank group serves now."""
    return ServiceError(503, message, {"Retry-After": str(RETRY_AFTER_S)})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """The one error body of the service."""
    return JSONResponse({"error": message}, status, headers=dict(headers or {}))


def install(app: FastAPI) -> None:
    """Registers the handlers that give every error, the framework's included, that body."""

    @app.exception_handler(ServiceError)
    async def on_service_error(_: Request, error: ServiceError) -> Response:
        return error_response(error.status, error.message, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"no such path: {request.url.path}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            detail = f"{request.method} is not allowed on {request.url.path}: use {allowed}"
        return error_response(error.status_code, detail, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first.get("loc", ()))
        return error_response(422, f"{where}: {first.get('msg', 'invalid')}")


class BugShield:
    """ASGI middleware: an exception that nobody expected is logged and answered with 500.

    Starlette's own handler for ``Exception`` raises it again after the answer, which makes uvicorn
    close the connection.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI scope."""
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ServiceError:
            raise
        except ClientDisconnect:
            if not started:
                await Response(status_code=CLIENT_GONE)(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            _log.error("unhandled error on %s", scope["path"], exc_info=error)
            kind = type(error).__name__
            answer = error_response(500, f"internal error ({kind}): see the server's log")
            await answer(scope, receive, send)
