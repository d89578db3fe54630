"""Traces: those of CPU ranks are sound, broken ones are found out, sums agree with hand counts."""

from __future__ import annotations

import gzip
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launcher.moe_perfetto import chrome_trace
from launcher.moe_timeline import timeline_svg
from launcher.moe_trace import ring_depth, trace_figures, trace_problems, union_ns
from launcher.trace_moe import write_trace
from megamoe import native
from megamoe.backends.trace import LayerTrace, decode_trace, event_dtype, stretches
from megamoe.errors import MegaMoeError
from megamoe.layer import open_layer
from megamoe.spec import EpConfig
from tests.cases import cases
from tests.groups import run_group


def traces_of(case, monkeypatch, **settings) -> list[LayerTrace]:
    monkeypatch.setenv("MEGAMOE_TRACE", "1")
    config = EpConfig(num_ranks=case.num_ranks, max_tokens=96, timeout_s=20, **settings)

    def body(rendezvous):
        with open_layer(case.spec, config, backend="cpu", rendezvous=rendezvous) as layer:
            layer.load_weights(case.experts(rendezvous.rank))
            for _ in range(2):
                layer.run(*case.inputs(rendezvous.rank))
            return layer.trace()

    return run_group(case.num_ranks, body)


@pytest.fixture(scope="module")
def sound() -> LayerTrace:
    """One rank's trace of a layer with shared experts and rings that are too small."""
    with pytest.MonkeyPatch.context() as patch:
        case = next(c for c in cases(2) if c.name == "fp8-shared")
        return traces_of(case, patch, block_m=8, ring_l1_blocks=3, ring_l2_blocks=2)[0]


@pytest.mark.parametrize(("block_m", "b1", "b2"), [(8, 1, 1), (16, 5, 3), (32, 0, 0)])
def test_cpu_ranks_record_every_tile_once(block_m, b1, b2, monkeypatch):
    for case in cases(2):
        traces = traces_of(
            case, monkeypatch, block_m=block_m, ring_l1_blocks=b1, ring_l2_blocks=b2, num_workers=2
        )
        routed = sum(int((case.inputs(rank)[1] >= 0).sum()) for rank in range(2))
        shared = case.spec.num_shared * sum(case.inputs(rank)[1].shape[0] for rank in range(2))
        rows = 0
        for trace in traces:
            assert trace_problems(trace) == [], f"{case.name}, rank {trace.rank}"
            rows += len(trace.of("rows"))
            figures = trace_figures(trace)
            assert figures["events"] == len(trace.events)
            (staged,) = trace.of("stage")
            assert (staged["unit"], staged["a"]) == (0, trace.num_tokens)
            # No tokens are staged in less than the figure's 0.1 µs.
            assert staged["end"] - staged["begin"] >= (1 if trace.num_tokens else 0)
            took = (int(staged["end"]) - int(trace.events["begin"].min())) / 1e3
            assert figures["stage_us"] == pytest.approx(took, abs=0.051)
        assert rows == routed + shared, case.name


def test_a_block_with_a_tail_is_traced_with_its_padding(monkeypatch):
    """An expert's 135 rows of two ranks are one block. No rule is broken."""
    case = next(c for c in cases(2) if c.name == "fp8-one-expert")
    case = replace(case, tokens=(75, 60))
    trace = traces_of(case, monkeypatch, block_m=144)[0]
    assert trace_problems(trace) == []
    assert set(trace.of("linear1")["c"].tolist()) == {135}


def test_without_the_switch_there_is_no_trace(monkeypatch):
    monkeypatch.delenv("MEGAMOE_TRACE", raising=False)
    case = cases(1)[0]

    def body(rendezvous):
        config = EpConfig(num_ranks=1, max_tokens=96)
        with open_layer(case.spec, config, backend="cpu", rendezvous=rendezvous) as layer:
            with pytest.raises(MegaMoeError, match="MEGAMOE_TRACE"):
                layer.trace()
            return True

    assert run_group(1, body) == [True]


