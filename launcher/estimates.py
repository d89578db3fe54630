"""What a call must do, and what that takes at least: load, overlap bound, roofline.

Pure functions over published or measured constants. Every result carries its formula and where it
comes from. ``estimate_layer`` makes a time of a call from these.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final

from megamoe.errors import SpecError
from megamoe.spec import GROUP, MAX_RANKS, MoESpec

__all__ = [
    "H200",
    "Figure",
    "Load",
    "Machine",
    "load",
    "overlap",
    "padded_rows",
    "roofline",
    "row_bytes",
]


@dataclass(frozen=True)
class Figure:
    """A number with its unit, its formula and the source of the formula or of its constants."""

    name: str
    value: float
    unit: str
    formula: str
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one GPU of an NVLink domain.

    Attributes:
        name: of the GPU.
        flops: FLOP/s of FP8 grouped GEMMs with block scales.
        read: bytes/s read from memory.
        copy: bytes/s of a copy, read and written counted.
        link: bytes/s that a GPU takes in (and sends out) over its links at the same time.
        flag_us: a flag to another GPU and its answer.
        source: of these rates.
    """

    name: str
    flops: float
    read: float
    copy: float
    link: float
    flag_us: float
    source: str

    def __post_init__(self) -> None:
        for field in ("flops", "read", "copy", "link"):
            if not 1 <= getattr(self, field) <= 1e24:
                raise SpecError(
                    f"{field} = {getattr(self, field)} a second: a rate must be positive, "
                    "at most 1e24"
                )


H200: Final = Machine(
    name="H200",
    flops=1250e12,
    read=4.70e12,
    copy=4.27e12,
    link=335e9,
    flag_us=2.4,
    source="measured on H200s with NVLink 4 (18 links): FP8 grouped GEMM with promotion 1250 "
    "TFLOPS, bulk reads 4.70 TB/s, copy 4.27 TB/s, pulls by all GPUs at once 335 GB/s each way, "
    "flag round trip 2.4 µs",
)

# ---------------------------------------------------------------- what a call must do

_BOXES: Final = (8, 16, 32, 48, 64, 80, 96)
_BLOCK: Final = 128


def padded_rows(rows: int) -> int:
    """Rows that the tensor cores multiply for an expert with ``rows`` rows (csrc/moe, boxes)."""
    rest = rows % _BLOCK
    box = next((b for b in _BOXES if rest <= b), _BLOCK) if rest else 0
    return rows - rest + box


