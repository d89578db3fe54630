"""Puts the service together: routes, dashboard, middlewares and OpenAPI over one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.attention_model import AttentionModel
from service.auth import Auth
from service.config import ServiceConfig
from service.dashboard import Dashboard
from service.engine import Engine
from service.errors import BugShield, install
from service.limits import BodyGuard
from service.metrics import CountResponses, Metrics
from service.oip.schema import COMPONENTS
from service.routes import PRODUCT, PRODUCT_VERSION, make_router
from service.sequences import Sequences

__all__ = ["create_app"]


def create_app(config: ServiceConfig, engine: Engine) -> FastAPI:
    """The ASGI application.

    Args:
        config: limits and security settings.
        engine: executes requests; the app adds observers to it.

    Returns:
        The app. From outside in: body bounds, authentication, response counters, routes.
    """
    sequences = Sequences(config.sequence_idle_s)
    attention = AttentionModel(sequences)
    metrics = Metrics(engine, sequences)
    dashboard = Dashboard(config, engine, metrics, sequences)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with dashboard.lifespan():
            yield

    app = FastAPI(
        title=PRODUCT,
        version=PRODUCT_VERSION,
        docs_url=None,  # the stock pages load their scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        lifespan=lifespan,
    )
    app.state.dashboard = dashboard
    app.state.metrics = metrics
    install(app)
    app.include_router(make_router(config, engine, metrics, attention))
    app.include_router(dashboard.router())
    # Starlette runs the middleware added last first.
    app.add_middleware(BugShield)
    app.add_middleware(CountResponses, metrics=metrics)
    app.add_middleware(Auth, config=config)
    app.add_middleware(BodyGuard, config=config)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                components.pop(name, None)
            components.update(COMPONENTS)
            for methods in schema["paths"].values():
                for operation in methods.values():
                    # A path parameter that is too long is the one thing left to FastAPI's checks.
                    answer = operation["responses"].get("422")
                    if answer is not None:
                        answer["content"] = {
                            "application/json": {
                                "schema": {"$ref": "#/components/schemas/ErrorBody"}
                            }
                        }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    return app