def edited(trace: LayerTrace, of: str, pick: int, **fields: int) -> LayerTrace:
    """The trace with fields of the ``pick``-th event of a kind set."""
    events = trace.events.copy()
    at = np.flatnonzero(events["kind"] == trace.kinds.index(of))[pick]
    for name, value in fields.items():
        events[name][at] = value
    return replace(trace, events=events)


def without(trace: LayerTrace, kind: str, pick: int) -> LayerTrace:
    at = np.flatnonzero(trace.events["kind"] == trace.kinds.index(kind))[pick]
    return replace(trace, events=np.delete(trace.events, at))


def repeated(trace: LayerTrace, kind: str, pick: int) -> LayerTrace:
    at = np.flatnonzero(trace.events["kind"] == trace.kinds.index(kind))[pick]
    return replace(trace, events=np.insert(trace.events, at, trace.events[at]))


def test_broken_traces_are_found_out(sound):
    tile, later = sound.of("linear1")[[3, -1]]
    broken = {
        "ends 5 ns before": edited(sound, "linear1", 3, end=int(tile["begin"]) - 5),
        "of kind": edited(sound, "linear1", 3, kind=99),
        "of role": edited(sound, "linear1", 3, role=6),
        "no begin": edited(sound, "combine", 0, begin=0),
        "after the event that it began in": edited(
            sound, "linear1", 3, end=(int(later["begin"]) + int(later["end"])) // 2
        ),
        "comes 0 times": without(sound, "linear2", 7),
        "comes 2 times": repeated(sound, "publish1", 2),
        "scatter: tile": without(sound, "scatter", 1),
        "has had": edited(sound, "rows", 0, b=int(sound.of("rows")[0]["b"]) + 1),
        "are pulled": edited(sound, "pull", 0, b=int(sound.of("pull")[0]["b"]) + 1),
        "tokens are combined": edited(sound, "combine", 0, b=sound.num_tokens + 1),
        "before the last rows": edited(
            sound, "rows", -1, **dict.fromkeys(("begin", "end"), int(sound.events["end"].max()))
        ),
        "units have staged": repeated(sound, "stage", 0),
        "must be 1, each once": edited(sound, "stage", 0, unit=1),
        "stages 1 tokens": edited(sound, "stage", 0, a=1),
        "before the last token is staged": edited(
            sound, "stage", 0, end=int(sound.of("exchange")["end"].max()) + 1
        ),
        "did not fit": replace(sound, dropped=sound.dropped + 1),
        "ring holds": replace(sound, ring_l1=int(ring_depth(sound, "l1")[1].max()) - 1),
    }
    assert trace_problems(sound) == []
    for words, trace in broken.items():
        found = trace_problems(trace)
        assert any(words in problem for problem in found), f"{words!r} is not in {found}"


def test_a_full_track_counts_what_it_drops():
    shape = native.make_shape(
        cases(1)[0].spec,
        EpConfig(num_ranks=1, max_tokens=8).resolved(cases(1)[0].spec),
        num_units=2,
        num_pullers=1,
        l2_tile_n=256,
    )
    roles = len(native.describe()["trace_roles"])
    recorded = np.zeros((2, roles), np.uint32)
    recorded[1, 3] = 9
    events = np.zeros((2, roles, 4), event_dtype())
    events["begin"] = np.arange(10, 14)
    events["end"] = np.arange(11, 15)
    trace = decode_trace(
        recorded, events.view(np.uint8), shape, rank=0, backend="cuda", num_tokens=8
    )
    assert trace.dropped.sum() == trace.dropped[1, 3] == 5
    assert trace.events[["unit", "role", "begin"]].tolist() == [(1, 3, t) for t in range(10, 14)]


