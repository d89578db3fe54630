"""OpGraph: model code written as calls, captured as a def-use graph.

The front end of a plan. A call records what it reads and makes; nothing is computed. Sizes that
change from step to step are symbols: ``"M"`` token rows, ``"B"`` requests. A call inside
``with graph.stage("B0")`` becomes part of that stage, which one task body will run; calls outside
any are grouped by ``stages.partition``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from megamoe.errors import SpecError
from megamoe.spec import GROUP

__all__ = ["Call", "Dim", "OpGraph", "Tensor"]

Dim = int | str
Kind = Literal["input", "weight", "cache", "value"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the graph.

    Attributes:
        name: unique in the graph.
        shape: sizes, or the symbols ``"M"`` and ``"B"``; ``"?"`` where the plan doesn't care.
        dtype: ``"bf16"``, ``"e4m3"``, ``"fp32"``, ``"int32"``, ``"int64"`` or ``"bytes"``.
        kind: ``"input"`` per call, ``"weight"`` bound once, ``"cache"`` kept between calls, or
            ``"value"`` made by a call.
        storage: name of the tensor whose memory this is; its own, except for a cache after a
            write.
        port: values with the same port are published together.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    kind: Kind
    storage: str
    port: str


@dataclass(frozen=True, slots=True)
class Call:
    """One captured call: names of its tensors, and its constants."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: tuple[tuple[str, float], ...]
    stage: str | None


