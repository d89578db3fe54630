"""The model ``attention_pre``: add, norm, projections, cache writes and index scores of a layer.

The keys that a token is scored against lie on the ranks, in pages that a *sequence* owns: a request
with ``sequence_id`` appends its tokens to it. A request without one brings all it needs: the index
cache of its earlier keys, or nothing when its tokens are all the keys there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from service.engine import (
    AttentionInfo,
    AttentionRequest,
    AttentionResult,
    Engine,
    LayerInfo,
    Segments,
)
from service.errors import ServiceError
from service.models import bad, expect, time_limit_s, timings
from service.oip.codec import Tensor
from service.oip.schema import InferRequest, ModelMetadata, TensorMetadata
from service.sequences import PAGE, Lease, SequenceConflict, SequenceError, Sequences

__all__ = ["AttentionModel"]

PAGE_BYTES: Final = PAGE * 132
"""Of the index cache: 64 keys of 128 codes, then 64 FP32 scales."""
_CALL: Final = ("context_lens", "new_tokens", "block_table", "index_cache")
_INPUTS: Final = ("hidden_states", "residual", "positions", *_CALL)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where in a sequence a request appends its tokens; see ``Sequences.append``."""

    name: str
    start: bool
    end: bool
    expected: int | None
    rewind: bool


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A checked request, before it has pages."""

    num_tokens: int
    hidden: Segments
    residual: Segments
    positions: memoryview | None
    place: _Place | None
    new_tokens: list[int]
    context_lens: list[int] = field(default_factory=list)
    table: list[list[int]] = field(default_factory=list)
    cache: Segments | None = None
    num_pages: int = 0
    rows: bool
    deadline: float


@dataclass(frozen=True)
class _Executed:
    result: AttentionResult
    work: _Work
    num_keys: int
    info: AttentionInfo
    parameters: dict[str, Any]

    def output(self, name: str) -> Tensor:
        if name == "timings":
            return timings(self.result)
        datatype, shape = _OUTPUTS[name](self.info)
        filled = (self.work.num_tokens, *(self.num_keys if d < 0 else d for d in shape[1:]))
        return Tensor(name, datatype, filled, Segments([self.result.tensors[name]]))


_OUTPUTS: Final[dict[str, Any]] = {
    "residual": lambda info: ("BF16", [-1, info.hidden]),
    "queries": lambda info: ("BF16", [-1, info.num_heads, info.head_dim]),
    "absorbed": lambda info: ("BF16", [-1, info.num_heads, info.kv_lora]),
    "index_weights": lambda info: ("FP32", [-1, info.index_heads]),
    "logits": lambda info: ("FP32", [-1, -1]),
    "latent_rows": lambda info: ("UINT8", [-1, info.latent_row_bytes]),
    "index_rows": lambda info: ("UINT8", [-1, info.index_row_bytes]),
}
_NOTES: Final = {
    "residual": "hidden_states + residual",
    "queries": "main queries, their last columns rotated",
    "absorbed": "queries without position times W_UK",
    "index_weights": "weight of an index head, the scale of its e4m3 query included",
    "logits": "index scores of a token's keys; -inf where it may not look (null in JSON, as NaN)",
    "latent_rows": "what was written to the latent cache",
    "index_rows": "what was written to the index cache: 128 codes and an FP32 scale",
}
_DEFAULTS: Final = ("residual", "queries", "absorbed", "index_weights", "logits")


class AttentionModel:
    """``models.Model`` over an attention-pre layer."""

    name = "attention_pre"
    version = "1"
    outputs: tuple[str, ...] = (*_OUTPUTS, "timings")
    defaults: tuple[str, ...] = _DEFAULTS
    binary = frozenset({"residual", "queries", "absorbed"})

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences

    def metadata(self, layer: LayerInfo) -> ModelMetadata:
        """What ``GET /v2/models/attention_pre`` says of the layer being served."""
        info = _info(layer)
        limits = {"max_tokens": info.max_tokens, "max_keys": info.max_keys}
        alone = {"optional": True, "note": "without sequence_id only"}

        def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> TensorMetadata:
            return TensorMetadata(
                name=name, datatype=datatype, shape=shape, parameters=more or None
            )

        return ModelMetadata(
            name=self.name,
            versions=[self.version],
            platform=f"megamoe-{info.backend}",
            inputs=[
                tensor("hidden_states", "BF16", [-1, info.hidden], **limits),
                tensor("residual", "BF16", [-1, info.hidden]),
                tensor("positions", "INT32", [-1], optional=True, note="default: place among keys"),
                tensor("context_lens", "INT32", [-1], **alone),
                tensor("new_tokens", "INT32", [-1], **alone),
                tensor("block_table", "INT32", [-1, -1], **alone),
                tensor("index_cache", "UINT8", [-1, PAGE_BYTES], **alone),
            ],
            outputs=[
                tensor(name, *form(info), optional=name not in _DEFAULTS, note=_NOTES[name])
                for name, form in _OUTPUTS.items()
            ]
            + [tensor("timings", "FP64", [3], optional=True, note="queue, host, kernel, seconds")],
        )

    def parse(
        self,
        request: InferRequest,
        tensors: dict[str, Tensor],
        layer: LayerInfo,
        limit_s: float,
    ) -> _Work:
        """Checks an inference request against the layer.

        Raises:
            ServiceError: 400 naming the tensor, what was given and what is allowed.
        """
        info = _info(layer)
        unknown = sorted(set(tensors) - set(_INPUTS))
        if unknown:
            raise bad(f"input {unknown[0]!r} does not exist: choose from {', '.join(_INPUTS)}")
        hidden, residual = tensors.get("hidden_states"), tensors.get("residual")
        if hidden is None or residual is None:
            raise bad("inputs 'hidden_states' and 'residual' are needed")
        place = _place(request)
        # Without tokens there is a sequence to look up, rewind or end.
        least = 0 if place is not None and not place.start else 1
        if len(hidden.shape) != 2 or not least <= hidden.shape[0] <= info.max_tokens:
            raise bad(
                f"input 'hidden_states' has shape {list(hidden.shape)}: must be [n, {info.hidden}] "
                f"with n in {least}..{info.max_tokens}; split it over several requests"
            )
        n = hidden.shape[0]
        expect(hidden, ("BF16",), (n, info.hidden))
        expect(residual, ("BF16",), (n, info.hidden))
        positions = tensors.get("positions")
        if positions is not None:
            expect(positions, ("INT32",), (n,))
            _within(positions, 0, info.max_keys - 1)
        names = {output.name for output in request.outputs}
        common: dict[str, Any] = {
            "num_tokens": n,
            "hidden": hidden.content,
            "residual": residual.content,
            "positions": None if positions is None else positions.data,
            "rows": bool(names & {"latent_rows", "index_rows"}),
            "deadline": time.monotonic() + time_limit_s(request, limit_s),
        }
        if place is not None:
            given = [call for call in _CALL if call in tensors]
            if given:
                raise bad(
                    f"input {given[0]!r} does not go with sequence_id: the service keeps a "
                    "sequence's lengths and pages itself"
                )
            return _Work(**common, place=place, new_tokens=[n])
        return _Work(**common, place=None, **_call(tensors, n, info))

    async def execute(self, engine: Engine, work: _Work, layer: LayerInfo) -> _Executed:
        """Runs a checked request on pages of its sequence, or on pages of its own."""
        info, generation = _info(layer), engine.status().generation
        self.sequences.renew(generation, info.num_pages)
        with self._lease(work) as lease:
            request = AttentionRequest(
                generation=generation,
                num_tokens=work.num_tokens,
                hidden=work.hidden,
                residual=work.residual,
                new_tokens=work.new_tokens,
                context_lens=work.context_lens or [lease.length + work.num_tokens],
                block_table=[[lease.pages[page] for page in row] for row in work.table]
                or [lease.pages],
                positions=work.positions,
                upload=None if work.cache is None else (lease.pages, work.cache),
                rows=work.rows,
                deadline=work.deadline,
            )
            if work.num_tokens:
                result = await engine.run_attention(request)
            else:  # nothing for the ranks to do
                result = AttentionResult(tensors=dict.fromkeys(_OUTPUTS, memoryview(b"")))
            lease.done = True
        told: dict[str, Any] = {}
        if work.place is not None:
            told = {"sequence_id": work.place.name, "sequence_keys": request.context_lens[0]}
        return _Executed(result, work, request.num_keys, info, told)

    @contextlib.contextmanager
    def _lease(self, work: _Work) -> Iterator[Lease]:
        try:
            if (place := work.place) is None:
                held = self.sequences.scratch(work.num_pages)
            else:
                held = self.sequences.append(
                    place.name,
                    work.num_tokens,
                    start=place.start,
                    end=place.end,
                    expected=place.expected,
                    rewind=place.rewind,
                )
            with held as lease:
                yield lease
        except SequenceError as error:
            raise bad(str(error)) from None
        except SequenceConflict as error:
            raise ServiceError(409, str(error)) from None


def _info(layer: LayerInfo) -> AttentionInfo:
    assert layer.attention is not None  # else the model is not there
    return layer.attention


def _within(tensor: Tensor, low: int, high: int) -> None:
    values = tensor.array()
    wrong = np.argwhere((values < low) | (values > high))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        where = ", ".join(map(str, at))
        raise bad(f"input {tensor.name!r}[{where}] = {values[at]}: must be in {low}..{high}")


def _place(request: InferRequest) -> _Place | None:
    """The place that the request names; None without a sequence."""
    given = request.parameters.get("sequence_id", 0)
    flags = {}
    for key in ("sequence_start", "sequence_end", "sequence_rewind"):
        flags[key] = request.parameters.get(key, False)
        if not isinstance(flags[key], bool):
            raise bad(f"{key} = {str(flags[key])[:40]!r}: must be true or false")
    expected = request.parameters.get("sequence_keys")
    if expected is not None and (type(expected) is not int or not 0 <= expected < 1 << 40):
        raise bad(
            f"sequence_keys = {str(expected)[:40]!r}: must be the number of keys that the sequence "
            "has before this request"
        )
    if type(given) not in (int, str) or len(str(given)) > 128:
        raise bad(f"sequence_id = {str(given)[:40]!r}: must be a number or up to 128 characters")
    if given in (0, ""):
        if expected is not None or any(flags.values()):
            raise bad(
                "sequence_start, sequence_end, sequence_keys and sequence_rewind need a "
                "sequence_id that is not 0 or empty"
            )
        return None
    if flags["sequence_start"] and expected:
        raise bad(f"sequence_keys = {expected}: a sequence starts with 0 keys")
    if flags["sequence_rewind"] and expected is None:
        raise bad("sequence_rewind needs sequence_keys, the number of keys to keep")
    return _Place(
        name=str(given),
        start=flags["sequence_start"],
        end=flags["sequence_end"],
        expected=expected,
        rewind=flags["sequence_rewind"],
    )


def _call(tensors: dict[str, Tensor], n: int, info: AttentionInfo) -> dict[str, Any]:
    """Lengths and page table of a request that brings its own."""
    lens, new, table, cache = (tensors.get(name) for name in _CALL)
    if lens is None:
        if new is not None or table is not None or cache is not None:
            raise bad("input 'context_lens' is missing: keys of each request, new ones included")
        context, counts = [n], [n]
    else:
        if len(lens.shape) != 1 or not 1 <= lens.shape[0] <= n:
            raise bad(
                f"input 'context_lens' has shape {list(lens.shape)}: must be [b] with b in 1..{n}"
            )
        b = lens.shape[0]
        expect(lens, ("INT32",), (b,))
        _within(lens, 1, info.max_keys)
        context = lens.array().tolist()
        if new is not None:
            expect(new, ("INT32",), (b,))
            _within(new, 1, n)
            counts = new.array().tolist()
        elif b in (1, n):
            counts = [n // b] * b
        else:
            raise bad(f"input 'new_tokens' is missing: {n} tokens of {b} requests, how many each?")
        if sum(counts) != n:
            raise bad(f"input 'new_tokens' adds up to {sum(counts)}: hidden_states has {n} tokens")
    over = next((i for i, (c, k) in enumerate(zip(counts, context, strict=True)) if c > k), None)
    if over is not None:
        raise bad(
            f"request {over} has {counts[over]} new tokens and context_lens {context[over]}: "
            "its keys include the new ones"
        )
    pages = [-(-keys // PAGE) for keys in context]
    call: dict[str, Any] = {"new_tokens": counts, "context_lens": context}
    if cache is None:
        if table is not None:
            raise bad("input 'block_table' goes with 'index_cache', whose pages it names")
        if counts != context:
            raise bad(
                "context_lens exceed new_tokens: send the earlier keys as index_cache and "
                "block_table, or keep them in a sequence (sequence_id)"
            )
        ends = np.cumsum(pages).tolist()
        rows = [list(range(end - count, end)) for count, end in zip(pages, ends, strict=True)]
        return {**call, "table": rows, "num_pages": ends[-1]}
    if table is None:
        raise bad("input 'index_cache' goes with 'block_table', which names its pages")
    if len(cache.shape) != 2 or not 1 <= cache.shape[0] <= info.num_pages:
        raise bad(
            f"input 'index_cache' has shape {list(cache.shape)}: must be [p, {PAGE_BYTES}] with p "
            f"in 1..{info.num_pages}"
        )
    expect(cache, ("UINT8",), (cache.shape[0], PAGE_BYTES))
    if len(table.shape) != 2 or not max(pages) <= table.shape[1] <= info.num_pages:
        raise bad(
            f"input 'block_table' has shape {list(table.shape)}: must be [{len(context)}, w] with "
            f"w in {max(pages)}..{info.num_pages}: from the pages of the longest request to all"
        )
    expect(table, ("INT32",), (len(context), table.shape[1]))
    values = table.array()
    used = np.arange(values.shape[1]) < np.array(pages)[:, None]
    _within(
        Tensor("block_table", "INT32", values.shape, Segments([np.where(used, values, 0).data])),
        0,
        cache.shape[0] - 1,
    )
    rows = [values[i, :count].tolist() for i, count in enumerate(pages)]
    slots = [
        rows[i][key // PAGE] * PAGE + key % PAGE
        for i, (count, keys) in enumerate(zip(counts, context, strict=True))
        for key in range(keys - count, keys)
    ]
    if len(set(slots)) < n:
        raise bad("block_table gives two new tokens the same place in the cache")
    return {**call, "table": rows, "cache": cache.content, "num_pages": cache.shape[0]}
