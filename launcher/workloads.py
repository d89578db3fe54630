"""Routing distributions and token counts for demos, stress runs and benchmarks, all seeded.

A routing is written as text: one base distribution, then any modifiers, joined by ``+``; a number
after ``:`` is its parameter. ``zipf:1.2+masked:0.25`` is Zipf popularity with a quarter of the
routes masked. Every rank computes its own routes from (routing, spec, R, rank, T, seed); what ranks
must agree on (which experts are popular) depends on the seed alone.

Shape legend: T tokens of a rank, K routes per token, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from megamoe.errors import SpecError
from megamoe.spec import MoESpec

__all__ = [
    "BASES",
    "MODIFIERS",
    "TOKEN_PATTERNS",
    "Routing",
    "Skew",
    "parse_routing",
    "random_activations",
    "route",
    "skew",
    "tokens_per_rank",
]

BASES: Final[dict[str, float | None]] = {
    "uniform": None,
    "zipf": 1.01,
    "lognormal": 1.0,
    "hot_expert": 0.5,
    "hot_rank": 0.5,
    "hot_experts": 0.5,
    "all_to_one": None,
    "one_expert": None,
    "local": None,
    "remote": None,
    "empty_rank": None,
    "replay": None,
}
"""Base distributions and the default of their parameter (None: they take none; replay: a file).

