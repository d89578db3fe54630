"""The model ``moe``: what it declares, how a request is checked, how an answer is laid out.

Everything a rank would trip over is refused here, before any rank sees it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from service.engine import Engine, LayerInfo, MoERequest, MoEResult, Segments
from service.models import bad, expect, time_limit_s, timings
from service.oip.codec import Tensor
from service.oip.schema import InferRequest, ModelMetadata, TensorMetadata

__all__ = ["MoEModel"]

_INPUTS: Final = ("hidden_states", "hidden_scales", "topk_ids", "topk_weights")


@dataclass(frozen=True)
class _Executed:
    result: MoEResult
    work: MoERequest
    layer: LayerInfo
    parameters: dict[str, Any] = field(default_factory=dict)

    def output(self, name: str) -> Tensor:
        return _answer(name, self.work, self.result, self.layer)


class MoEModel:
    """``models.Model`` over an MoE layer."""

    name = "moe"
    version = "1"
    outputs: tuple[str, ...] = (
        "output",
        "topk_ids",
        "topk_weights",
        "routing_counts",
        "ring_high_water",
        "timings",
    )
    defaults: tuple[str, ...] = ("output",)
    binary = frozenset({"output"})

    def metadata(self, layer: LayerInfo) -> ModelMetadata:
        """What ``GET /v2/models/moe`` says of the layer being served."""
        return _metadata(layer)

    def parse(
        self,
        request: InferRequest,
        tensors: dict[str, Tensor],
        layer: LayerInfo,
        limit_s: float,
    ) -> MoERequest:
        """Checks an inference request against the layer.

        Raises:
            ServiceError: 400 naming the tensor, what was given and what is allowed.
        """
        return _parse(request, tensors, layer, limit_s)

    async def execute(self, engine: Engine, work: MoERequest, layer: LayerInfo) -> _Executed:
        """Runs a checked request."""
        if not work.num_tokens:
            # Right for every layer, and no step for the ranks.
            return _Executed(MoEResult(output=memoryview(b"")), work, layer)
        return _Executed(await engine.run_moe(work), work, layer)


def _metadata(layer: LayerInfo) -> ModelMetadata:
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
        name=MoEModel.name,
        versions=[MoEModel.version],
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


def _parse(
    request: InferRequest, tensors: dict[str, Tensor], layer: LayerInfo, limit_s: float
) -> MoERequest:
    unknown = sorted(set(tensors) - set(_INPUTS))
    if unknown:
        raise bad(f"input {unknown[0]!r} does not exist: choose from {', '.join(_INPUTS)}")
    hidden = tensors.get("hidden_states")
    if hidden is None:
        raise bad("input 'hidden_states' is missing")
    if len(hidden.shape) != 2 or hidden.shape[1] != layer.hidden:
        raise bad(
            f"input 'hidden_states' has shape {list(hidden.shape)}: must be [n, {layer.hidden}]"
        )
    num_tokens = hidden.shape[0]
    if num_tokens > layer.capacity:
        raise bad(
            f"input 'hidden_states' has {num_tokens} tokens: must be 0..{layer.capacity} "
            f"({layer.num_ranks} ranks of {layer.max_tokens}); split it over several requests"
        )
    scales = tensors.get("hidden_scales")
    fp8 = layer.weight_dtype == "fp8"
    expect(hidden, ("BF16", "UINT8") if fp8 else ("BF16",), (num_tokens, layer.hidden))
    if (hidden.datatype == "UINT8") != (scales is not None):
        raise bad(
            "input 'hidden_scales' goes with UINT8 (FP8) hidden_states, and only with them: "
            f"hidden_states has {hidden.datatype}"
        )
    if scales is not None:
        expect(scales, ("FP32",), (num_tokens, layer.num_groups))
        values = scales.array()
        usable = np.isfinite(values) & (values >= 0)
        if not usable.all():
            at = np.argwhere(~usable)[0]
            raise bad(
                f"input 'hidden_scales'[{at[0]}, {at[1]}] = {values[tuple(at)]}: "
                "a scale must be finite and not negative"
            )
    ids, weights = tensors.get("topk_ids"), tensors.get("topk_weights")
    if (ids is None) != (weights is None):
        raise bad("inputs 'topk_ids' and 'topk_weights' go together: send both or neither")
    if ids is None and not layer.has_router:
        raise bad("this layer has no router: send topk_ids and topk_weights")
    ids_data: memoryview | None = None
    if ids is not None and weights is not None:
        expect(ids, ("INT32", "INT64"), (num_tokens, layer.topk))
        expect(weights, ("FP32",), (num_tokens, layer.topk))
        values = ids.array()
        wrong = (values < -1) | (values >= layer.num_experts)
        if wrong.any():
            at = np.argwhere(wrong)[0]
            raise bad(
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
        deadline=time.monotonic() + time_limit_s(request, limit_s),
        routes=bool(names & {"topk_ids", "topk_weights", "routing_counts"}),
    )


def _answer(name: str, request: MoERequest, result: MoEResult, layer: LayerInfo) -> Tensor:
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
    return timings(result)


def _given(chosen: bytes | None, sent: memoryview | None) -> memoryview:
    """The routes that the layer chose, else those that the client sent; neither of no token."""
    if chosen is not None:
        return memoryview(chosen)
    return memoryview(b"") if sent is None else sent
