"""Metric names, units and values; what was not read is not there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from service import metrics as metrics_module
from service.metrics import DCGM_NAMES, GPU_METRICS, Metrics, gini, load_figures
from service.reports import EngineFault, StepRecord, TelemetrySample
from service.sequences import Sequences
from tests.service.echo import BOTH, EchoEngine
from tests.service.served import HTTP


@pytest.fixture
def engine():
    return EchoEngine(BOTH)


@pytest.fixture
def metrics(engine):
    return Metrics(engine, Sequences(600))


def samples(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for s in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))
            found[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    return found


def full_sample(rank: int = 0) -> TelemetrySample:
    values = {name: float(i + 1) for i, name in enumerate(GPU_METRICS)}
    events = {"sw_power_cap": True, "gpu_idle": False}
    return TelemetrySample(rank=rank, device="G", values=values, clocks_events=events)


def record(**changes) -> StepRecord:
    fields = {
        "step": 1, "num_requests": 2, "num_tokens": 9, "queue_s": 0.002, "host_s": 0.001,
        "kernel_s": 0.03, "rank_tokens": (5, 4), "expert_counts": (6, 0, 2, 0),
        "high_water": ((7, 3), (5, 2)), "backpressure": ((1, 0), (0, 2)),
    }  # fmt: skip
    return StepRecord(**{**fields, **changes})


def test_a_step_is_counted(engine, metrics):
    for observe in engine.observers.step:
        observe(record())
        observe(record(step=2, num_requests=0, num_tokens=2))
    found = samples(metrics)
    assert found["megamoe_steps_total{kind=work}"] == 1
    assert found["megamoe_steps_total{kind=heartbeat}"] == 1
    assert found["megamoe_step_tokens_sum"] == 9  # heartbeats are no load
    assert found["megamoe_step_seconds_sum{phase=kernel}"] == 0.03
    assert found["megamoe_step_seconds_sum{phase=queue}"] == 0.002
    assert found["megamoe_rank_tokens_total{rank=0}"] == 5
    assert found["megamoe_expert_load_max_over_mean"] == 3.0
    assert found["megamoe_expert_load_empty_experts"] == 2
    assert found["megamoe_ring_high_water_blocks{rank=1,ring=l2}"] == 2
    assert found["megamoe_ring_backpressure_events_total{rank=1,ring=l2}"] == 2


def test_nothing_unread_is_exported(engine, metrics):
    found = samples(metrics)
    assert not [name for name in found if "gpu" in name or "expert_load" in name]
    for observe in engine.observers.telemetry:
        observe(TelemetrySample(rank=0, unavailable="the rank runs without a GPU"))
    found = samples(metrics)
    assert found["megamoe_telemetry_available{rank=0,source=nvml}"] == 0
    assert not [name for name in found if "gpu" in name or "joules" in name]
    partial = TelemetrySample(rank=1, device="G", values={"power_watts": 0.0})
    for observe in engine.observers.telemetry:
        observe(partial)
    found = samples(metrics)
    # A zero that was read is a reading.
    assert found["megamoe_gpu_power_watts{device=G,rank=1}"] == 0.0
    assert [name for name in found if "gpu" in name] == ["megamoe_gpu_power_watts{device=G,rank=1}"]


def test_a_fault_is_counted_and_forgets_readings(engine, metrics):
    for observe in engine.observers.telemetry:
        observe(full_sample())
    assert "megamoe_gpu_clocks_event_active{device=G,rank=0,reason=sw_power_cap}" in samples(
        metrics
    )
    for observe in engine.observers.fault:
        observe(EngineFault(kind="died", rank=1, message="rank 1 died"))
    found = samples(metrics)
    assert found["megamoe_faults_total{kind=died,rank=1}"] == 1
    assert not [name for name in found if "gpu" in name]


def test_names_are_in_base_units(engine, metrics):
    for observe in engine.observers.telemetry:
        observe(full_sample())
    for observe in engine.observers.step:
        observe(record())
    metrics.on_request(0.1, 0.2, 0.3, 0.6)
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert re.fullmatch(r"megamoe_[a-z0-9_]+", family.name), family.name
        assert not re.search(
            r"_(ms|us|milli\w*|micro\w*|mb|kb|mhz|ghz|mw|percent)(_|$)", family.name
        )
        assert family.documentation, family.name
        for s in family.samples:
            if family.type == "counter":
                assert s.name.endswith("_total"), s.name


def test_every_gpu_metric_has_its_dcgm_name():
    assert set(DCGM_NAMES) == set(GPU_METRICS) | {"clocks_event_active"}
    for name, entry in DCGM_NAMES.items():
        field, factor = entry
        assert field.startswith("DCGM_FI_")
        assert factor > 0
        assert field in Path("docs/service.md").read_text(), f"{name}: {field} is not in the docs"


def test_energy_per_token_needs_seconds(engine, metrics, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])

    def reading(joules: float) -> None:
        values = {"energy_joules_total": joules}
        metrics.on_telemetry(TelemetrySample(rank=0, device="G", values=values))

    reading(1000.0)
    metrics.on_step(record(num_tokens=500))
    now[0] += 2.0
    reading(1900.0)
    assert "megamoe_energy_joules_per_token" not in samples(metrics)
    now[0] += 4.0
    reading(4000.0)
    assert samples(metrics)["megamoe_energy_joules_per_token"] == pytest.approx(3000 / 500)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_gini_is_the_mean_absolute_difference(counts):
    """Its definition: sum |a - b| over all pairs / (2 n sum)."""
    load = np.array(counts, float)
    total = load.sum()
    want = np.abs(load[:, None] - load).sum() / (2 * len(load) * total) if total else 0.0
    assert gini(counts) == pytest.approx(want, abs=1e-9)


def test_load_figures():
    assert load_figures(()) is None
    assert load_figures((0, 0)) is None
    assert load_figures((4, 0)) == {"max_over_mean": 2.0, "gini": 0.5, "empty": 1}


def test_grafana_asks_for_metrics_that_exist(engine, metrics):
    for observe in (*engine.observers.telemetry, *engine.observers.step, *engine.observers.fault):
        if observe in engine.observers.telemetry:
            observe(full_sample())
        elif observe in engine.observers.step:
            observe(record())
            observe(record(model="attention_pre"))
    metrics.on_request(0.1, 0.2, 0.3, 0.6)
    metrics.faults("died", "0").inc()
    metrics.ipc_rejected("malformed").inc()
    metrics.responses("/v2", "200").inc()
    exported = {
        s.name
        for family in text_string_to_metric_families(metrics.render().decode())
        for s in family.samples
    } | {"megamoe_energy_joules_per_token"}
    board = json.loads(Path("deploy/grafana-dashboard.json").read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            asked |= set(re.findall(r"megamoe_[a-z0-9_]+", target["expr"]))
    assert len(asked) > 15
    assert asked <= exported, asked - exported


def test_responses_are_counted_by_template_not_by_path(server):

    for path in ("/v2/models/moe", "/v2/models/other", "/v2/models/another", "/nothing"):
        HTTP.get(server.url + path)
    text = HTTP.get(server.url + "/metrics").text
    assert re.search(r'responses_total\{code="404",path="/v2/models/\{model\}"\} [2-9]', text)
    assert "another" not in text
    assert "nothing" not in text