``zipf`` is popularity 1/i**alpha and ``lognormal`` exp(sigma * N(0,1)), experts in a random order
that the seed fixes. ``hot_expert`` sends the first route of that fraction of tokens to one expert,
``hot_rank`` all routes of that fraction to one rank, ``hot_experts`` to experts 0..K-1.
``all_to_one`` sends every route to rank 0, ``one_expert`` one route per token to expert 0 (the
others masked). ``local`` and ``remote`` keep to the token's own rank, or to the others;
``empty_rank`` leaves the last rank without routes.
``replay`` reads recorded ids [N, K], or a recorded load per expert [E] as popularity.
"""

MODIFIERS: Final[dict[str, float]] = {"masked": 0.25, "duplicates": 0.5}
"""``masked``: share of routes set to -1. ``duplicates``: share of tokens whose later routes repeat
earlier ones of the same token."""

TOKEN_PATTERNS: Final = ("equal", "ramp", "random", "empty", "single")
"""``equal`` T everywhere; ``ramp`` 0 on rank 0 up to T on the last; ``random`` in 0..T; ``empty``
T everywhere but on the last rank; ``single`` T on rank 0, none elsewhere."""


@dataclass(frozen=True)
class Routing:
    """A parsed routing.

    Attributes:
        base: a key of BASES.
        parameter: of the base, or None.
        path: file of ``replay``, else None.
        masked: share of routes masked.
        duplicates: share of tokens with duplicate ids.
    """

    base: str = "uniform"
    parameter: float | None = None
    path: str | None = None
    masked: float = 0.0
    duplicates: float = 0.0


def parse_routing(text: str) -> Routing:
    """Reads a routing as written on a command line.

    Raises:
        SpecError: an unknown name, a parameter out of its range, or a part that another would
            override.
    """
    base, parameter, path = None, None, None
    shares: dict[str, float] = {}
    for part in text.split("+"):
        name, colon, value = part.partition(":")
        if name in MODIFIERS:
            if name in shares:
                raise SpecError(f"routing {text!r}: {name} is given twice: keep one of them")
            shares[name] = _number(text, part, MODIFIERS[name], most=1.0)
        elif name in BASES:
            if base is not None:
                raise SpecError(
                    f"routing {text!r}: {base} and {name} are two bases, and a routing has one: "
                    f"keep one of them; only {' and '.join(MODIFIERS)} go with it"
                )
            base, default = name, BASES[name]
            if name == "replay":
                path = value
                if not value:
                    raise SpecError(
                        f"routing {text!r}: write replay:FILE (ids [N, K] or loads [E])"
                    )
            elif default is not None:
                most = 1.0 if name.startswith("hot") else 10.0
                parameter = _number(text, part, default, most=most)
            elif colon:
                raise SpecError(f"routing {text!r}: {name} takes no parameter")
        else:
            raise SpecError(
                f"routing {text!r}: {name!r} is not one base of {', '.join(BASES)}, "
                f"nor a modifier of {', '.join(MODIFIERS)}"
            )
    masked, duplicates = shares.get("masked", 0.0), shares.get("duplicates", 0.0)
    return Routing(base or "uniform", parameter, path, masked, duplicates)


def _number(text: str, part: str, default: float, most: float) -> float:
    """What follows the colon; the default where there is no colon."""
    _, colon, value = part.partition(":")
    try:
        number = float(value) if colon else default
    except ValueError:
        number = -1.0
    if not 0 <= number <= most:
        raise SpecError(f"routing {text!r}: the parameter of {part!r} must be in 0..{most:g}")
    return number


def _generator(*parts: int) -> torch.Generator:
    """A generator that depends on every part."""
    seed = 0
    for part in parts:
        seed = (seed * 6_364_136_223_846_793_005 + part + 1_442_695_040_888_963_407) % (1 << 63)
    return torch.Generator().manual_seed(seed)


def _draw(log_popularity: Tensor, tokens: int, topk: int, generator: torch.Generator) -> Tensor:
    """[T, K] distinct experts by popularity (Gumbel top-k); experts at -inf are never drawn.

    With fewer than K experts to draw from, a token's routes repeat them.
    """
    allowed = int((log_popularity > -torch.inf).sum())
    uniform = torch.rand(tokens, log_popularity.shape[0], generator=generator)
    gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))
    picks = torch.topk(log_popularity + gumbel, min(topk, allowed), dim=-1).indices
    return picks[:, torch.arange(topk) % picks.shape[1]]


def _read_recording(path: str, spec: MoESpec) -> Tensor:
    """Ids [N, K] or loads [E] of a ``.safetensors`` (``topk_idx`` or ``load``) or ``.pt`` file."""
    file = Path(path)
    if not file.is_file():
        raise SpecError(f"replay: no file {path}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(file)
            found = tensors.get("topk_idx", tensors.get("load"))
        else:
            found = torch.load(file, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # both readers raise many kinds
        kind = "safetensors" if file.suffix == ".safetensors" else "torch.save"
        raise SpecError(f"replay: {path} is no file of {kind} that can be read") from error
    if not isinstance(found, Tensor):
        raise SpecError(f"replay: {path} holds neither topk_idx [N, K] nor load [E]")
    if found.dim() == 1 and found.shape[0] == spec.num_experts:
        return found
    if found.dim() == 2 and found.shape[1] == spec.topk and found.shape[0] > 0:
        if int(found.max()) < spec.num_experts and int(found.min()) >= -1:
            return found.long()
        raise SpecError(f"replay: {path} names experts beyond {spec.num_experts - 1}")
    raise SpecError(
        f"replay: {path} has shape {tuple(found.shape)}: want ids [N, {spec.topk}] or "
        f"loads [{spec.num_experts}]"
    )


def _log_popularity(routing: Routing, spec: MoESpec, seed: int) -> Tensor:
    """[E], equal on every rank."""
    experts = spec.num_experts
    shared = _generator(seed, -1)
    if routing.base == "zipf":
        ranks = torch.arange(1, experts + 1).float()
        assert routing.parameter is not None
        return (-routing.parameter * ranks.log())[torch.randperm(experts, generator=shared)]
    if routing.base == "lognormal":
        assert routing.parameter is not None
        return routing.parameter * torch.randn(experts, generator=shared)
    return torch.zeros(experts)


def _only(spec: MoESpec, num_ranks: int, allowed: Callable[[int], bool], base: str) -> Tensor:
    """Log popularity [E]: uniform over the experts of the ranks that ``allowed`` accepts."""
    ranks = torch.tensor([allowed(r) for r in range(num_ranks)])
    if not ranks.any():
        raise SpecError(f"routing {base!r} needs at least 2 ranks: {num_ranks} given")
    mask = ranks.repeat_interleave(spec.experts_per_rank(num_ranks))
    return torch.where(mask, 0.0, -torch.inf)


def _base_ids(
    routing: Routing, spec: MoESpec, num_ranks: int, rank: int, tokens: int, seed: int
) -> Tensor:
    generator = _generator(seed, rank)
    restricted: dict[str, Callable[[int], bool]] = {
        "all_to_one": lambda r: r == 0,
        "local": lambda r: r == rank,
        "remote": lambda r: r != rank,
        "empty_rank": lambda r: r != num_ranks - 1,
    }
    base = routing.base
    if base in restricted:
        log_popularity = _only(spec, num_ranks, restricted[base], base)
        return _draw(log_popularity, tokens, spec.topk, generator)
    if base == "replay":
        assert routing.path is not None
        recorded = _read_recording(routing.path, spec)
        if recorded.dim() == 2:
            return recorded[(rank * tokens + torch.arange(tokens)) % recorded.shape[0]]
        return _draw(recorded.double().log().float(), tokens, spec.topk, generator)

    ids = _draw(_log_popularity(routing, spec, seed), tokens, spec.topk, generator)
    if base in ("hot_expert", "hot_rank", "hot_experts"):
        assert routing.parameter is not None
        hot = torch.rand(tokens, generator=generator) < routing.parameter
        if base == "hot_rank":
            first = _only(spec, num_ranks, lambda r: r == 0, base)
            ids[hot] = _draw(first, tokens, spec.topk, generator)[hot]
        elif base == "hot_experts":
            ids[hot] = torch.arange(spec.topk)
        else:
            expert = seed % spec.num_experts
            # Swap, so that a token that had the hot expert elsewhere keeps distinct ids.
            ids[hot] = torch.where(ids[hot] == expert, ids[hot][:, :1], ids[hot])
            ids[hot, 0] = expert
    elif base == "one_expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = 0
    return ids


def route(
    routing: Routing | str, spec: MoESpec, num_ranks: int, rank: int, tokens: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The routes of one rank's tokens.

    Args:
        routing: text (see the module) or a parsed Routing.
        spec: the layer.
        num_ranks: R.
        rank: the tokens' rank.
        tokens: T of this rank; may be 0.
        seed: equal on every rank.

    Returns:
        topk_idx int64 [T, K] with -1 for masked routes, and topk_weight FP32 [T, K], a softmax over
        the row (masked routes keep a weight, which the layer must not use).

    Raises:
        SpecError: an unknown routing, or one that R ranks cannot show.
    """
    parsed = parse_routing(routing) if isinstance(routing, str) else routing
    ids = _base_ids(parsed, spec, num_ranks, rank, tokens, seed)
    generator = _generator(seed, rank, 1)
    if parsed.duplicates and spec.topk > 1:
        chosen = torch.rand(tokens, 1, generator=generator) < parsed.duplicates
        earlier = torch.rand(tokens, spec.topk, generator=generator) * torch.arange(spec.topk)
        ids = torch.where(chosen, ids.gather(1, earlier.long()), ids)
    if parsed.masked:
        masked = torch.rand(tokens, spec.topk, generator=generator) < parsed.masked
        ids = torch.where(masked, -1, ids)
    weight = torch.randn(tokens, spec.topk, generator=generator).softmax(-1)
    return ids, weight


