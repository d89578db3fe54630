"""The paths of the service: Open Inference Protocol v2, health, metrics, fault injection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from service.attention_model import AttentionModel
from service.config import ServiceConfig
from service.engine import (
    Engine,
    EngineBusy,
    EngineUnavailable,
    LayerInfo,
    RequestExpired,
)
from service.errors import CLIENT_GONE, ServiceError, busy, unavailable
from service.limits import read_body
from service.metrics import CONTENT_TYPE, Metrics
from service.models import Executed, Model, need_binary, wanted_outputs
from service.moe_model import MoEModel
from service.oip import codec
from service.oip.schema import InferRequest, InferResponse, ModelReady, ServerMetadata

__all__ = ["make_router"]

PRODUCT: Final = "megamoe"
PRODUCT_VERSION: Final = "0.1.0"
LARGE_JSON: Final = 1 << 20
"""JSON that takes long enough to hold up other requests: a thread parses it."""

ModelName = Annotated[
    str,
    Path(description="`moe` or `attention_pre`", max_length=64, examples=["moe", "attention_pre"]),
]
ModelVersion = Annotated[str, Path(description="`1`", max_length=64, examples=["1"])]


class FaultBody(msgspec.Struct, kw_only=True):
    """Body of ``POST /debug/fault``."""

    rank: int
    action: str


def _refs(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": "#/components/schemas/ErrorBody"}
    names = {
        400: "Malformed, or more than the layer holds",
        401: "Missing or wrong API key",
        403: "Not addressed to a loopback name, and no API key is set; or from another's web page",
        404: "No such model, version or path",
        405: "Wrong method",
        408: "The body came too slowly",
        409: "The sequence has another request in flight, or another number of keys",
        413: "Body too large",
        415: "Content-Encoding not supported",
        429: "Queue full: retry",
        500: "A bug",
        503: "No group of ranks serves",
    }
    return {
        status: {
            "description": names[status],
            "content": {"application/json": {"schema": schema}},
        }
        for status in statuses
    }


def _ok(schema: str, **more: Any) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}, **more}
    return {200: {"description": "Success", "content": content}}


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class TensorResponse(Response):
    """An answer with binary tensors, whose memory is released before the client reads any of it."""

    def __init__(
        self,
        head: bytes,
        parts: list[memoryview],
        headers: dict[str, str],
        release: Callable[[], None],
    ) -> None:
        length = len(head) + sum(part.nbytes for part in parts)
        fields = {"content-length": str(length), **headers}
        if parts:
            fields[codec.HEADER_LENGTH.lower()] = str(len(head))
        kind = "application/octet-stream" if parts else "application/json"
        super().__init__(head, headers=fields, media_type=kind)
        self.parts = parts
        self.release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        # The one copy of the tensors: h11 would make it too, but sending may wait for the client.
        try:
            whole = b"".join([self.body, *self.parts])
        finally:
            self.release()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": whole, "more_body": True})
        # Returns when the client has read: until then the answer counts as held memory.
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _run(
    engine: Engine, model: Model, request: Request, work: Any, layer: LayerInfo
) -> Executed | None:
    """The engine's answer, or None when the client hung up first."""
    job = asyncio.ensure_future(model.execute(engine, work, layer))
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((job, gone), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            return None
        return job.result()
    except EngineBusy as error:
        raise busy(str(error)) from None
    except (EngineUnavailable, RequestExpired) as error:
        raise unavailable(str(error)) from None
    finally:
        gone.cancel()
        job.cancel()


def make_router(
    config: ServiceConfig, engine: Engine, metrics: Metrics, attention: AttentionModel
) -> APIRouter:
    """All routes but the dashboard's."""
    router = APIRouter()
    moe = MoEModel()

    def ready_layer() -> LayerInfo:
        status, layer = engine.status(), engine.layer
        if status.state != "ready" or layer is None:
            raise unavailable(f"not ready ({status.state}): {status.reason}")
        return layer

    def present() -> dict[str, Model]:
        layer = engine.layer
        models: dict[str, Model] = {moe.name: moe}
        if layer is not None and layer.attention is not None:
            models[attention.name] = attention
        return models

    def find_model(name: str, version: str | None) -> Model:
        models = present()
        if name == attention.name and engine.layer is None:
            raise unavailable(f"the layers are not loaded yet: {engine.status().reason}")
        if name not in models:
            there = " and ".join(repr(known) for known in models)
            hint = f" (--attention-pre adds {name!r})" if name == attention.name else ""
            raise ServiceError(404, f"unknown model {name[:64]!r}: this service has {there}{hint}")
        model = models[name]
        if version not in (None, model.version):
            raise ServiceError(
                404, f"unknown version {version[:64]!r} of {name!r}: it has {model.version!r}"
            )
        return model

    def model_metadata(name: str, version: str | None) -> Response:
        model = find_model(name, version)
        layer = engine.layer
        if layer is None:
            raise unavailable(f"the layer is not loaded yet: {engine.status().reason}")
        return _json(model.metadata(layer))

    def model_ready(name: str, version: str | None) -> Response:
        find_model(name, version)
        ready_layer()
        return _json(ModelReady(name=name, ready=True))

    async def infer(name: str, version: str | None, request: Request) -> Any:
        started = time.monotonic()
        model = find_model(name, version)
        ready_layer()
        body = await read_body(request, config)
        header = request.headers.get(codec.HEADER_LENGTH)
        json_bytes = codec.split_body(body.nbytes, header)
        arguments = body, header, config.max_json_bytes
        if json_bytes > LARGE_JSON:
            message, tensors = await asyncio.to_thread(codec.decode_infer, *arguments)
        else:
            message, tensors = codec.decode_infer(*arguments)
        wanted = wanted_outputs(message, model)
        layer = ready_layer()
        work = model.parse(message, tensors, layer, config.request_timeout_s)
        need_binary(wanted, model)
        executed = await _run(engine, model, request, work, layer)
        if executed is None:
            return Response(status_code=CLIENT_GONE)
        try:
            return respond(model, message, wanted, executed, started)
        except BaseException:
            executed.result.release()
            raise

    def respond(
        model: Model,
        message: InferRequest,
        wanted: list[tuple[str, bool]],
        executed: Executed,
        started: float,
    ) -> Response:
        result = executed.result
        response = InferResponse(
            model_name=model.name,
            model_version=model.version,
            id=message.id,
            outputs=[],
            parameters={
                "queue_us": round(result.queue_s * 1e6),
                "host_us": round(result.host_s * 1e6),
                "kernel_us": round(result.kernel_s * 1e6),
                "step": result.step,
                "step_tokens": result.step_tokens,
                **executed.parameters,
            },
        )
        outputs = [(executed.output(name), binary) for name, binary in wanted]
        head, parts = codec.encode_infer(response, outputs)
        timing = ", ".join(
            f"{phase};dur={seconds * 1e3:.3f}"
            for phase, seconds in (
                ("queue", result.queue_s),
                ("host", result.host_s),
                ("kernel", result.kernel_s),
            )
        )
        total = time.monotonic() - started
        metrics.on_request(result.queue_s, result.host_s, result.kernel_s, total)
        return TensorResponse(head, parts, {"server-timing": timing}, result.release)

    octets = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    infer_body = {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": {"$ref": "#/components/schemas/InferRequest"}},
                **octets,
            },
        },
        "parameters": [
            {
                "name": codec.HEADER_LENGTH,
                "in": "header",
                "required": False,
                "description": "Bytes of the JSON part when binary tensors follow it",
                "schema": {"type": "integer", "minimum": 1},
            }
        ],
    }
    common = _refs(401, 403, 500)
    infer_answers = {
        **_ok("InferResponse", **octets),
        **_refs(400, 404, 408, 409, 413, 415, 429, 503),
        **common,
    }
    metadata_answers = {**_ok("ModelMetadata"), **_refs(404, 503), **common}
    ready_answers = {**_ok("ModelReady"), **_refs(404, 503), **common}

    @router.get("/v2", responses={**_ok("ServerMetadata"), **common}, tags=["server"])
    async def server_metadata() -> Response:
        """Name, version and protocol extensions."""
        return _json(
            ServerMetadata(name=PRODUCT, version=PRODUCT_VERSION, extensions=["binary_tensor_data"])
        )

    @router.get("/v2/health/live", tags=["health"])
    @router.get("/health", tags=["health"])
    async def live() -> dict[str, bool]:
        """The HTTP process answers."""
        return {"live": True}

    @router.get("/v2/health/ready", responses=_refs(503), tags=["health"])
    @router.get("/ready", responses=_refs(503), tags=["health"])
    async def ready() -> dict[str, bool]:
        """A group of ranks made progress a moment ago, heartbeat steps included."""
        ready_layer()
        return {"live": True, "ready": True}

    @router.get("/version", responses=common, tags=["server"])
    async def version() -> dict[str, str]:
        """Product version."""
        return {"name": PRODUCT, "version": PRODUCT_VERSION}

    @router.get("/v2/models", responses=common, tags=["models"])
    async def models() -> dict[str, list[str]]:
        """Names of the models that this service has."""
        return {"models": list(present())}

    @router.get("/v2/models/{model}", responses=metadata_answers, tags=["models"])
    async def metadata(model: ModelName) -> Response:
        """Inputs and outputs of a model."""
        return model_metadata(model, None)

    @router.get(
        "/v2/models/{model}/versions/{version}", responses=metadata_answers, tags=["models"]
    )
    async def metadata_of_version(model: ModelName, version: ModelVersion) -> Response:
        """Inputs and outputs of a version."""
        return model_metadata(model, version)

    @router.get("/v2/models/{model}/ready", responses=ready_answers, tags=["models"])
    async def ready_model(model: ModelName) -> Response:
        """Whether a model executes requests now."""
        return model_ready(model, None)

    @router.get(
        "/v2/models/{model}/versions/{version}/ready", responses=ready_answers, tags=["models"]
    )
    async def ready_version(model: ModelName, version: ModelVersion) -> Response:
        """Whether a version executes requests now."""
        return model_ready(model, version)

    @router.post(
        "/v2/models/{model}/infer",
        responses=infer_answers,
        openapi_extra=infer_body,
        tags=["inference"],
    )
    async def infer_model(model: ModelName, request: Request) -> Any:
        """Executes the layer on the tokens of this request."""
        return await infer(model, None, request)

    @router.post(
        "/v2/models/{model}/versions/{version}/infer",
        responses=infer_answers,
        openapi_extra=infer_body,
        tags=["inference"],
    )
    async def infer_version(model: ModelName, version: ModelVersion, request: Request) -> Any:
        """Executes a version of the layer on the tokens of this request."""
        return await infer(model, version, request)

    @router.get("/metrics", responses=common, tags=["telemetry"], response_class=Response)
    async def prometheus() -> Response:
        """Prometheus text exposition."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    if config.fault_injection:

        @router.post("/debug/fault", include_in_schema=False)
        async def fault(request: Request) -> Response:
            """Kills, stops or continues a rank; exists only when started with the flag."""
            body = await read_body(request, config)
            try:
                wanted = msgspec.json.decode(body.join(), type=FaultBody)
                engine.inject_fault(wanted.rank, wanted.action)
            except (msgspec.DecodeError, ValueError) as error:
                raise ServiceError(400, str(error)) from None
            except EngineUnavailable as error:
                raise unavailable(str(error)) from None
            return JSONResponse({"rank": wanted.rank, "action": wanted.action})

    return router