def hand_made(sound: LayerTrace) -> LayerTrace:
    """Two units, two blocks of one tile each way; times in ns chosen by hand."""
    kinds, roles = sound.kinds, sound.roles
    rows: list[tuple[int, str, int, int, str, int, int, int]] = [
        (0, "dispatch", 1000, 1400, "stage", 2),
        (1, "dispatch", 1100, 1300, "stage", 2),
        (0, "pull", 1000, 3000, "pull", 0, 8),
        (0, "pull", 2000, 2000, "rows", 0, 8, 0),
        (0, "pull", 3000, 3000, "rows", 1, 8, 1),
        (0, "math", 1500, 4000, "linear1", 0, 0, 1),  # can compute from 2000 on
        (1, "math", 3000, 5000, "linear1", 1, 0, 1),
        (0, "publish", 4000, 4100, "publish1", 0, 0, 1),
        (1, "publish", 5000, 5100, "publish1", 1, 0, 1),
        (0, "math", 4100, 6000, "linear2", 0, 0, 1),
        (0, "math", 5500, 6000, "scatter", 0, 0, 1),
        (1, "math", 5100, 9000, "linear2", 1, 0, 1),
        (1, "math", 8000, 9000, "scatter", 1, 0, 1),
        (0, "publish", 6000, 6100, "publish2", 0, 0, 1),
        (1, "publish", 9000, 9100, "publish2", 1, 0, 1),
        (0, "combine", 9100, 11000, "combine", 0, 2),
        (0, "combine", 9100, 10000, "wait", sound.tags.index("token_arrived"), 0),
    ]  # type: ignore[list-item]
    events = np.zeros(len(rows), sound.events.dtype)
    for event, (unit, role, begin, end, kind, *numbers) in zip(events, rows, strict=True):
        event["unit"], event["role"], event["kind"] = unit, roles.index(role), kinds.index(kind)
        event["begin"], event["end"] = begin, end
        for name, value in zip("abc", numbers, strict=False):
            event[name] = value
    order = np.lexsort(
        (-events["end"].astype(int), events["begin"], events["role"], events["unit"])
    )
    return replace(
        sound,
        events=events[order],
        num_units=2,
        num_tokens=2,
        l1_tiles=1,
        l2_tiles=1,
        ring_l1=2,
        ring_l2=2,
        dropped=np.zeros((2, len(roles)), np.int64),
    )


def test_sums_are_those_counted_by_hand(sound):
    trace = hand_made(sound)
    figures = trace_figures(trace)
    assert figures["call_us"] == 10.0
    assert figures["stage_us"] == 0.4
    assert figures["busy_us"]["stage"] == 0.6
    # 2000-5000 and, a Linear 2 being able to begin when its block is published, 4100-5500 and
    # 5100-8000 without the scatters: 2000-8000 in all.
    assert figures["compute_us"] == 6.0
    # The pull 1000-3000, scatters 5500-6000 and 8000-9000; together with compute 2000-3000 and
    # 5500-6000.
    assert figures["communication_us"] == 3.5
    assert figures["overlapped_us"] == 1.5
    assert figures["exposed_us"] == 4.0
    assert figures["wave_tail_us"] == 3.0
    assert figures["rows_remote"] == 1
    assert figures["wait_us"] == {"combine: token_arrived": 0.9}
    # Unit 0 computes 2000-4000 and 4100-5500, unit 1 3000-5000 and 5100-8000: 8300 of 20000.
    assert figures["math_busy"] == 0.415
    times, depth = ring_depth(trace, "l1")
    assert list(zip(times, depth, strict=True)) == [(2000, 1), (3000, 2), (4000, 1), (5000, 0)]
    # A wait for a ring slot inside a pull is no communication.
    waits = trace.events[-1:].copy()
    waits["unit"], waits["role"] = 0, trace.roles.index("pull")
    waits["kind"], waits["a"] = trace.kinds.index("wait"), trace.tags.index("l1_empty")
    waits["begin"], waits["end"] = 1200, 1700
    events = np.concatenate([trace.events, waits])
    order = np.lexsort(
        (-events["end"].astype(int), events["begin"], events["role"], events["unit"])
    )
    waiting = trace_figures(replace(trace, events=events[order]))
    assert waiting["communication_us"] == 3.0
    assert waiting["overlapped_us"] == 1.5


