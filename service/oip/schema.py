"""JSON bodies of the protocol as msgspec structs; the OpenAPI document is generated from them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

__all__ = [
    "COMPONENTS",
    "ErrorBody",
    "InferRequest",
    "InferResponse",
    "ModelMetadata",
    "ModelReady",
    "RequestInput",
    "RequestOutput",
    "ResponseOutput",
    "ServerMetadata",
    "TensorMetadata",
]

Dim = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Parameters = dict[str, Any]


class RequestInput(msgspec.Struct, kw_only=True):
    """One input tensor; its values are in ``data`` or, with ``binary_data_size``, in the body."""

    name: Name
    shape: Annotated[list[Dim], msgspec.Meta(min_length=1, max_length=8)]
    datatype: Name
    parameters: Parameters = msgspec.field(default_factory=dict)
    data: list[Any] | None = None


class RequestOutput(msgspec.Struct, kw_only=True):
    """One wanted output; ``parameters.binary_data`` chooses its form."""

    name: Name
    parameters: Parameters = msgspec.field(default_factory=dict)


class InferRequest(msgspec.Struct, kw_only=True):
    """JSON part of ``POST /v2/models/{model}/infer``."""

    inputs: Annotated[list[RequestInput], msgspec.Meta(min_length=1, max_length=16)]
    id: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    parameters: Parameters = msgspec.field(default_factory=dict)
    outputs: Annotated[list[RequestOutput], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=list
    )


class ResponseOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One output tensor, in ``data`` or, with ``binary_data_size``, behind the JSON part."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: list[Any] | None = None


class InferResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """JSON part of an inference response."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str = ""
    parameters: Parameters | None = None


class TensorMetadata(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One tensor of a model; -1 in ``shape`` is any length."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None


class ModelMetadata(msgspec.Struct, kw_only=True):
    """Answer of ``GET /v2/models/{model}``."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(msgspec.Struct, kw_only=True):
    """Answer of ``GET /v2/models/{model}/ready``."""

    name: str
    ready: bool


class ServerMetadata(msgspec.Struct, kw_only=True):
    """Answer of ``GET /v2``."""

    name: str
    version: str
    extensions: list[str]


class ErrorBody(msgspec.Struct, kw_only=True):
    """Body of every answer that is not a success."""

    error: str


def _components() -> dict[str, Any]:
    _, components = msgspec.json.schema_components(
        [InferRequest, InferResponse, ModelMetadata, ModelReady, ServerMetadata, ErrorBody],
        ref_template="#/components/schemas/{name}",
    )
    return dict(components)


COMPONENTS = _components()
"""JSON schemas by name, for ``components.schemas`` of the OpenAPI document."""
