"""Stages: the calls of a graph grouped into what one task body computes.

``BODIES`` is the list of bodies: which sequence of calls each runs, under which opcode, and which
tensor of the sequence goes to which operand slot. Opcode and slot names are those of
``instruction.hpp``; ``encode`` refuses a name that the header does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from megamoe.attention_pre.op_graph import Call, OpGraph, Tensor
from megamoe.errors import SpecError

__all__ = ["BODIES", "Body", "Stage", "StageGraph", "partition", "subgraph"]

# (call of the sequence, side, position): "2>1" is the second output of the third call.
Place = tuple[int, Literal["<", ">"], int]


@dataclass(frozen=True)
class Body:
    """A task body: opcode, the calls it computes, and the operands they name."""

    opcode: str
    calls: tuple[str, ...]
    operands: Mapping[str, Place]


def _body(opcode: str, calls: str, **operands: str) -> Body:
    places: dict[str, Place] = {}
    for role, text in operands.items():
        side: Literal["<", ">"] = "<" if "<" in text else ">"
        call, position = text.split(side)
        places[role] = (int(call), side, int(position))
    return Body(opcode, tuple(calls.split()), places)


_GEMM = {"a": "0<0", "a_scales": "0<1", "w": "0<2", "w_scales": "0<3"}

BODIES: Final = (
    _body(
        "norm_quant",
        "add rmsnorm quant",
        x="0<0",
        residual="0<1",
        weight="1<1",
        residual_out="0>0",
        normed="1>0",
        codes="2>0",
        scales="2>1",
    ),
    _body(
        "norm_quant",
        "rmsnorm quant",
        x="0<0",
        weight="0<1",
        normed="0>0",
        codes="1>0",
        scales="1>1",
    ),
    _body(
        "qkv_a",
        "gemm_fp8 split rmsnorm quant rmsnorm rope write_latent",
        **_GEMM,
        q_norm="2<1",
        kv_norm="4<1",
        codes="3>0",
        scales="3>1",
        cache="6>0",
        slots="6<1",
        positions="5<1",
        rope="5<2",
    ),
    _body("head_gate", "gemm", a="0<0", w="0<1", partials="0>0"),
    _body(
        "index_key",
        "gemm_fp8 layernorm rope quant write_index",
        **_GEMM,
        norm_weight="1<1",
        norm_bias="1<2",
        cache="4>0",
        slots="4<1",
        positions="2<1",
        rope="2<2",
    ),
    _body(
        "index_query",
        "gemm_fp8 heads rope quant fold",
        **_GEMM,
        gate="4<0",
        codes="3>0",
        weights="4>0",
        positions="2<1",
        rope="2<2",
    ),
    _body("main_query", "gemm_fp8 heads rope", **_GEMM, out="2>0", positions="2<1", rope="2<2"),
    _body("absorb_query", "bmm", a="0<0", w="0<1", out="0>0"),
    _body(
        "index_score",
        "paged_logits",
        codes="0<0",
        weights="0<1",
        cache="0<2",
        block_table="0<3",
        context_lens="0<4",
        logits="0>0",
    ),
    _body("gemm_swiglu", "gemm_fp8 swiglu quant", **_GEMM, codes="2>0", scales="2>1"),
    _body("gemm_store", "gemm_fp8 add", **_GEMM, residual="1<1", out="1>0"),
)


@dataclass(frozen=True)
class Stage:
    """One stage: a body with its tensors.

    Attributes:
        name: unique in the graph.
        opcode: of the body.
        operands: operand slot name to tensor name.
        attrs: constants of the calls, as ``"<call>.<name>"``.
        reads: tensors from outside the stage.
        writes: tensors that other stages read or the graph returns.
    """

    name: str
    opcode: str
    operands: Mapping[str, str]
    attrs: Mapping[str, float]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class StageGraph:
    """The stages of a graph in call order, and its tensors."""

    name: str
    stages: tuple[Stage, ...]
    tensors: Mapping[str, Tensor]
    outputs: tuple[str, ...]

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            SpecError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        have = ", ".join(s.name for s in self.stages)
        raise SpecError(f"stage {name!r} is not in graph {self.name}: it has {have}")

    def maker(self, tensor: str) -> Stage | None:
        """The stage that writes ``tensor``, or None for inputs, weights and caches."""
        return next((s for s in self.stages if tensor in s.writes), None)


def _grouped(calls: Iterable[Call]) -> list[tuple[str | None, list[Call]]]:
    groups: list[tuple[str | None, list[Call]]] = []
    for call in calls:
        if groups and groups[-1][0] == call.stage:
            groups[-1][1].append(call)
        else:
            groups.append((call.stage, [call]))
    named = [name for name, _ in groups if name is not None]
    for name in named:
        if named.count(name) > 1:
            raise SpecError(f"stage {name!r} is captured in two places: keep its calls together")
    return groups


def _longest_match(calls: list[Call], first: int) -> Body:
    fits = [
        b for b in BODIES if tuple(c.kind for c in calls[first : first + len(b.calls)]) == b.calls
    ]
    if not fits:
        raise SpecError(
            f"no task body starts with {' '.join(c.kind for c in calls[first:])}: "
            f"the bodies are {'; '.join(' '.join(b.calls) for b in BODIES)}"
        )
    return max(fits, key=lambda b: len(b.calls))


def partition(graph: OpGraph) -> StageGraph:
    """Groups the calls of a graph into stages.

    Labelled calls form the stages they name. A run of unlabelled calls is cut into the longest
    bodies that fit, from the left, named after their opcode.

    Raises:
        SpecError: no body computes a stage, or a stage hides a tensor that others read.
    """
    bodies: list[tuple[str, Body, list[Call]]] = []
    taken: set[str] = set()
    for label, calls in _grouped(graph.calls):
        first = 0
        while first < len(calls):
            body = _longest_match(calls, first)
            if label is not None and len(body.calls) != len(calls):
                kinds = " ".join(c.kind for c in calls)
                known = "; ".join(" ".join(b.calls) for b in BODIES)
                raise SpecError(
                    f"no task body computes stage {label!r} ({kinds}): there are {known}"
                )
            name, count = label or body.opcode, 1
            while name in taken:
                count += 1
                name = f"{body.opcode}{count}"
            taken.add(name)
            bodies.append((name, body, calls[first : first + len(body.calls)]))
            first += len(body.calls)

    readers: dict[str, set[str]] = {t: {"the caller"} for t in graph.outputs}
    for name, _, calls in bodies:
        for call in calls:
            for tensor in call.inputs:
                readers.setdefault(tensor, set()).add(name)
    stages = tuple(_stage(graph, *entry, readers) for entry in bodies)
    return StageGraph(graph.name, stages, dict(graph.tensors), graph.outputs)


def _stage(
    graph: OpGraph, name: str, body: Body, calls: list[Call], readers: Mapping[str, set[str]]
) -> Stage:
    operands = {}
    for role, (call, side, position) in body.operands.items():
        operands[role] = (calls[call].inputs if side == "<" else calls[call].outputs)[position]
    made = {t for c in calls for t in c.outputs}
    stored = set(operands.values())
    wanted = {t for t in made if readers.get(t, set()) - {name}}
    cached = {t for t in made if graph.tensors[t].storage != t}
    if hidden := sorted(wanted - stored):
        others = ", ".join(sorted(readers[hidden[0]] - {name}))
        raise SpecError(
            f"stage {name!r} ({body.opcode}) does not store {', '.join(hidden)}, which {others} "
            "reads: move the call to a stage of its own"
        )
    reads = tuple(dict.fromkeys(t for c in calls for t in c.inputs if t not in made))
    attrs = {f"{c.kind}.{key}": value for c in reversed(calls) for key, value in c.attrs}
    # A body stores every result that it has a slot for; the BF16 norm alone only on demand.
    on_demand = {operands.get("normed")} - wanted - cached
    writes = tuple(t for t in operands.values() if t in made - on_demand)
    return Stage(name, body.opcode, operands, attrs, reads, writes)


def subgraph(graph: StageGraph, names: Iterable[str]) -> StageGraph:
    """The graph with only the stages ``names``, in the order of the full graph.

    What dropped stages made becomes an input; what they read becomes an output.
    """
    wanted = set(names)
    for name in wanted:
        graph.stage(name)
    kept = tuple(s for s in graph.stages if s.name in wanted)
    dropped = [s for s in graph.stages if s.name not in wanted]
    made = {t for s in kept for t in s.writes}
    outside = {t for s in dropped for t in s.reads} | set(graph.outputs)
    tensors: dict[str, Tensor] = {}
    for stage in kept:
        for name in (*stage.reads, *stage.operands.values()):
            tensor = graph.tensors[name]
            if name not in made and tensor.kind == "value" and name in stage.reads:
                cached = tensor.storage != tensor.name
                tensor = replace(tensor, kind="cache" if cached else "input")
            tensors[name] = tensor
            if tensor.storage not in tensors:
                tensors[tensor.storage] = graph.tensors[tensor.storage]
    outputs = tuple(t for s in kept for t in s.writes if t in outside)
    return StageGraph(f"{graph.name}[{'+'.join(s.name for s in kept)}]", kept, tensors, outputs)