def test_stretches_span_all_events_of_a_unit_and_kind(sound):
    found = {(unit, kind): (at, length) for unit, kind, at, length in stretches(hand_made(sound))}
    assert found[0, "pull"] == (0.0, 2.0)
    assert found[1, "linear2"] == (pytest.approx(4.1), pytest.approx(3.9))
    assert found[0, "combine"] == (pytest.approx(8.1), pytest.approx(1.9))
    assert set(found) == {
        *((0, kind) for kind in ("stage", "pull", "linear1", "linear2", "combine")),
        *((1, kind) for kind in ("stage", "linear1", "linear2")),
    }


def test_every_kind_of_event_is_recorded_by_both_backends():
    """A hook that an edit drops is missed here, not on a GPU."""
    root = Path(__file__).parents[2] / "csrc"
    kinds = re.findall(r"X\((k\w+), \"", (root / "include/megamoe/trace.hpp").read_text())
    kinds = kinds[len(native.describe()["trace_roles"]) :]
    assert len(kinds) == len(native.describe()["trace_kinds"])
    for folders, absent in ((("moe", "device"), ()), (("cpu",), ("kActivate",))):
        source = "".join(p.read_text() for f in folders for p in sorted((root / f).iterdir())
                         if p.is_file())  # fmt: skip
        missing = [kind for kind in kinds if f"TraceKind::{kind}" not in source]
        assert missing == list(absent), folders
    feed, pull = ((root / "moe" / name).read_text() for name in ("feed.cuh", "pull.cuh"))
    assert "trace.note_task(" in feed
    assert "trace.note_job(" in pull


def test_unions():
    spans = np.array([[5, 9], [0, 2], [1, 4], [4, 5], [20, 20], [12, 13]])
    assert union_ns(spans).tolist() == [[0, 9], [12, 13]]
    assert union_ns(np.zeros((0, 2), np.int64)).tolist() == []


def test_chrome_form(sound, tmp_path):
    sample = {"power_watts": 612.5, "sm_clock_hertz": 1.6e9}
    chrome = chrome_trace([sound], {sound.rank: [(-0.25, sample), (0.0, sample)]})
    path = tmp_path / "trace.json.gz"
    write_trace(path, chrome)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    by_phase: dict[str, list[dict]] = {}
    for event in events:
        by_phase.setdefault(event["ph"], []).append(event)
        assert {"name", "ph", "pid", "tid"} <= event.keys(), event
        assert event["ph"] == "M" or isinstance(event["ts"], float), event
    assert set(by_phase) == {"M", "X", "i", "C"}
    assert len(by_phase["i"]) == len(sound.of("rows"))
    assert len(by_phase["X"]) == len(sound.events) - len(by_phase["i"])
    assert min(event["ts"] for event in by_phase["X"]) == 0
    assert all(event["dur"] >= 0 for event in by_phase["X"])
    named = {e["tid"] for e in by_phase["M"] if e["name"] == "thread_name"}
    assert {e["tid"] for e in by_phase["X"]} <= named
    counters = {e["name"] for e in by_phase["C"]}
    assert counters == {"L1 ring, blocks", "L2 ring, blocks", "board power, W", "SM clock, MHz"}
    clock = [e for e in by_phase["C"] if e["name"] == "SM clock, MHz"]
    assert [e["args"]["value"] for e in clock] == [1600.0, 1600.0]
    assert clock[1]["ts"] - clock[0]["ts"] == pytest.approx(250_000)


def test_picture(sound):
    svg = timeline_svg(sound, title="a call")
    root = ET.fromstring(svg)
    assert root.tag.endswith("svg")
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    depth = {ring: ring_depth(sound, ring)[1].max() for ring in ("l1", "l2")}
    wanted = {"a call", f"{depth['l1']} of {sound.ring_l1}", f"{depth['l2']} of {sound.ring_l2}"}
    assert wanted <= texts
    assert "href" not in svg
