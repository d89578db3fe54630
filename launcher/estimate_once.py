"""What it could save to send a token to each rank once, however many of its experts are there.

Two ideas that the kernel does not have, by the model of ``estimate_layer``: *pulled once*, a row
crosses the link once for each rank that wants it; *summed first*, a rank also sends back one sum
for each token instead of a row for each of its experts (which rounds in another order, so results
would not have the bits they have). What finding repeats, copying rows within a rank and summing
there would cost is left out: these are upper bounds. Routes are uniform.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from launcher.estimate_layer import FITTED, Coefficients, predict_load
from launcher.estimates import H200, Machine, load, row_bytes
from megamoe.spec import MoESpec

__all__ = ["FORMULA", "SOURCE", "Once", "distinct_ranks", "once_cells", "once_per_rank"]

FORMULA: Final = "ranks per token = R·(1 - C(E - E/R, K) / C(E, K))"
SOURCE: Final = (
    "linearity of expectation over ranks: K different experts drawn uniformly of E all miss one "
    "rank's E/R with the hypergeometric probability C(E - E/R, K) / C(E, K)"
)


def distinct_ranks(spec: MoESpec, ranks: int) -> float:
    """Ranks that hold a routed expert of a token, on average: 1..min(R, K).

    Raises:
        SpecError: R does not divide the experts.
    """
    experts, topk = spec.num_experts, spec.topk
    missed = math.comb(experts - spec.experts_per_rank(ranks), topk) / math.comb(experts, topk)
    return ranks * (1 - missed)


@dataclass(frozen=True, kw_only=True)
class Once:
    """The model of a call, plain and with each idea.

    Attributes:
        ranks: R.
        tokens: T per rank.
        distinct: ranks that a token goes to; with one expert on each they would be K.
        link_bytes: over a rank's link each way, as the kernel does it.
        pulled_once_bytes, summed_first_bytes: with the first idea, with both.
        total_us: of a call, as the kernel does it.
        pulled_once_us, summed_first_us: with the first idea, with both.
    """

    ranks: int
    tokens: int
    distinct: float
    link_bytes: float
    pulled_once_bytes: float
    summed_first_bytes: float
    total_us: float
    pulled_once_us: float
    summed_first_us: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {name: round(value, 3) for name, value in asdict(self).items()}

    def bytes_saved(self) -> str:
        """Change of the link's bytes with the first idea, and with both."""
        return _changes(self.link_bytes, self.pulled_once_bytes, self.summed_first_bytes)

    def time_saved(self) -> str:
        """The same of a call's time."""
        return _changes(self.total_us, self.pulled_once_us, self.summed_first_us)


def _changes(plain: float, *others: float) -> str:
    return " / ".join(f"{v / plain - 1:+.1%}" if plain else "–" for v in others)


def once_cells(once: Mapping[int, Mapping[int, Once]]) -> Iterator[list[str]]:
    """Rows of a table with a column for each R of ``once[R][T]``."""
    first = [next(iter(of_size.values())) for of_size in once.values()]
    yield ["ranks per token", *(f"{o.distinct:.2f}" for o in first)]
    yield ["link bytes", *(o.bytes_saved() for o in first)]
    for t in next(iter(once.values())):
        yield [f"time, {t} tokens", *(of_size[t].time_saved() for of_size in once.values())]


def once_per_rank(
    spec: MoESpec,
    ranks: int,
    tokens: int,
    machine: Machine = H200,
    with_: Coefficients = FITTED,
) -> Once:
    """Bytes over the link and time of a call, plain and with rows sent once to each rank.

    Raises:
        SpecError: R does not divide the experts, or a number is out of its range.
    """
    plain = load(spec, ranks, tokens)
    distinct = distinct_ranks(spec, ranks)
    # Of every R - 1 others' tokens this rank gets the part that names one of its experts.
    away = tokens * distinct * (ranks - 1) / ranks
    routed_away = tokens * spec.topk * (ranks - 1) / ranks
    row, back = row_bytes(spec, spec.hidden), 2.0 * spec.hidden
    pulled = replace(plain, link_bytes=away * row + routed_away * back)
    # The own tokens' slots: one for each rank.
    summed = replace(
        plain,
        link_bytes=away * (row + back),
        slot_bytes=(distinct + 1) * back * tokens,
    )
    times = [predict_load(work, machine, with_).total_us for work in (plain, pulled, summed)]
    return Once(
        ranks=ranks,
        tokens=tokens,
        distinct=distinct,
        link_bytes=plain.link_bytes,
        pulled_once_bytes=pulled.link_bytes,
        summed_first_bytes=summed.link_bytes,
        total_us=times[0],
        pulled_once_us=times[1],
        summed_first_us=times[2],
    )
