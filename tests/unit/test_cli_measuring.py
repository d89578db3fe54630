"""What commands measure with: times, memory, samples, verdicts, and errors shared by ranks."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch
import typer
from typer.testing import CliRunner

from launcher import console, ranks, timing, verify
from launcher.meta import typed_command
from megamoe.errors import CheckpointError, InputError
from megamoe.reference.tolerance import oracle_tolerance
from megamoe.spec import MoESpec

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=2)


def test_times_are_order_statistics():
    found = timing.times([n / 1e3 for n in range(200, 0, -1)], [2.0, 1.0, 4.0])
    assert found.cpu_us == pytest.approx(2e6)
    assert found.median_us == pytest.approx(100.5e3)
    assert found.p99_us == pytest.approx(198e3)
    assert found.best_us == pytest.approx(1e3)
    assert found.calls == 200
    assert timing.times([0.5, 0.25], [0.0]).p99_us == pytest.approx(0.5e6)


def test_contenders_take_turns_and_a_long_turn_ends_early():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    alone = ranks.Group(0, 1, "cpu")
    found = timing.take_turns(alone, calls, rounds=2, calls_per_round=2, warmup=1)
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert found["a"].calls == found["b"].calls == 4
    order.clear()
    found = timing.take_turns(alone, calls, rounds=2, calls_per_round=50, turn_s=0.0)
    assert [t.calls for t in found.values()] == [2, 2]


class Threads(ranks.Group):
    """A group of threads, to test what ranks do together."""

    def __init__(self, rank: int, shared: dict) -> None:
        super().__init__(rank, shared["num_ranks"], "cpu")
        object.__setattr__(self, "_shared", shared)

    def gather(self, value):
        shared = self._shared
        shared["values"][self.rank] = value
        shared["barrier"].wait()
        values = list(shared["values"])
        shared["barrier"].wait()
        return values


def run_threads(num_ranks: int, body):
    shared = {
        "num_ranks": num_ranks,
        "values": [None] * num_ranks,
        "barrier": threading.Barrier(num_ranks, timeout=20),
    }
    results: list = [None] * num_ranks

    def one(rank: int) -> None:
        try:
            results[rank] = body(Threads(rank, shared))
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[rank] = error

    threads = [threading.Thread(target=one, args=(r,)) for r in range(num_ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def test_the_slowest_rank_is_the_time():
    import time

    def body(group):
        call = {"call": lambda: time.sleep(0.02 if group.rank == 1 else 0.0)}
        return timing.take_turns(group, call, rounds=1, calls_per_round=3)["call"]

    first, second = run_threads(2, body)
    assert first == second
    assert first.best_us >= 20e3
    assert first.cpu_us < 20e3, "sleeping takes no processor time"


def test_an_error_on_one_rank_is_raised_on_all():
    def body(group):
        def work() -> int:
            if group.rank == 1:
                raise InputError("bad file")
            return group.rank

        return group.together(work)

    found = run_threads(3, body)
    assert [type(e) for e in found] == [ranks.RankFailed] * 3
    assert {str(e) for e in found} == {"rank 1: bad file"}
    assert [e.printed_elsewhere for e in found] == [False, True, True]


def test_what_to_do_about_an_error_of_one_rank_is_printed_with_it(tmp_path):
    """Also what is short and clear of files and memory; by rank 0 alone."""
    missing = tmp_path / "none"
    errors = {
        "rank 1: no such folder": CheckpointError("no such\n folder"),
        f"rank 1: {missing}: No such file or directory": FileNotFoundError(2, "No such", "x"),
        "rank 1: out of memory: more memory wanted at once": MemoryError(),
    }
    for text, error in errors.items():

        def body(group, error=error):
            def work() -> None:
                if group.rank == 1 and isinstance(error, FileNotFoundError):
                    missing.read_text()
                if group.rank == 1:
                    raise error

            return group.together(work)

        first, second = run_threads(2, body)
        said, silent = printed(first), printed(second)
        assert said[0].startswith(f"error: {text}"), said
        has_hint = isinstance(error, CheckpointError)
        assert [line.partition(" ")[0] for line in said] == ["error:"] + ["hint:"] * has_hint
        assert silent == []


def printed(error: Exception) -> list[str]:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        with console.errors_to_exit(debug=False, rank=0):
            raise error

    found = CliRunner().invoke(app, [])
    assert found.exit_code == console.EXIT_ERROR, repr(found.exception)
    return found.stderr.splitlines()


def test_the_same_error_everywhere_is_said_once():
    def body(group):
        def work() -> None:
            raise InputError("bad option")

        return group.together(work)

    assert {str(e) for e in run_threads(2, body)} == {"bad option"}


def test_a_bug_keeps_its_own_type_and_the_others_hear_of_it():
    def body(group):
        def work() -> None:
            if group.rank == 0:
                raise ZeroDivisionError("bug")

        return group.together(work)

    bug, heard = run_threads(2, body)
    assert isinstance(bug, ZeroDivisionError)
    assert isinstance(heard, ranks.RankFailed)
    assert "rank 0: ZeroDivisionError: bug" in str(heard)


def test_memory_meter_sees_what_is_touched_and_its_peak():
    meter = timing.MemoryMeter()
    size = 64 << 20
    memory = mmap.mmap(-1, size)
    for offset in range(0, size, 4096):
        memory[offset] = 1
    meter.sample()
    memory.close()
    held = meter.now
    meter.sample()
    assert size <= held.rss <= size + (16 << 20)
    assert held.pss >= size - (1 << 20)
    assert meter.now.rss < held.rss - size // 2
    assert meter.peak.rss == held.rss


@pytest.mark.parametrize(("tokens", "most"), [(0, 4), (3, 4), (4, 4), (5, 4), (1000, 4), (9, 1)])
def test_sampled_rows_are_distinct_and_reach_both_ends(tokens, most):
    rows = verify.sample_rows(tokens, most, seed=1).tolist()
    assert rows == sorted(set(rows))
    assert len(rows) == min(tokens, most)
    assert all(0 <= r < tokens for r in rows)
    if tokens and most > 1:
        assert rows[0] == 0
        assert rows[-1] == tokens - 1


def test_a_wrong_value_is_named_with_index_and_both_values():
    expected = torch.randn(4, 256).bfloat16()
    actual = expected.clone()
    actual[2, 17] = 40.0
    good = verify.judge(expected, expected, oracle_tolerance(SPEC, 4))
    bad = verify.judge(actual, expected, oracle_tolerance(SPEC, 4))
    assert good.ok
    assert not bad.ok
    assert "(2, 17)" in bad.problem
    assert "40.0" in bad.problem
    assert bad.to_dict()["problem"] == bad.problem


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["cli", "bench", "moe", "--ranks", "1", "--tokens", "8"], "--ranks 1 --tokens 8"),
        (["bench_moe.py", "--tokens", "8"], "--ranks 2 --tokens 8"),
    ],
)
def test_a_result_names_the_command_once(monkeypatch, argv, typed):
    """Alone the process was started by the person, else by torchrun without ``--ranks``."""
    monkeypatch.setattr("sys.argv", argv)
    assert typed_command("bench moe", 2) == f"megamoe bench moe {typed}"
