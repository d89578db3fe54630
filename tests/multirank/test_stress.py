"""``megamoe stress``: over processes, and that it sees a difference."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from launcher import soak, stress, stress_cases
from launcher.thread_ranks import run_in_threads
from megamoe.errors import SpecError
from megamoe.layer import MoELayer
from megamoe.spec import EpConfig, MoESpec

SMALL = ["--tokens", "10", "--hidden", "128", "--inter", "128", "--experts", "4", "--topk", "2"]


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(stress.command)
    return app


@pytest.mark.multirank
def test_two_rank_processes(tmp_path):
    out = tmp_path / "stress.json"
    recorded = tmp_path / "recorded.pt"
    torch.save(torch.tensor([[0, 0], [3, -1], [1, 2]]), recorded)
    args = ["-m", "launcher.stress", "--ranks", "2", "--sizes", "1,2", "--output", str(out), *SMALL]
    args += ["--replay", str(recorded)]
    done = subprocess.run([sys.executable, *args, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    started = "torchrun --nproc-per-node 2 -m launcher.stress --sizes 1,2 "
    assert result["meta"]["command"].startswith(started)
    rows = result["rows"]
    # Of one rank, cases are shared out: each rank has done some, and rank 0 has all rows.
    alone = [r for r in rows if r["ranks"] == 1]
    routings = len(stress_cases.ROUTINGS) + 1
    assert len(alone) == (routings - 2) * len(stress_cases.RINGS)
    assert set(Counter(r["routing"] for r in alone).values()) == {len(stress_cases.RINGS)}
    assert result["summary"]["ended"]
    assert result["summary"]["cases"] == len(rows)
    rows = [r for r in rows if r["ranks"] == 2]
    assert len(rows) == 3 * routings * len(stress_cases.RINGS)
    assert all(r["bitwise_equal"] and r["ok"] for r in rows)
    assert sum(r["backpressure_events"] > 0 for r in rows) >= len(rows) // 2
    assert all(r["high_water_l1"] <= r["ring_blocks_l1"] for r in rows)
    # Nothing waits for a slot where every block has its own; and rings of one block are reused.
    assert all(r["reuses_l1"] + r["reuses_l2"] or not r["backpressure_events"] for r in rows)
    assert all(r["reuses_l1"] for r in rows if r["ring_blocks_l1"] == 1 and r["blocks"] > 1)
    assert any(r["reuses_l1"] == 0 for r in rows)
    assert max(r["max_over_mean"] for r in rows) == 2.0  # all_to_one
    assert max(r["skew"]["empty_experts"] for r in rows) == 3  # one_expert


def test_ranks_as_threads(app, tmp_path):
    """The same cases in one process, EP sizes below the number of ranks among them."""
    out = tmp_path / "stress.json"
    args = ["--threads", "--ranks", "3", "--sizes", "1,3", "--output", str(out), "--json"]
    result = CliRunner().invoke(app, [*args, *SMALL, "--experts", "6"])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    by_size = {n: [r for r in rows if r["ranks"] == n] for n in (1, 3)}
    assert len(by_size[1]) == len(stress_cases.RINGS) * 13
    assert len(by_size[3]) == len(stress_cases.RINGS) * len(stress_cases.ROUTINGS) * 3
    assert all(len(r["tokens_per_rank"]) == 3 for r in by_size[3])
    assert all(r["ok"] for r in rows)
    assert sum(r["backpressure_events"] > 0 for r in rows) >= len(rows) // 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--sizes", "1,3"], "--experts 4 cannot be shared by 3 ranks"),
        (["--calls", "2"], "--experts 4 cannot be shared by 3 ranks"),
        (["--calls", "2", "--soak", "1"], "--calls 2 and --soak 1"),
    ],
    ids=str,
)
def test_what_no_run_could_do_is_said_once(app, options, what):
    result = CliRunner().invoke(app, ["--threads", "--ranks", "3", *options, *SMALL])
    assert result.exit_code == 2, result.output
    assert result.stderr.count(what) == 1
    assert "have nothing to do" not in result.stderr
    assert "EP1" not in result.stderr


def test_ranks_without_work_are_named(capsys):
    stress._say_if_idle((1, 2), 3, threads=False)
    assert capsys.readouterr().err == (
        "of 3 ranks 1 at EP2 have nothing to do; --sizes 3 makes a group of all\n"
    )
    stress._say_if_idle((2,), 3, threads=True)
    assert "of 3 ranks 1 at EP2 have nothing to do" in capsys.readouterr().err
    for threads in (False, True):
        stress._say_if_idle((1, 2, 4), 4, threads=threads)
        assert capsys.readouterr().err == ""


def test_a_soak_of_threads(app):
    args = ["--threads", "--ranks", "2", "--calls", "60", "--misses", "1", "--timeout", "1.5"]
    result = CliRunner().invoke(app, [*args, "--rounds", "2", "--json", *SMALL])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"]
    assert (found["ranks"], found["missed_calls"]) == (2, 1)
    assert found["calls"] >= 60
    assert 0 < found["reused"] <= found["calls"]
    assert found["backpressure"]["events"] > 0
    assert found["batches"] == 2 * len(stress_cases.ROUTINGS)
    # Each round has had about half of the calls, on rings of its own.
    by_round = [[x for x in found["layers"] if x["round"] == r] for r in (0, 1)]
    assert all(sum(x["calls"] for x in some) > 20 for some in by_round)
    drawn = [[(x["ring_blocks_l1"], x["ring_blocks_l2"]) for x in some[3:]] for some in by_round]
    assert drawn[0] != drawn[1]


def test_a_soak_of_many_rounds_and_misses_ends_in_time(app, monkeypatch):
    """What is still planned when the time is over is not begun, by no group of several."""
    opened, open_layers = [], soak.open_layers
    monkeypatch.setattr(
        soak, "open_layers", lambda *a: opened.append(a[0].which) or open_layers(*a)
    )
    args = ["--threads", "--ranks", "1", "--groups", "2", "--soak", "0.5", "--rounds", "500"]
    args += ["--misses", "500", "--timeout", "0.2", "--layers", "2", "--json", *SMALL]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads("[" + result.stdout.replace("}\n{", "},{") + "]")
    assert len(found) == 2
    assert all(f["ended"] and f["ok"] for f in found)
    for f in found:
        assert f["rounds"] < 100
        assert len(f["layers"]) == 2 * f["rounds"]
        # Opening takes longer than a round, which has a call all the same.
        assert all(
            any(x["calls"] for x in f["layers"][i : i + 2]) for i in range(0, 2 * f["rounds"], 2)
        )
        # Each takes 0.3 s; without a look at the time after each, 16 follow one another.
        assert f["missed_calls"] <= 3
    assert len(opened) == sum(f["rounds"] for f in found)


def test_what_one_thread_raises_ends_the_others(monkeypatch):
    """Ranks that wait for the failed one hear of it; the cause is raised, not the echo."""
    monkeypatch.delenv("RANK", raising=False)

    def work(group):
        if group.rank == 1:
            raise ValueError("of rank 1")
        group.barrier()
        return 0

    with pytest.raises(ValueError, match="of rank 1"):
        run_in_threads(3, "cpu", work)
    assert run_in_threads(3, "cpu", lambda group: max(group.gather(group.rank))) == 2
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SpecError, match="torchrun started this process"):
        run_in_threads(2, "cpu", work)


def test_sees_a_flipped_bit(app, monkeypatch):
    """One bit of one element, with one ring size only, and the command fails."""
    run = MoELayer.run

    def flipped(self, *args):
        y = run(self, *args)
        if self.config.ring_l1_blocks == 3 and y.numel():
            y.view(torch.int16)[0, 7] ^= 1
        return y

    monkeypatch.setattr(MoELayer, "run", flipped)
    result = CliRunner().invoke(app, ["--ranks", "1", "--sizes", "1", "--json", *SMALL])
    assert result.exit_code == 1
    failures = json.loads(result.stdout)["failures"]
    assert {(f["ring_blocks_l1"], f["ring_blocks_l2"]) for f in failures} == {(3, 5)}
    assert not any(f["bitwise_equal"] for f in failures)


def test_sees_a_wrong_result(app, monkeypatch):
    """The same error with every ring size: only the oracle can tell."""
    run = MoELayer.run
    monkeypatch.setattr(MoELayer, "run", lambda self, *args: run(self, *args) * 1.01)
    result = CliRunner().invoke(app, ["--ranks", "1", "--sizes", "1", "--json", *SMALL])
    assert result.exit_code == 1
    failures = json.loads(result.stdout)["failures"]
    assert failures
    assert all(f["bitwise_equal"] and "error" in f["problem"] for f in failures)


def test_what_is_not_counted_is_not_zero(app, monkeypatch):
    """A backend that does not count gives null and a dash."""
    counters = MoELayer.counters
    names = ("high_water_l1", "high_water_l2", "backpressure_events")
    monkeypatch.setattr(
        MoELayer, "counters", lambda self: replace(counters(self), **dict.fromkeys(names))
    )
    args = ["--ranks", "1", "--sizes", "1", *SMALL]
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["with_backpressure"] is None
    shown = CliRunner().invoke(app, args)
    assert "– with back-pressure" in shown.stdout


def test_what_is_not_counted_can_be_traced(app, monkeypatch):
    """As on GPUs: no counters, but a traced build. The counters know better, and agree."""
    monkeypatch.setenv("MEGAMOE_TRACE", "1")  # undone after the test
    counters = MoELayer.counters
    names = ("backpressure_events", "high_water_l1", "high_water_l2")
    pairs = []

    def uncounted(self):
        known = counters(self)
        blind = replace(known, **dict.fromkeys(names))
        if self.trace().num_tokens:
            pairs.append((known, stress_cases.pressure(self, blind)))
        return blind

    monkeypatch.setattr(MoELayer, "counters", uncounted)
    args = ["--ranks", "1", "--sizes", "1", "--workers", "1", "--traced", "--json", *SMALL]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["with_backpressure"] > 0
    assert len(pairs) > 50
    for known, (events, l1, l2) in pairs:
        assert events == known.backpressure_events
        assert (l1, l2) <= (known.high_water_l1, known.high_water_l2)
        assert l1 > 0
        assert l2 > 0


@pytest.mark.multirank
def test_soak_keeps_the_cases_of_its_file_and_mends_a_missed_call(tmp_path):
    out = tmp_path / "stress.json"
    out.write_text(json.dumps({"meta": {}, "rows": [{"ok": True}]}))
    args = ["-m", "launcher.stress", "--ranks", "2", "--output", str(out), *SMALL]
    args += ["--calls", "50", "--misses", "1", "--timeout", "1.5", "--json"]
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(out.read_text())
    assert result["rows"] == [{"ok": True}]
    (soak,) = result["soaks"]
    assert soak["meta"]["command"].startswith("torchrun --nproc-per-node 2 -m launcher.stress ")
    assert soak["ok"]
    assert soak["missed_calls"] == 1
    assert soak["calls"] == sum(layer["calls"] for layer in soak["layers"]) >= 50
    rings = {(x["ring_blocks_l1"], x["ring_blocks_l2"]) for x in soak["layers"]}
    assert (1, 1) in rings
    assert len(rings) >= 4


def test_a_soak_sees_a_flipped_bit(app, monkeypatch):
    run = MoELayer.run

    def flipped(self, *args):
        y = run(self, *args)
        if self.config.ring_l1_blocks == 1 and y.numel():
            y.view(torch.int16)[-1, 5] ^= 1
        return y

    monkeypatch.setattr(MoELayer, "run", flipped)
    args = ["--ranks", "1", "--calls", "40", "--json", *SMALL]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["wrong"] > 0
    assert all("rings of layer 1" in w for w in found["first_wrong"])


def test_rows_of_threads_are_collected_on_the_first():
    found = {}

    def work(group):
        rows = torch.full((group.rank, 2), float(group.rank))
        found[group.rank] = group.collect_rows(rows, [0, 1, 2])
        return 0

    assert run_in_threads(3, "cpu", work) == 0
    assert found[1] is None
    assert found[2] is None
    assert found[0].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]


def test_groups_of_threads_soak_at_once(app, tmp_path):
    """Each group has a seed of its own; they take turns where they open, close and write."""
    out = tmp_path / "stress.json"
    args = ["--threads", "--ranks", "2", "--groups", "3", "--calls", "30", "--rounds", "2"]
    result = CliRunner().invoke(app, [*args, "--seed", "5", "--output", str(out), *SMALL])
    assert result.exit_code == 0, result.output
    soaks = json.loads(out.read_text())["soaks"]
    assert sorted(s["seed"] for s in soaks) == [5, 6, 7]
    assert all(s["ok"] and s["ended"] and s["calls"] >= 30 for s in soaks)
    drawn = {json.dumps([x["ring_blocks_l1"] for x in s["layers"]]) for s in soaks}
    assert len(drawn) == 3
    alone = CliRunner().invoke(app, ["--ranks", "2", "--groups", "3", *SMALL])
    assert alone.exit_code == 2


def test_groups_take_turns():
    inside, most, turns = [], [], []
    lock = threading.Lock()

    def work(group):
        for _ in range(3):
            with group.alone():
                with lock:
                    inside.append(group.which)
                    most.append(len(set(inside)))
                    turns.append(group.which)
                group.barrier()
                with lock:
                    inside.remove(group.which)
                group.barrier()
        return 0

    assert run_in_threads(2, "cpu", work, groups=3) == 0
    assert max(most) == 1
    assert turns == [0, 0, 1, 1, 2, 2] * 3


def test_what_a_thread_of_one_group_raises_ends_the_other_groups():
    def work(group):
        with group.alone():
            if (group.which, group.rank) == (1, 0):
                raise ValueError("of group 1")
        return 0

    with pytest.raises(ValueError, match="of group 1"):
        run_in_threads(2, "cpu", work, groups=3)


@pytest.mark.parametrize(
    ("rows", "blocks"), [(128, 1), (129, 1), (144, 1), (145, 2), (257, 2), (272, 2), (273, 3)]
)
def test_a_tail_spares_an_expert_a_block(rows, blocks):
    spec = MoESpec(hidden=256, inter=256, num_experts=2, topk=1)
    config = EpConfig(num_ranks=1, max_tokens=512, block_m=144)
    idx = torch.zeros(rows, 1, dtype=torch.int64)
    assert stress_cases.blocks_of(spec, config, [idx]) == [blocks]
    shared = replace(spec, num_shared=2)
    assert stress_cases.blocks_of(shared, config, [idx]) == [3 * blocks]
