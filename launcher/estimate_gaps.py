"""How much of a decode step lies between its kernels: a list of kernels, a gap, a bandwidth.

Every kernel of a decode step is taken to be bound by memory, so its time is its bytes over the
bandwidth; each boundary adds a gap, and without a graph the host must launch every kernel.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from launcher.results import read_json
from megamoe.errors import SpecError

__all__ = [
    "DECODERS",
    "WAYS",
    "Decoder",
    "GapEstimate",
    "KernelWork",
    "Way",
    "decode_kernels",
    "gap_estimate",
    "read_kernels",
]


@dataclass(frozen=True)
class Way:
    """One way to launch kernels one after another.

    Attributes:
        name: of the way.
        gap_us: between two kernels on the GPU.
        launch_us: host time of a launch; 0 in a graph.
        source: of both.
    """

    name: str
    gap_us: float
    launch_us: float
    source: str


_MOST: Final = 1e18
_HERE: Final = "benchmarks/results/pdl_chain_h200.json"
_MPK: Final = "MPK paper (Cheng et al.), launches of Qwen3-8B: eager 3.8 µs, CUDA graph 0.8 µs"

WAYS: Final = (
    Way("eager", 1.73, 4.3, _HERE),
    Way("eager + PDL", 0.64, 4.1, _HERE),
    Way("graph", 1.09, 0.0, _HERE),
    Way("graph + PDL", 0.74, 0.0, _HERE),
    Way("graph + PDL at once", 0.42, 0.0, _HERE),
    Way("eager (published)", 0.8, 3.8, _MPK),
    Way("graph (published)", 0.8, 0.0, _MPK),
)
"""Ours: one H200, a chain of 200 kernels of 16384 floats (``megamoe bench pdl-chain``), launched
through cuda-python. PDL lets the next kernel in after the stores, or first of all."""


@dataclass(frozen=True)
class KernelWork:
    """One kernel of a step: its bytes, or its own time where that is known.

    Attributes:
        name: of the kernel.
        nbytes: read and written.
        us: time without what lies between kernels; then ``nbytes`` is not used.
        count: how often it runs in a step.
    """

    name: str
    nbytes: float = 0.0
    us: float | None = None
    count: int = 1


@dataclass(frozen=True)
class Decoder:
    """A dense decoder, as its configuration has it."""

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


DECODERS: Final = {
    "qwen3-0.6b": Decoder(1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-8b": Decoder(4096, 12288, 36, 32, 8, 128, 151936),
}


def decode_kernels(model: Decoder, batch: int, context: int, element: int = 2) -> list[KernelWork]:
    """Kernels of a decode step, fused as in serving engines.

    Residual and RMSNorm are one kernel, so are QK-norm and RoPE.

    Args:
        model: the decoder.
        batch: sequences, one new token each.
        context: keys per sequence.
        element: bytes of a weight and of an activation.
    """
    h, inter = model.hidden, model.inter
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    row = batch * element
    of_layer = {
        "qkv_proj": h * (q + 2 * kv) * element,
        "qk_norm_rope": 2 * row * (q + kv),
        "kv_cache_write": 2 * row * kv,
        "attention": 2 * row * context * kv,
        "o_proj": q * h * element,
        "gate_up_proj": 2 * h * inter * element,
        "silu_mul": 3 * row * inter,
        "down_proj": inter * h * element,
    }
    return [
        KernelWork("add_rmsnorm", 4 * row * h, count=2 * model.layers),
        *(KernelWork(name, nbytes, count=model.layers) for name, nbytes in of_layer.items()),
        KernelWork("final_norm", 2 * row * h),
        KernelWork("lm_head", h * model.vocab * element),
        KernelWork("sample", batch * model.vocab * 4),
    ]


def read_kernels(path: Path) -> list[KernelWork]:
    """A list of kernels from JSON (a list of objects) or CSV (a header and a line per kernel).

    Keys: ``name``, then ``bytes`` or ``us``, and ``count`` if it is not 1.

    Raises:
        SpecError: what is not such a list; the message names the entry.
    """
    if path.suffix == ".json":
        entries = read_json(path)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise SpecError(f"{path} is no CSV file: {e}") from None
        entries = list(csv.DictReader(text.splitlines()))
    if isinstance(entries, dict):
        entries = entries.get("kernels")
    if not isinstance(entries, list) or not entries:
        raise SpecError(f"{path}: holds no kernels; write [{{name, bytes or us, count}}, …]")
    return [_entry(path, i, entry) for i, entry in enumerate(entries)]


def _entry(path: Path, i: int, entry: Any) -> KernelWork:
    where = f"{path}: kernel {i}"
    if not isinstance(entry, dict) or None in entry:  # a line longer than its header
        raise SpecError(f"{where} is {entry!r}: must be an object with name, bytes or us, count")
    given = {k: v for k, v in entry.items() if v not in (None, "")}
    try:
        count = int(str(given.get("count", 1)))
        nbytes, us = float(given.get("bytes", 0)), given.get("us")
        own = None if us is None else float(us)
    except (TypeError, ValueError, OverflowError) as e:
        raise SpecError(f"{where} is {entry!r}: {e}") from e
    if ("bytes" in given) == ("us" in given) or not (
        1 <= count <= _MOST and 0 <= nbytes <= _MOST and 0 <= (own or 0) <= _MOST
    ):
        raise SpecError(
            f"{where} is {entry!r}: needs either bytes or us, not negative, and a count from 1, "
            "numbers of at most 1e18"
        )
    return KernelWork(str(given.get("name", f"kernel {i}")), nbytes, own, count)


@dataclass(frozen=True)
class GapEstimate:
    """A step, modelled.

    Attributes:
        way: how it is launched.
        kernels: in the step.
        data_us: time of all kernels by themselves.
        gaps_us: what the boundaries add on the GPU.
        host_us: host time of all launches.
        total_us: of the step.
        share: of the step that is not the kernels' own time.
        bound: ``"host"`` where launching takes longer than the GPU does, else ``"gpu"``.
        source: of gap and launch time.
    """

    way: str
    kernels: int
    data_us: float
    gaps_us: float
    host_us: float
    total_us: float
    share: float
    bound: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def own_time_us(kernel: KernelWork, bandwidth: float) -> float:
    """Its given time, or bytes over bandwidth (bytes/s)."""
    return kernel.nbytes / bandwidth * 1e6 if kernel.us is None else kernel.us


def gap_estimate(kernels: Sequence[KernelWork], bandwidth: float, way: Way) -> GapEstimate:
    """``total = max(sum of own times + n·gap, n·launch)``.

    Args:
        kernels: of the step.
        bandwidth: bytes/s that a kernel of this kind reaches.
        way: how they are launched.
    """
    if bandwidth <= 0:
        raise SpecError(f"bandwidth = {bandwidth}: must be positive")
    count = sum(k.count for k in kernels)
    data = sum(k.count * own_time_us(k, bandwidth) for k in kernels)
    gaps, host = count * way.gap_us, count * way.launch_us
    total = max(data + gaps, host)
    return GapEstimate(
        way=way.name,
        kernels=count,
        data_us=data,
        gaps_us=gaps,
        host_us=host,
        total_us=total,
        share=1 - data / total if total else 0.0,
        bound="host" if host > data + gaps else "gpu",
        source=way.source,
    )