def random_activations(spec: MoESpec, rank: int, tokens: int, seed: int) -> Tensor:
    """Hidden states BF16 [T, H] of a rank.

    Normal values; each group of 128 columns of a token is scaled by its own power of two in
    1/2..2, so that a wrong activation scale shows.
    """
    generator = _generator(seed, rank, 2)
    x = torch.randn(tokens, spec.hidden, generator=generator)
    octave = torch.randint(-1, 2, (tokens, spec.hidden // 128), generator=generator).float()
    return (x * torch.exp2(octave).repeat_interleave(128, dim=1)).bfloat16()


@dataclass(frozen=True)
class Skew:
    """How uneven a batch's routes are.

    Attributes:
        routes: routes that are not masked, all ranks.
        max_over_mean: load of the busiest rank over the mean rank's.
        expert_max_over_mean: the same over experts.
        balancedness: mean over max of the ranks' loads, in 0..1; 1 is even.
        gini: Gini coefficient of the experts' loads, 0 even .. 1 all on one.
        empty_experts: experts without a route.
        remote_share: share of routes that leave the token's rank.
    """

    routes: int
    max_over_mean: float
    expert_max_over_mean: float
    balancedness: float
    gini: float
    empty_experts: int
    remote_share: float

    def to_dict(self) -> dict[str, float | int]:
        """Plain JSON types."""
        return asdict(self)


def skew(topk_idx: Sequence[Tensor], spec: MoESpec) -> Skew:
    """Skew of a batch; ``topk_idx`` holds every rank's ids [T_r, K], rank 0 first.

    Without any route the ratios are 1 and the shares 0.
    """
    num_ranks = len(topk_idx)
    local = spec.experts_per_rank(num_ranks)
    per_source = [torch.bincount(t[t >= 0], minlength=spec.num_experts) for t in topk_idx]
    load = torch.stack(per_source).sum(0).double()
    total = float(load.sum())
    if not total:
        return Skew(0, 1.0, 1.0, 1.0, 0.0, spec.num_experts, 0.0)
    by_rank = load.view(num_ranks, local).sum(1)
    order = torch.arange(1, spec.num_experts + 1).double()
    gini = float((2 * order - spec.num_experts - 1) @ load.sort().values) / (
        spec.num_experts * total
    )
    stay = sum(float(c.view(num_ranks, local)[r].sum()) for r, c in enumerate(per_source))
    return Skew(
        routes=int(total),
        max_over_mean=float(by_rank.max() / by_rank.mean()),
        expert_max_over_mean=float(load.max() / load.mean()),
        balancedness=float(by_rank.mean() / by_rank.max()),
        gini=gini,
        empty_experts=int((load == 0).sum()),
        remote_share=1 - stay / total,
    )


def tokens_per_rank(
    text: str, num_ranks: int, seed: int = 0, *, option: str = "tokens"
) -> list[int]:
    """Tokens of each rank: ``"64"``, ``"64,0,17,3"`` or ``"ramp:64"`` (see TOKEN_PATTERNS).

    ``option`` is what messages call it.

    Raises:
        SpecError: not of that form, or a list of another length than R.
    """
    pattern, colon, value = text.partition(":")
    numbers = (value if colon else text).split(",")
    if not all(n.strip().isdigit() for n in numbers):
        raise SpecError(f"{option} {text!r}: write T, T0,T1,... or PATTERN:T with {TOKEN_PATTERNS}")
    counts = [int(n) for n in numbers]
    if not colon:
        if len(counts) == 1:
            return counts * num_ranks
        if len(counts) != num_ranks:
            raise SpecError(
                f"{option} {text!r}: {len(counts)} counts for {num_ranks} ranks: give one count "
                "for each rank"
            )
        return counts
    if pattern not in TOKEN_PATTERNS or len(counts) != 1:
        raise SpecError(
            f"{option} {text!r}: the pattern must be one of {', '.join(TOKEN_PATTERNS)}"
        )
    most, last = counts[0], num_ranks - 1
    if pattern == "ramp":
        return [most * r // last if last else most for r in range(num_ranks)]
    if pattern == "random":
        return torch.randint(0, most + 1, (num_ranks,), generator=_generator(seed, -2)).tolist()
    if pattern == "empty":
        return [0 if r == last and last else most for r in range(num_ranks)]
    if pattern == "single":
        return [most if r == 0 else 0 for r in range(num_ranks)]
    return [most] * num_ranks
