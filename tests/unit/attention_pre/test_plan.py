"""Plans: the published figures, other workers and batches, caching, rebinding, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megamoe.attention_pre.encode import encode, instruction_format, operand_table
from megamoe.attention_pre.graphs import attention_pre_graph, dense_mlp_graph
from megamoe.attention_pre.op_graph import OpGraph
from megamoe.attention_pre.passes import RECORD_BYTES, fuse_events, linearize, normalize
from megamoe.attention_pre.plan import (
    COUNTER_BYTES,
    MAX_SIGNALS,
    MAX_WAITS,
    OPERAND_SLOTS,
    Planner,
    summarize,
)
from megamoe.attention_pre.schedule import CostModel, simulate
from megamoe.attention_pre.stages import partition, subgraph
from megamoe.attention_pre.task_graph import POLICIES, build_task_graph
from megamoe.attention_pre.tilers import tile_graph
from megamoe.attention_pre.tiling import Batch, TileConfig, Tiling, choose_tiles, seed_tiles
from megamoe.errors import SpecError
from megamoe.spec import ATTENTION_MODELS, INDEX_PAGE
from tests.attention import SMALL

GLM = ATTENTION_MODELS["glm-5.2"]
PUBLISHED = Batch(((8, 8192), (8, 8192)))
SEED_TASKS = {"A0": 16, "B0": 84, "C0": 48, "B1": 8, "D1": 128, "D0": 128, "D2": 256, "E1": 64}


@pytest.fixture(scope="module")
def glm():
    return partition(attention_pre_graph(GLM))


@pytest.fixture(scope="module")
def published(glm):
    return Planner(glm, 148, tiles=seed_tiles(), queue="round_robin").plan(PUBLISHED)


# ---------------------------------------------------------------- the published plan


def test_the_published_plan_is_reproduced(published):
    figures = summarize(published)
    assert figures["tasks"] == 732
    assert figures["tasks_per_stage"] == SEED_TASKS
    assert figures["events"] == 70
    assert figures["instruction_tensor"] == [148, 5, 32]
    assert figures["queues"]["lengths"] == {"4": 8, "5": 140}
    encoded = encode(published)
    assert encoded.instructions.shape == (148, 5, 32)
    assert encoded.instructions.dtype == np.uint32
    assert len(encoded.operand_slots) == 8
    assert encoded.row_names.index("E1") == 7
    assert figures["bytes"]["operand table"] == 1024
    json.dumps(figures)


def test_the_published_events_and_thresholds(published):
    """e0, e1: 16 rows of A0; e2: 16 rows of B0; e3: 48 parts of C0; 64 heads; e68: 32; e69: 1."""
    kinds = {}
    for event in published.graph.events:
        kinds.setdefault((event.label.split(":")[0], event.threshold), []).append(event)
    counts = {key: len(events) for key, events in kinds.items()}
    assert counts == {
        ("A0", 16): 2,
        ("B0", 16): 1,
        ("C0", 48): 1,
        ("D0", 2): 64,
        ("D1", 32): 1,
        ("B1", 1): 1,
    }
    graph = published.graph
    by_name = {s.name: i for i, s in enumerate(graph.stages)}
    for task in graph.tasks:
        labels = sorted(graph.events[e].label.split(":")[0] for e in graph.waits[task.index])
        name = graph.stages[task.stage].name
        expected = {
            "A0": [],
            "B0": ["A0"],
            "B1": ["A0"],
            "C0": ["A0"],
            "D0": ["B0"],
            "D1": ["B0", "C0"],
            "D2": ["D0"],
        }
        assert name == "E1" or labels == expected[name]
    # B1 joins the FP8 event, C0 the BF16 one.
    first = {name: next(t for t in graph.tasks if t.stage == s) for name, s in by_name.items()}
    waits = {name: graph.waits[task.index] for name, task in first.items()}
    assert waits["B0"] == waits["B1"] != waits["C0"]


def test_score_tasks_wait_for_new_keys_only_where_they_lie(glm, published):
    """By regions, only each request's tail waits for B1; as 'whole', all 64 do (the seed)."""

    def waiting(plan):
        graph = plan.graph
        b1 = next(e.index for e in graph.events if e.label.startswith("B1"))
        return sum(b1 in w for w in graph.waits)

    assert waiting(published) == 4
    policies = {k: v for k, v in POLICIES.items() if k != ("index_key", "index_score")}
    seed = Planner(glm, 148, tiles=seed_tiles(), queue="round_robin", policies=policies)
    plan = seed.plan(PUBLISHED)
    assert waiting(plan) == 64
    assert len(plan.graph.events) == 70