def _mean_padded(mean: float) -> float:
    """Mean of ``padded_rows`` over Poisson-distributed rows."""
    spread = 8 * math.sqrt(mean) + 12
    low, high = max(0, int(mean - spread)), int(mean + spread)
    return sum(
        padded_rows(k) * math.exp(k * math.log(mean) - mean - math.lgamma(k + 1))
        for k in range(low, high + 1)
    )


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one rank of a call does, uniform routing, on average.

    Attributes:
        tokens: T, tokens of the rank.
        ranks: R.
        rows: routed rows that the rank's experts receive.
        rows_per_expert: the same per local expert.
        flops: 6·rows·H·I.
        padded_flops: with the rows that tiles are filled up with.
        active_experts: local experts with at least one row.
        weight_bytes: of those.
        link_bytes: bytes over the link each way: rows received (dispatch) and results of the
            rank's own tokens (combine), remote ones only.
        slot_bytes: combine slots read and y written.
        stage_bytes: tokens read and written into the window.
        routes: T·K.
    """

    tokens: int
    ranks: int
    rows: float
    rows_per_expert: float
    flops: float
    padded_flops: float
    active_experts: float
    weight_bytes: float
    link_bytes: float
    slot_bytes: float
    stage_bytes: float
    routes: int


def row_bytes(spec: MoESpec, columns: int) -> float:
    """Bytes of a row of activations: e4m3 with FP32 scales per 128 columns, or BF16."""
    return columns * (1 + 4 / GROUP) if spec.weight_dtype == "fp8" else 2 * columns


@cache
def load(spec: MoESpec, ranks: int, tokens: int, imbalance: float = 1.0) -> Load:
    """Work and bytes of a rank.

    Args:
        spec: the layer; shared experts are left out, as in every benchmark.
        ranks: R.
        tokens: T per rank.
        imbalance: rows of the busiest rank over the mean.

    Raises:
        SpecError: R does not divide the experts, or a number is out of its range.
    """
    local = spec.experts_per_rank(ranks)
    if tokens < 1:
        raise SpecError(f"tokens = {tokens}: must be at least 1")
    if not 1.0 <= imbalance <= ranks:
        raise SpecError(f"imbalance = {imbalance}: max/mean over {ranks} ranks is in 1..{ranks}")
    h, i = spec.hidden, spec.inter
    rows = tokens * spec.topk * imbalance
    active = local * (1 - (1 - spec.topk / spec.num_experts) ** (ranks * tokens))
    weight = 3 * h * i * (1 + 4 / GROUP**2 if spec.weight_dtype == "fp8" else 2)
    remote = (ranks - 1) / ranks
    padded = local * _mean_padded(rows / local)
    return Load(
        tokens=tokens,
        ranks=ranks,
        rows=rows,
        rows_per_expert=rows / local,
        flops=6 * rows * h * i,
        padded_flops=6 * padded * h * i,
        active_experts=active,
        weight_bytes=active * weight,
        # In: rows pulled, and slots of the own tokens; out: the mirror image.
        link_bytes=remote
        * max(
            rows * row_bytes(spec, h) + tokens * spec.topk * 2 * h,
            tokens * spec.topk * row_bytes(spec, h) + rows * 2 * h,
        ),
        slot_bytes=(spec.topk + 1) * 2 * h * tokens,
        stage_bytes=2 * tokens * row_bytes(spec, h),
        routes=tokens * spec.topk,
    )


# ---------------------------------------------------------------- overlap bound

_OVERLAP_SOURCE: Final = (
    "DeepSeek-V4 report: communication hides when C/B <= V_comp/V_comm; for V4-Pro 6hd FLOPs and "
    "3h bytes per token and expert, so C/B <= 2d = 6144 FLOP/B"
)


def overlap(spec: MoESpec, ranks: int, machine: Machine) -> list[Figure]:
    """Whether the link can be hidden behind arithmetic, many tokens per expert assumed.

    Raises:
        SpecError: ``ranks`` is out of its range. It need not divide the experts.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise SpecError(f"ranks = {ranks}: must be in 1..{MAX_RANKS}")
    h, i = spec.hidden, spec.inter
    comp, comm = 6.0 * h * i, row_bytes(spec, h) + 2 * h
    remote = (ranks - 1) / ranks
    balance = machine.flops / machine.link
    plain = comp / (3 * h)
    bound = math.inf if ranks == 1 else comp / (comm * remote)
    return [
        Figure("V_comp", comp, "FLOP", "6·H·I per token and expert", _OVERLAP_SOURCE),
        Figure(
            "V_comm",
            comm * remote,
            "B",
            "(row + scales in, BF16 row out)·(R-1)/R per token and expert",
            "this layer's window; uniform routing leaves 1/R of the rows at home",
        ),
        Figure("C/B", balance, "FLOP/B", "FLOP/s over link bytes/s", machine.source),
        Figure("published bound", plain, "FLOP/B", "6·H·I / 3·H = 2·I", _OVERLAP_SOURCE),
        Figure("bound here", bound, "FLOP/B", "V_comp / V_comm", _OVERLAP_SOURCE),
        Figure(
            "hidden",
            min(1.0, bound / balance),
            "of the link time",
            "min(1, bound / (C/B)); 1: wholly hidden by arithmetic",
            _OVERLAP_SOURCE,
        ),
        Figure(
            "link needed",
            0.0 if ranks == 1 else machine.flops / bound / 1e9,
            "GB/s",
            "C / bound: from here on arithmetic is the longer of the two",
            _OVERLAP_SOURCE,
        ),
    ]


# ---------------------------------------------------------------- roofline

_FLOOR_SOURCE: Final = "the floor of benchmarks/results: the longest of three, each at its ceiling"


def roofline(work: Load, machine: Machine) -> list[Figure]:
    """Three lower bounds of a call in µs, the largest of them, and what it means."""
    times = {
        "arithmetic": (work.flops / machine.flops, "6·rows·H·I / FLOP/s"),
        "weights": (work.weight_bytes / machine.read, "active experts' bytes / read rate"),
        "link": (work.link_bytes / machine.link, "remote bytes each way / link rate"),
    }
    figures = [
        Figure(name, seconds * 1e6, "µs", formula, machine.source)
        for name, (seconds, formula) in times.items()
    ]
    floor = max(seconds for seconds, _ in times.values())
    tokens = machine.flops / machine.read * work.weight_bytes / max(work.flops / work.tokens, 1e-9)
    return [
        *figures,
        Figure("floor", floor * 1e6, "µs", "max(arithmetic, weights, link)", _FLOOR_SOURCE),
        Figure(
            "intensity",
            work.flops / work.weight_bytes,
            "FLOP/B",
            "routed FLOPs / active weight bytes",
            "roofline model (Williams et al., 2009)",
        ),
        Figure(
            "ridge",
            machine.flops / machine.read,
            "FLOP/B",
            "FLOP/s / read rate",
            "roofline model (Williams et al., 2009)",
        ),
        Figure(
            "ridge tokens",
            tokens,
            "per rank",
            "tokens at which arithmetic takes as long as reading these weights",
            "from the two above",
        ),
    ]