class OpGraph:
    """A graph under capture.

    Args:
        name: for messages and traces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, Tensor] = {}
        self.calls: list[Call] = []
        self.outputs: tuple[str, ...] = ()
        self._stage: str | None = None

    # ------------------------------------------------------------ tensors

    def _declare(
        self,
        name: str,
        shape: Sequence[Dim],
        dtype: str,
        kind: Kind,
        storage: str = "",
        port: str = "",
    ) -> Tensor:
        if name in self.tensors:
            raise SpecError(f"graph {self.name} already has a tensor {name!r}: choose another name")
        tensor = Tensor(name, tuple(shape), dtype, kind, storage or name, port or name)
        self.tensors[name] = tensor
        return tensor

    def runtime_arg(self, name: str, shape: Sequence[Dim], dtype: str = "bf16") -> Tensor:
        """Declares an input of every call."""
        return self._declare(name, shape, dtype, "input")

    def bound_weight(self, name: str, shape: Sequence[Dim], dtype: str = "bf16") -> Tensor:
        """Declares a weight."""
        return self._declare(name, shape, dtype, "weight")

    def cache(self, name: str, shape: Sequence[Dim], dtype: str = "bytes") -> Tensor:
        """Declares memory that outlives a call and that calls write in place."""
        return self._declare(name, shape, dtype, "cache")

    def set_outputs(self, *tensors: Tensor) -> None:
        """Names the tensors that must be stored although no call reads them."""
        self.outputs = tuple(t.name for t in tensors)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Groups the calls made inside into one stage."""
        if self._stage is not None:
            raise SpecError(f"stage {name!r} inside stage {self._stage!r}: stages do not nest")
        self._stage = name
        try:
            yield
        finally:
            self._stage = None

    def _call(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[str, Sequence[Dim], str]],
        attrs: dict[str, float] | None = None,
    ) -> tuple[Tensor, ...]:
        for tensor in inputs:
            if self.tensors.get(tensor.name) is not tensor:
                raise SpecError(f"{kind}: {tensor.name!r} belongs to another graph")
        base = f"{self._stage}.{kind}" if self._stage else kind
        tag, count = base, 1
        while f"{tag}.{outputs[0][0]}" in self.tensors:
            count += 1
            tag = f"{base}{count}"
        made = tuple(
            self._declare(f"{tag}.{suffix}", shape, dtype, "value", port=tag)
            for suffix, shape, dtype in outputs
        )
        names = tuple(t.name for t in inputs)
        constants = tuple(sorted((attrs or {}).items()))
        call = Call(kind, names, tuple(t.name for t in made), constants, self._stage)
        self.calls.append(call)
        return made

    def _need(self, ok: bool, kind: str, what: str, *given: Tensor) -> None:
        if not ok:
            shapes = ", ".join(f"{t.name} {t.shape} {t.dtype}" for t in given)
            raise SpecError(f"{kind}({shapes}): {what}")

    # ------------------------------------------------------------ calls

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """BF16 ``x + y``."""
        self._need(x.shape == y.shape, "add", "shapes must be equal", x, y)
        return self._call("add", (x, y), [("out", x.shape, "bf16")])[0]

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x**2) + eps) * weight`` per row."""
        self._need(weight.shape == x.shape[-1:], "rmsnorm", "one weight per column", x, weight)
        return self._call("rmsnorm", (x, weight), [("out", x.shape, "bf16")], {"eps": eps})[0]

    def layernorm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm per row, with weight and bias."""
        same = weight.shape == bias.shape == x.shape[-1:]
        self._need(same, "layernorm", "one weight and bias per column", x, weight, bias)
        out = [("out", x.shape, "fp32")]
        return self._call("layernorm", (x, weight, bias), out, {"eps": eps})[0]

    def quant(self, x: Tensor, *, pow2: bool = False) -> tuple[Tensor, Tensor]:
        """e4m3 codes and FP32 scales per 128 columns."""
        columns = x.shape[-1]
        whole = isinstance(columns, int) and columns % GROUP == 0
        self._need(whole, "quant", f"columns must be a multiple of {GROUP}", x)
        assert isinstance(columns, int)
        made = [
            ("codes", x.shape, "e4m3"),
            ("scales", (*x.shape[:-1], columns // GROUP), "fp32"),
        ]
        codes, scales = self._call("quant", (x,), made, {"pow2": float(pow2)})
        return codes, scales

    def gemm(self, x: Tensor, weight: Tensor) -> Tensor:
        """BF16 ``x @ weight.T``, FP32 result."""
        fits = x.shape[-1] == weight.shape[-1] and x.dtype == weight.dtype == "bf16"
        self._need(fits, "gemm", "BF16 [M, K] and [N, K] needed", x, weight)
        shape = (*x.shape[:-1], weight.shape[0])
        return self._call("gemm", (x, weight), [("out", shape, "fp32")])[0]

    def gemm_fp8(self, codes: Tensor, scales: Tensor, weight: Tensor, w_scales: Tensor) -> Tensor:
        """e4m3 ``x @ weight.T`` with scales per 1x128 and 128x128, FP32 result."""
        fits = codes.shape[-1] == weight.shape[-1] and codes.dtype == weight.dtype == "e4m3"
        self._need(fits, "gemm_fp8", "e4m3 [M, K] and [N, K] needed", codes, weight)
        rows, columns = weight.shape
        assert isinstance(rows, int)
        assert isinstance(columns, int)
        blocks = (-(-rows // GROUP), columns // GROUP)
        self._need(w_scales.shape == blocks, "gemm_fp8", f"w_scales must be {blocks}", w_scales)
        inputs = (codes, scales, weight, w_scales)
        return self._call("gemm_fp8", inputs, [("out", (*codes.shape[:-1], rows), "fp32")])[0]

    def bmm(self, x: Tensor, weight: Tensor) -> Tensor:
        """BF16 per head ``x[:, h, :K] @ weight[h]`` with weight [heads, K, N]; BF16 result."""
        heads, _, columns = weight.shape
        fits = len(x.shape) == 3 and x.shape[1] == heads
        self._need(fits, "bmm", "[M, heads, >= K] and [heads, K, N] needed", x, weight)
        return self._call("bmm", (x, weight), [("out", (x.shape[0], heads, columns), "bf16")])[0]

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Column ranges of ``x``."""
        self._need(sum(sizes) == x.shape[-1], "split", f"sizes {tuple(sizes)} must add up", x)
        made = [(f"out{i}", (*x.shape[:-1], size), x.dtype) for i, size in enumerate(sizes)]
        return self._call("split", (x,), made)

    def heads(self, x: Tensor, count: int) -> Tensor:
        """[M, count * D] as [M, count, D]."""
        columns = x.shape[-1]
        whole = isinstance(columns, int) and columns % count == 0
        self._need(whole, "heads", f"columns must be a multiple of {count}", x)
        assert isinstance(columns, int)
        return self._call("heads", (x,), [("out", (x.shape[0], count, columns // count), x.dtype)])[
            0
        ]

    def rope(self, x: Tensor, positions: Tensor, table: Tensor, *, first: int) -> Tensor:
        """Rotates pairs of neighbouring columns from ``first`` on; BF16 where it is stored."""
        out = [("out", x.shape, "bf16")]
        return self._call("rope", (x, positions, table), out, {"first": first})[0]

    def swiglu(self, x: Tensor) -> Tensor:
        """``silu(x[:, :I]) * x[:, I:]``."""
        columns = x.shape[-1]
        self._need(isinstance(columns, int) and columns % 2 == 0, "swiglu", "2I columns needed", x)
        assert isinstance(columns, int)
        return self._call("swiglu", (x,), [("out", (*x.shape[:-1], columns // 2), "bf16")])[0]

    def fold(self, gate: Tensor, scales: Tensor, factor: float) -> Tensor:
        """FP32 ``gate * scales * factor``: a head's weight takes the scale of its query."""
        return self._call(
            "fold", (gate, scales), [("out", gate.shape, "fp32")], {"factor": factor}
        )[0]

    def _write(self, kind: str, cache: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        self._need(
            cache.kind == "cache" or cache.storage != cache.name, kind, "a cache first", cache
        )
        (made,) = self._call(kind, (cache, *inputs), [("cache", cache.shape, cache.dtype)])
        written = replace(made, storage=cache.storage)
        self.tensors[made.name] = written
        return written

    def write_latent(self, cache: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> Tensor:
        """Writes e4m3 latent, scales and BF16 rotary key of every token into its slot."""
        return self._write("write_latent", cache, (slots, latent, rope))

    def write_index(self, cache: Tensor, slots: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Writes codes and scale of every token's index key into its slot of the paged cache."""
        return self._write("write_index", cache, (slots, codes, scales))

    def paged_logits(
        self, codes: Tensor, weights: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor
    ) -> Tensor:
        """FP32 [M, keys] ``sum_h weights * relu(q_h . k)`` against the paged index cache."""
        inputs = (codes, weights, cache, block_table, lengths)
        return self._call("paged_logits", inputs, [("out", (codes.shape[0], "?"), "fp32")])[0]