def test_passes_and_what_they_save(glm):
    """Fusion leaves 70 of 13,252 dependences; MPK's own rule 69, with one wait per task."""
    tasks = build_task_graph(glm, tile_graph(glm, PUBLISHED, seed_tiles()))
    ported, report = fuse_events(tasks)
    assert (report.before["events"], report.after["events"]) == (13252, 70)
    merged, report = fuse_events(tasks, "task")
    assert report.after["events"] == 69
    assert max(len(w) for w in merged.waits) == 1
    # Our record needs no relays; MPK's one-in one-out form does.
    same, _ = normalize(ported, max_waits=MAX_WAITS, max_signals=MAX_SIGNALS)
    assert same is ported
    narrow, report = normalize(ported, max_waits=1, max_signals=1)
    assert (report.after["tasks"], report.after["events"]) == (768, 88)
    assert (report.after["most waits"], report.after["most signals"]) == (1, 1)
    for graph in (ported, merged, narrow):
        linear, report = linearize(graph)
        assert report.after["bytes with ranges"] == 8 * len(linear.events)
        assert report.before["bytes as lists"] > 4.5 * report.after["bytes with ranges"]


# ---------------------------------------------------------------- other workers, rows, keys


def test_queues_that_are_estimated_alike_are_round_robin(glm):
    """The device took 151 µs with round robin here, 210 with the list that looks faster."""
    plan = Planner(glm, 132).plan(Batch(((8, 65536),) * 16))
    estimates = plan.estimates_us
    assert 0.9 * estimates["round_robin"] < estimates["list"] < estimates["round_robin"]
    assert plan.queues.kind == "round_robin"


def test_a_list_that_is_clearly_faster_is_taken(glm, monkeypatch):
    times = {"round_robin": 100.0, "list": 89.0, "dynamic": 10.0}
    fake = lambda graph, queues, cost: SimpleNamespace(makespan=times[queues.kind])  # noqa: E731
    monkeypatch.setattr("megamoe.attention_pre.plan.simulate", fake)
    assert Planner(glm, 132).plan(PUBLISHED).queues.kind == "list"
    times["list"] = 91.0
    assert Planner(glm, 132).plan(PUBLISHED).queues.kind == "round_robin"


