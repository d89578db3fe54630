"""Modelled time of an MoE layer for any EP size and machine, and its error on measured rows.

A sum of phases: what was measured inside the kernel, and tiles whose arithmetic, weights and link
traffic overlap imperfectly. Four coefficients are fitted to measured rows. A model is not a
measurement: ``moe_error`` says how far it is from the rows that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from launcher.estimates import H200, Figure, Load, Machine, load, roofline
from megamoe.errors import SpecError
from megamoe.spec import MODELS, MoESpec

__all__ = ["FITTED", "Coefficients", "Prediction", "fit", "moe_error", "predict", "predict_load"]


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """What the model of a layer's time takes from measured rows.

    Attributes:
        flops: fraction of the machine's FLOP/s that padded tiles reach.
        read: fraction of its read rate that weights reach.
        link: fraction of its link rate; ``fit`` holds it at 1.
        sharpness: p of (a^p + b^p + c^p)^(1/p): infinite if the three overlap perfectly, 1 if they
            follow each other.
        fixed_us: launches, barriers, memory latencies, first rows, last tiles.
    """

    flops: float
    read: float
    link: float
    sharpness: float
    fixed_us: float


FITTED: Final = Coefficients(flops=0.92, read=0.94, link=1.0, sharpness=2.5, fixed_us=10.0)
"""``fit`` of benchmarks/results/moe_h200x1.json, moe_h200x2.json and moe_h200x4.json: 48 uniform
rows of v4-flash, deepseek-v3 and v4-pro with 8 to 8192 tokens per rank."""

_PHASES: Final = "phases inside the kernel on one H200, docs/performance.md"


@dataclass(frozen=True)
class Prediction:
    """Modelled time of a call; ``phases`` add up to ``total_us``."""

    total_us: float
    floor_us: float
    phases: list[Figure]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "total_us": round(self.total_us, 1),
            "floor_us": round(self.floor_us, 1),
            "fraction_of_floor": round(self.floor_us / self.total_us, 3),
            "phases": [p.to_dict() for p in self.phases],
        }


def predict(
    spec: MoESpec,
    ranks: int,
    tokens: int,
    machine: Machine = H200,
    with_: Coefficients = FITTED,
    imbalance: float = 1.0,
) -> Prediction:
    """Time of one call, staging included, on the busiest rank."""
    return predict_load(load(spec, ranks, tokens, imbalance), machine, with_)


def predict_load(work: Load, machine: Machine = H200, with_: Coefficients = FITTED) -> Prediction:
    """The same for what a rank has to do."""
    p = with_.sharpness
    parts = (
        work.padded_flops / (machine.flops * with_.flops),
        work.weight_bytes / (machine.read * with_.read),
        work.link_bytes / (machine.link * with_.link),
    )
    longest = max(parts)
    tiles = longest * sum((part / longest) ** p for part in parts) ** (1 / p) * 1e6
    phases = [
        Figure(
            "staging",
            4.0 + work.stage_bytes / machine.copy * 1e6,
            "µs",
            "4 µs + 2·T·row / copy rate",
            _PHASES,
        ),
        Figure("routes", 2.0 + 26.0 * work.routes / 65536, "µs", "2 µs + 26 µs per 65536", _PHASES),
        Figure(
            "counts",
            machine.flag_us if work.ranks > 1 else 0.0,
            "µs",
            "one flag round trip where R > 1",
            machine.source,
        ),
        Figure("fixed", with_.fixed_us, "µs", "fitted constant", "fit to measured rows"),
        Figure(
            "tiles",
            tiles,
            "µs",
            "(arithmetic^p + weights^p + link^p)^(1/p), each at its fitted fraction of its "
            f"ceiling, p = {p}",
            "fit to measured rows",
        ),
        Figure(
            "combine",
            5.0 + work.slot_bytes / machine.copy * 1e6,
            "µs",
            "5 µs + (K+1)·2·H·T / copy rate",
            _PHASES,
        ),
    ]
    floor = next(f.value for f in roofline(work, machine) if f.name == "floor")
    return Prediction(sum(f.value for f in phases), floor, phases)


def _measured(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], MoESpec]]:
    """Uniform rows that have a time, with their layer.

    Raises:
        SpecError: one of them is not of a published layer, or a number is none; names it.
    """
    found = []
    for i, row in enumerate(rows):
        us, tokens, model = row.get("total_us"), row.get("tokens"), str(row.get("model"))
        if us is None or row.get("routing") != "uniform" or type(tokens) is not int:
            continue
        numbers = {"ranks": row.get("ranks"), "experts": row.get("experts", 1)}
        wrong = [f"{n} {v!r}" for n, v in numbers.items() if type(v) is not int or v < 1]
        if type(us) not in (int, float) or not 0 < us < math.inf:
            wrong.append(f"total_us {us!r}")
        if model not in MODELS:
            wrong.append(f"model {model!r} (published: {', '.join(MODELS)})")
        if wrong:
            raise SpecError(f"row {i} of the results has {', '.join(wrong)}: cannot be modelled")
        spec = replace(MODELS[model], num_shared=0)
        found.append((row, replace(spec, num_experts=row.get("experts", spec.num_experts))))
    return found


def moe_error(
    rows: Iterable[Mapping[str, Any]], machine: Machine = H200, with_: Coefficients = FITTED
) -> list[dict[str, Any]]:
    """The model beside measured rows of a result file; ``error`` is positive where it is slow."""
    found = []
    for row, spec in _measured(rows):
        us = predict(spec, row["ranks"], row["tokens"], machine, with_).total_us
        found.append(
            {
                "model": row["model"],
                "ranks": row["ranks"],
                "experts": spec.num_experts,
                "tokens": row["tokens"],
                "measured_us": row["total_us"],
                "model_us": round(us, 1),
                "error": round(us / row["total_us"] - 1, 4),
            }
        )
    return found


def fit(rows: Sequence[Mapping[str, Any]], machine: Machine = H200) -> Coefficients:
    """Coefficients with the least mean square of relative errors, on a grid of round numbers.

    Raises:
        SpecError: fewer than six usable rows: four coefficients would fit anything.
    """
    if len(_measured(rows)) < 6:
        raise SpecError(
            f"{len(_measured(rows))} uniform rows with a time: a fit needs at least 6; "
            "give a result file of `megamoe bench moe` on GPUs"
        )
    best: tuple[float, Coefficients] | None = None
    for p in (1.5, 2.0, 2.5, 3.0, 4.0, 6.0):
        for flops in (0.80, 0.84, 0.88, 0.92, 0.96):
            for read in (0.86, 0.90, 0.94, 0.98):
                for fixed in (10.0, 20.0, 30.0, 40.0, 50.0):
                    tried = Coefficients(
                        flops=flops, read=read, link=1.0, sharpness=p, fixed_us=fixed
                    )
                    square = sum(e["error"] ** 2 for e in moe_error(rows, machine, tried))
                    if best is None or square < best[0]:
                        best = (square, tried)
    assert best is not None
    return best[1]
