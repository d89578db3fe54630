"""The model ``moe``: what it declares, how a request is checked, how an answer is laid out.

Everything a rank would trip over is refused here, before any rank sees it.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from service.engine import LayerInfo, MoERequest, MoEResult, Segments
from service.errors import ServiceError
from service.oip.codec import Tensor
from service.oip.schema import InferRequest, ModelMetadata, TensorMetadata

__all__ = ["NAME", "OUTPUTS", "VERSION", "answer", "metadata", "parse", "wanted_outputs"]

NAME: Final = "moe"
VERSION: Final = "1"
OUTPUTS: Final = (
    "output",
    "topk_ids",
    "topk_weights",
    "routing_counts",
    "ring_high_water",
    "timings",
)
_INPUTS: Final = ("hidden_states", "hidden_scales", "topk_ids", "topk_weights")


def metadata(layer: LayerInfo) -> ModelMetadata:
    """What ``GET /v2/models/moe`` says of the layer being served."""
    fp8 = layer.weight_dtype == "fp8"
    inputs = [
        TensorMetadata(
            name="hidden_states",
            datatype="BF16",
            shape=[-1, layer.hidden],
            parameters={
                "also": ["UINT8"] if fp8 else [],
                "note": "UINT8 carries FP8 e4m3 bits and needs hidden_scales" if fp8 else "",
                "max_tokens": layer.capacity,
            },
        )
    ]
    optional = {"optional": True}
    if fp8:
        inputs.append(
            TensorMetadata(
                name="hidden_scales",
                datatype="FP32",
                shape=[-1, layer.num_groups],
                parameters={"optional": True, "note": "one scale per 128 columns"},
            )
        )
    routes: dict[str, Any] = optional if layer.has_router else {}
    inputs.append(
        TensorMetadata(
            name="topk_ids",
            datatype="INT32",
            shape=[-1, layer.topk],
            parameters={**routes, "also": ["INT64"], "note": "-1 masks a route"},
        )
    )
    inputs.append(
        TensorMetadata(
            name="topk_weights",
            datatype="FP32",
            shape=[-1, layer.topk],
            parameters=routes or None,
        )
    )
    return ModelMetadata(
        name=NAME,
        versions=[VERSION],
        platform=f"megamoe-{layer.backend}",
        inputs=inputs,
        outputs=[
            TensorMetadata(name="output", datatype="BF16", shape=[-1, layer.hidden]),
            TensorMetadata(
                name="topk_ids", datatype="INT32", shape=[-1, layer.topk], parameters=optional
            ),
            TensorMetadata(
                name="topk_weights", datatype="FP32", shape=[-1, layer.topk], parameters=optional
            ),
            TensorMetadata(
                name="routing_counts",
                datatype="INT64",
                shape=[layer.num_experts],
                parameters={"optional": True, "note": "this request's routes per expert"},
            ),
            TensorMetadata(
                name="ring_high_water",
                datatype="INT32",
                shape=[layer.num_ranks, 2],
                parameters={"optional": True, "note": "most blocks in use, L1 and L2, per rank"},
            ),
            TensorMetadata(
                name="timings",
                datatype="FP64",
                shape=[3],
                parameters={"optional": True, "note": "queue, host, kernel, in seconds"},
            ),
        ],
    )


def _bad(message: str) -> ServiceError:
    return ServiceError(400, message)


def _expect(tensor: Tensor, datatypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if tensor.datatype not in datatypes:
        raise _bad(
            f"input {tensor.name!r} has datatype {tensor.datatype}: "
            f"must be {' or '.join(datatypes)}"
        )
    if tensor.shape != shape:
        raise _bad(f"input {tensor.name!r} has shape {list(tensor.shape)}: must be {list(shape)}")


def wanted_outputs(request: InferRequest) -> list[tuple[str, bool]]:
    """Names of the outputs asked for, each with whether it goes out as binary.

    Raises:
        ServiceError: 400 for an output that does not exist, or a parameter that is not understood.
    """
    default = request.parameters.get("binary_data_output", False)
    if not isinstance(default, bool):
        raise _bad(f"binary_data_output = {default!r}: must be true or false")
    if not request.outputs:
        return [("output", default)]
    wanted: list[tuple[str, bool]] = []
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise _bad(f"output {output.name!r} does not exist: choose from {', '.join(OUTPUTS)}")
        if any(name == output.name for name, _ in wanted):
            raise _bad(f"output {output.name!r} is asked for twice")
        binary = output.parameters.get("binary_data", default)
        if not isinstance(binary, bool):
            raise _bad(f"output {output.name!r}: binary_data = {binary!r}: must be true or false")
        if any(key.startswith("shared_memory") for key in output.parameters):
            raise _bad(f"output {output.name!r}: shared memory regions are not supported")
        if output.parameters.get("classification"):
            raise _bad(f"output {output.name!r}: classification is not supported")
        wanted.append((output.name, binary))
    return wanted


def _time_limit(request: InferRequest, default_s: float) -> float:
    timeout = request.parameters.get("timeout", 0)
    if type(timeout) is not int or timeout < 0:
        raise _bad(f"timeout = {timeout!r}: must be a number of microseconds")
    return min(default_s, timeout / 1e6) if timeout else default_s


def parse(
    request: InferRequest, tensors: dict[str, Tensor], layer: LayerInfo, time_limit_s: float
) -> MoERequest:
    """Checks an inference request against the layer.

    Raises:
        ServiceError: 400 naming the tensor, what was given and what is allowed.
    """
    unknown = sorted(set(tensors) - set(_INPUTS))
    if unknown:
        raise _bad(f"input {unknown[0]!r} does not exist: choose from {', '.join(_INPUTS)}")
    hidden = tensors.get("hidden_states")
    if hidden is None:
        raise _bad("input 'hidden_states' is missing")
    if len(hidden.shape) != 2 or hidden.shape[1] != layer.hidden:
        raise _bad(
            f"input 'hidden_states' has shape {list(hidden.shape)}: must be [n, {layer.hidden}]"
        )
    num_tokens = hidden.shape[0]
    if not 1 <= num_tokens <= layer.capacity:
        raise _bad(
            f"input 'hidden_states' has {num_tokens} tokens: must be 1..{layer.capacity} "
            f"({layer.num_ranks} ranks of {layer.max_tokens}); split it over several requests"
        )
    scales = tensors.get("hidden_scales")
    fp8 = layer.weight_dtype == "fp8"
    _expect(hidden, ("BF16", "UINT8") if fp8 else ("BF16",), (num_tokens, layer.hidden))
    if (hidden.datatype == "UINT8") != (scales is not None):
        raise _bad(
            "input 'hidden_scales' goes with UINT8 (FP8) hidden_states, and only with them: "
            f"hidden_states has {hidden.datatype}"
        )
    if scales is not None:
        _expect(scales, ("FP32",), (num_tokens, layer.num_groups))
        values = scales.array()
        usable = np.isfinite(values) & (values >= 0)
        if not usable.all():
            at = np.argwhere(~usable)[0]
            raise _bad(
                f"input 'hidden_scales'[{at[0]}, {at[1]}] = {values[tuple(at)]}: "
                "a scale must be finite and not negative"
            )
    ids, weights = tensors.get("topk_ids"), tensors.get("topk_weights")
    if (ids is None) != (weights is None):
        raise _bad("inputs 'topk_ids' and 'topk_weights' go together: send both or neither")
    if ids is None and not layer.has_router:
        raise _bad("this layer has no router: send topk_ids and topk_weights")
    ids_data: memoryview | None = None
    if ids is not None and weights is not None:
        _expect(ids, ("INT32", "INT64"), (num_tokens, layer.topk))
        _expect(weights, ("FP32",), (num_tokens, layer.topk))
        values = ids.array()
        wrong = (values < -1) | (values >= layer.num_experts)
        if wrong.any():
            at = np.argwhere(wrong)[0]
            raise _bad(
                f"input 'topk_ids'[{at[0]}, {at[1]}] = {values[tuple(at)]}: must be in "
                f"0..{layer.num_experts - 1}, or -1 for no route"
            )
        ids_data = ids.data if ids.datatype == "INT32" else memoryview(values.astype("<i4").data)
        ids_data = ids_data.cast("B")
    names = {output.name for output in request.outputs}
    return MoERequest(
        num_tokens=num_tokens,
        hidden=hidden.content,
        scales=None if scales is None else scales.data,
        topk_ids=ids_data,
        topk_weights=None if weights is None else weights.data,
        deadline=time.monotonic() + _time_limit(request, time_limit_s),
        routes=bool(names & {"topk_ids", "topk_weights", "routing_counts"}),
    )


def answer(name: str, request: MoERequest, result: MoEResult, layer: LayerInfo) -> Tensor:
    """One output of a finished request."""
    shape: tuple[int, ...] = (request.num_tokens, layer.topk)
    if name == "output":
        rows = (request.num_tokens, layer.hidden)
        return Tensor(name, "BF16", rows, Segments([result.output]))
    if name == "topk_ids":
        return Tensor(name, "INT32", shape, Segments([_given(result.topk_ids, request.topk_ids)]))
    if name == "topk_weights":
        weights = _given(result.topk_weights, request.topk_weights)
        return Tensor(name, "FP32", shape, Segments([weights]))
    if name == "routing_counts":
        ids = np.frombuffer(_given(result.topk_ids, request.topk_ids), "<i4")
        counts = np.bincount(ids[ids >= 0], minlength=layer.num_experts).astype("<i8")
        return Tensor(name, "INT64", (layer.num_experts,), Segments([counts.tobytes()]))
    if name == "ring_high_water":
        water = np.array(result.high_water, "<i4").reshape(-1, 2)
        return Tensor(name, "INT32", water.shape, Segments([water.tobytes()]))
    times = np.array([result.queue_s, result.host_s, result.kernel_s], "<f8")
    return Tensor(name, "FP64", (3,), Segments([times.tobytes()]))


def _given(chosen: bytes | None, sent: memoryview | None) -> memoryview:
    """The routes that the layer chose, else those that the client sent."""
    if chosen is not None:
        return memoryview(chosen)
    assert sent is not None
    return sent