def test_the_hopper_retile(glm):
    """132 workers: one wave per stage (21 x split-K 6, 128, 128, 128 of N 256, 4 x 32)."""
    plan = Planner(glm, 132).plan(PUBLISHED)
    tasks = summarize(plan)["tasks_per_stage"]
    wave = {"B0": 126, "D0": 128, "D1": 128, "D2": 128, "E1": 128, "A0": 16, "B0.final": 16}
    assert {name: tasks[name] for name in wave} == wave
    assert max(tasks.values()) <= 132
    assert plan.queues.kind == "round_robin"
    last = Planner(glm, 132, final="last").plan(PUBLISHED)
    assert "B0.final" not in summarize(last)["tasks_per_stage"]
    assert len(last.graph.events) == 70


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 16, 17, 64, 128])
@pytest.mark.parametrize("keys", [128, 2048, 131072])
def test_any_rows_and_keys(glm, rows, keys):
    new = min(rows, 8)
    requests = [(new, keys - 37 * i) for i in range(rows // new)]
    if rows % new:
        requests.append((rows % new, keys))
    batch = Batch(tuple((n, max(n, k)) for n, k in requests))
    assert batch.rows == rows
    plan = Planner(glm, 132).plan(batch)
    scores = [t.tile for t in plan.graph.tasks if plan.graph.stages[t.stage].name == "E1"]
    cells = np.zeros((rows, batch.logits_stride), np.uint8)
    for tile in scores:
        f = dict(tile.fields)
        cells[f["row"] : f["row"] + f["rows"], f["kv"] : f["kv"] + f["kv_len"]] += 1
    for b, (n, k) in enumerate(batch.requests):
        row = batch.first_row(b)
        assert (cells[row : row + n, :k] == 1).all(), f"request {b}"
    assert cells.max() == 1
    assert len(scores) <= 132 + len(batch.requests) * 2 * -(-8 // 4)
    encoded = encode(plan)
    assert (encoded.tasks >= 0).sum() == len(plan.graph.tasks)


@pytest.mark.parametrize("granule", [256, 512])
def test_new_keys_lie_where_the_plan_expects_them(granule):
    """For every length of a bucket, the new tokens fall into the declared range."""
    shortest = 1024 - granule + 1
    for new in (1, 5, 300):
        bucket = Batch(((new, shortest),), granule=granule).bucket()
        assert bucket == Batch(((new, 1024),), granule=granule).bucket()
        first, last = bucket.new_key_range(0, 0, new)
        for keys in range(max(shortest, new), 1025):
            assert first <= keys - new
            assert keys <= last
        assert first == max(shortest, new) - new
        assert last == 1024


def test_a_long_granule_needs_fewer_plans(glm):
    short, long = Planner(glm, 132), Planner(glm, 132)
    for keys in range(1000, 3000, 200):
        short.plan(Batch(((8, keys),)))
        long.plan(Batch(((8, keys),), granule=1024))
    assert (short.misses, long.misses) == (8, 3)


def test_specialisations_depend_on_the_band_alone(glm):
    """New lengths and requests re-plan; a new M band asks for new bodies, once."""
    planner = Planner(glm, 132)
    first = planner.plan(PUBLISHED)
    known = planner.specializations
    planner.plan(Batch(((8, 65536), (8, 300))))
    planner.plan(Batch(((8, 131072), (4, 512), (4, 16))))
    assert planner.specializations == known
    planner.plan(Batch(((8, 8192),) * 8))
    grown = planner.specializations
    assert grown[: len(known)] == known, "numbers of compiled bodies must not move"
    assert {s.band for s in grown[len(known) :]} == {64}
    planner.plan(Batch(((8, 2048),) * 7))
    assert planner.specializations == grown
    assert first.spec_ids == planner.plan(PUBLISHED).spec_ids


def test_plans_are_kept_by_bucket(glm):
    planner = Planner(glm, 132, keep=2)
    first = planner.plan(Batch(((8, 8100), (8, 5000))))
    assert planner.plan(Batch(((8, 8192), (8, 5120)))) is first
    assert (planner.hits, planner.misses) == (1, 1)
    assert planner.plan(Batch(((8, 8193), (8, 5000)))) is not first
    assert first.seconds.keys() >= {"tile", "dependences", "fusion", "schedule"}
    planner.plan(Batch(((8, 300),)))
    assert planner.plan(Batch(((8, 8100), (8, 5000)))) is not first, "the oldest plan was dropped"


def test_new_addresses_change_the_pointer_table_alone(published):
    encoded = encode(published)
    before = encoded.instructions.copy()
    names = list(encoded.buffers)
    one = operand_table(encoded, {name: 4096 * (i + 1) for i, name in enumerate(names)})
    two = operand_table(encoded, {name: 8192 * (i + 1) for i, name in enumerate(names)})
    assert one.shape == (8, 16)
    assert one.dtype == np.uint64
    assert (two == 2 * one).all()
    assert (encoded.instructions == before).all()
    slots = instruction_format().operands["index_score"]
    assert one[7, slots["logits"]] == 4096 * (names.index("E1.paged_logits.out") + 1)
    with pytest.raises(SpecError, match="no address for 'x', operand of stage A0"):
        operand_table(encoded, {})


def test_ragged_batches_number_rows_and_pages_by_request(glm):
    batch = Batch(((3, 700), (8, 100), (1, 513)), max_pages=40)
    plan = Planner(glm, 20).plan(batch)
    for task in plan.graph.tasks:
        if plan.graph.stages[task.stage].name != "E1":
            continue
        f = dict(task.tile.fields)
        b = f["item"]
        new = batch.requests[b][0]
        first = batch.first_row(b)
        assert first <= f["row"] < f["row"] + f["rows"] <= first + new
        assert f["page"] == 40 * b + f["kv"] // INDEX_PAGE
        assert f["aux"] == new - (f["row"] - first)
        assert f["stride"] == 768


def test_subgraphs_and_other_graphs(glm):
    counts = {"A0": 16, "A0 C0": 64, "A0 C0 B1 B0": 156, "D0 D2": 384, "E1": 64}
    for names, tasks in counts.items():
        planner = Planner(subgraph(glm, names.split()), 148, tiles=seed_tiles())
        plan = planner.plan(PUBLISHED)
        assert len(plan.graph.tasks) == tasks, names
        encode(plan)
    plan = Planner(dense_mlp_graph(1024, 512), 10).plan(Batch(((16, 16),)))
    assert [s.opcode for s in plan.graph.stages] == ["norm_quant", "gemm_swiglu", "gemm_store"]
    encode(plan)


def test_gemm_tiles_are_needed_as_soon_as_they_are_there():
    """A split-K part of the second GEMM waits for the columns that it multiplies, no more."""
    graph = partition(dense_mlp_graph(512, 512))
    tiles = TileConfig("split", 16, {"gemm_store": Tiling(split_k=4)})
    plan = Planner(graph, 10, tiles=tiles).plan(Batch(((16, 16),)))
    events = [e for e in plan.graph.events if e.label.startswith("gemm_swiglu")]
    assert [e.threshold for e in events] == [1, 1, 1, 1]


# ---------------------------------------------------------------- queues


@pytest.mark.parametrize("kind", ["round_robin", "list", "dynamic"])
def test_queues_hold_each_task_once_and_finish(glm, kind):
    plan = Planner(glm, 132, queue=kind).plan(PUBLISHED)
    timeline = simulate(plan.graph, plan.queues)
    assert timeline.makespan > 10
    assert plan.queues.dynamic == (kind == "dynamic")
    for event in plan.graph.events:
        published = max(
            timeline.finish[t] for u in event.producers for t in plan.graph.units[u].tasks
        )
        for task in event.consumers:
            assert timeline.start[task] > published


def test_list_scheduling_beats_round_robin_where_bodies_cost_little(glm):
    cheap = CostModel(event_us=1.0, body_us=0.4)
    for batch in (PUBLISHED, Batch(((1, 2048),)), Batch(((8, 65536),) * 8)):
        estimates = Planner(glm, 132, cost=cheap, final="rows").plan(batch).estimates_us
        assert estimates["list"] <= estimates["round_robin"]


def test_a_queue_against_the_order_is_refused(published):
    queues = replace(published.queues, workers=(tuple(range(731, -1, -1)),))
    with pytest.raises(SpecError, match="deadlock"):
        simulate(published.graph, replace(queues, num_workers=1))
    short = replace(published.queues, workers=published.queues.workers[1:])
    with pytest.raises(SpecError, match="not each of 732 once"):
        simulate(published.graph, short)


# ---------------------------------------------------------------- refusals


def test_wrong_policies_are_refused(glm):
    stages = tile_graph(glm, PUBLISHED, seed_tiles())
    for pair, policy, why in (
        (("main_query", "absorb_query"), "exact", "exactly the box"),
        (("head_gate", "index_query"), "cover", "parts of a sum"),
        (("norm_quant", "qkv_a"), "exact", "exactly the box"),
    ):
        with pytest.raises(SpecError, match=why):
            build_task_graph(glm, stages, {**POLICIES, pair: policy})
    graph = build_task_graph(glm, stages, {})
    needs = [n for t, ns in zip(graph.tasks, graph.needs, strict=True) for n in ns]
    assert all(len(n.units) == len(graph.stages[n.stage].units) for n in needs), "all are whole"


def test_missing_and_double_writes_are_refused(glm):
    stages = list(tile_graph(glm, PUBLISHED, seed_tiles()))
    c0 = next(i for i, s in enumerate(stages) if s.name == "C0")
    holed = replace(stages[c0], tiles=stages[c0].tiles[1:], units=stages[c0].units[:-1])
    with pytest.raises(SpecError, match="every part exactly once"):
        build_task_graph(glm, [*stages[:c0], holed, *stages[c0 + 1 :]])
    d0 = next(i for i, s in enumerate(stages) if s.name == "D0")
    doubled = replace(stages[d0], tiles=(stages[d0].tiles[1], *stages[d0].tiles[1:]))
    with pytest.raises(SpecError, match=r"stage D0: both .* are written"):
        build_task_graph(glm, [*stages[:d0], doubled, *stages[d0 + 1 :]])


def test_graphs_refuse_what_no_body_computes():
    g = OpGraph("odd")
    x = g.runtime_arg("x", ("M", 256))
    with g.stage("S"):
        g.add(g.rmsnorm(x, g.bound_weight("w", (256,)), 1e-5), x)
    with pytest.raises(SpecError, match="no task body"):
        partition(g)
    with pytest.raises(SpecError, match="shapes must be equal"):
        g.add(x, g.runtime_arg("y", ("M", 128)))
    with pytest.raises(SpecError, match="already has a tensor 'x'"):
        g.runtime_arg("x", ("M", 1))
    with pytest.raises(SpecError, match="another graph"):
        OpGraph("other").quant(x)


def test_batches_and_tilings_refuse_nonsense():
    for requests in ((), ((0, 5),), ((6, 5),)):
        with pytest.raises(SpecError):
            Batch(requests)
    with pytest.raises(SpecError, match="the batch needs"):
        Batch(((1, 5000),), max_pages=3)
    graph = partition(attention_pre_graph(SMALL))
    tiles = TileConfig("odd", 8, {"B0": Tiling(split_k=3)})
    with pytest.raises(SpecError, match="split-K 3"):
        Planner(graph, 4, tiles=tiles).plan(Batch(((1, 70),)))
    with pytest.raises(SpecError, match="num_workers = 0"):
        Planner(graph, 0, tiles=TileConfig("whole", 8)).plan(Batch(((1, 70),)))
    assert choose_tiles(graph, Batch(((1, 70),)), 1).block_m == 8


def test_the_planner_needs_neither_torch_nor_numpy():
    code = (
        "import sys; import megamoe.attention_pre.plan, megamoe.attention_pre.graphs;"
        "bad = {'torch', 'numpy', 'megamoe._native'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_record_matches_the_planner():
    fmt = instruction_format()
    assert (fmt.max_waits, fmt.max_signals) == (MAX_WAITS, MAX_SIGNALS)
    assert fmt.operand_slots == OPERAND_SLOTS
    assert 4 * fmt.words == RECORD_BYTES
    assert 4 * fmt.counter_stride == COUNTER_BYTES
    assert fmt.words == 32
    used = [w for first, n in fmt.fields.values() for w in range(first, first + n)]
    assert sorted(used) == list(range(32)), "fields tile the record"
    assert all(len(slots) <= fmt.operand_slots for slots in fmt.operands.values())
    assert len(set(fmt.flags.values())) == len(fmt.flags)
