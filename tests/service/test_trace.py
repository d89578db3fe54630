"""The Chrome trace: tracks without overlaps, counters, arrows."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from service.reports import Span, StepRecord, TelemetrySample
from service.trace import chrome_trace
from tests.service.echo import EchoEngine
from tests.service.served import HTTP
from tests.service.test_client import changed


def record(step: int, started: float) -> StepRecord:
    spans = tuple(
        Span(rank, unit, role, start, length)
        for rank in range(2)
        for unit in range(3)
        for role, start, length in (
            ("list routes", 0.0, 10.0),
            ("tiles", 12.0, 100.0 + unit),
            ("prefetch", 20.0, 50.0),  # beside the tiles: a track of its own
            ("combine", 115.0, 7.0),
        )
    )
    return StepRecord(
        step=step, num_requests=1, num_tokens=4, queue_s=0.0, host_s=0.0, kernel_s=0.0,
        rank_tokens=(2, 2), high_water=((3, 1), (4, 2)), spans=spans, started=started,
    )  # fmt: skip


def test_tracks_counters_and_arrows():
    steps = [record(1, 10.0), record(2, 10.001)]
    sample = TelemetrySample(rank=1, values={"power_watts": 640.0, "sm_clock_hertz": 1.5e9})
    blank = TelemetrySample(rank=0, unavailable="no GPU")
    events = chrome_trace(steps, [(10.0005, sample), (10.0006, blank)])["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"], event["name"]))
    assert len(tracks) == 2 * 3 * 4
    for stretches in tracks.values():
        stretches.sort()
        assert len({name for _, _, name in stretches}) == 1
        for (begin, length, _), (after, _, _) in pairwise(stretches):
            assert begin + length <= after
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names) == set(tracks)
    assert names[next(iter(tracks))] == "unit 0: list routes"
    counters = [e for e in events if e["ph"] == "C"]
    assert {"L1": 4, "L2": 2} in [e["args"] for e in counters if e["pid"] == 1]
    assert [e["args"] for e in counters if e["name"] == "watts"] == [{"watts": 640.0}]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == 2 * 2 * 3
    for key, start in starts.items():
        assert names[start["pid"], start["tid"]].endswith("list routes")
        assert names[ends[key]["pid"], ends[key]["tid"]].endswith("combine")
        assert start["ts"] < ends[key]["ts"]


def test_the_service_gives_its_last_steps(make_running):
    import tritonclient.http as oip

    running = make_running(EchoEngine())
    with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        for _ in range(3):
            client.infer("moe", changed())
    events = HTTP.get(running.url + "/trace").json()["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {1, 2, 3}
    stamps = sorted(e["ts"] for e in events if e["ph"] == "X")
    assert stamps[0] > 0
    assert stamps[-1] - stamps[0] < 60e6
