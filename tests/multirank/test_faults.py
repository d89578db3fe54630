"""Killed, stopped and late ranks. Each test starts its own rank processes: torchrun's agent would
end the survivors before they could say what they saw."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.multirank import fault_rank
from tests.multirank.fault_rank import LIMIT_S, RESET_LIMIT_S

pytestmark = pytest.mark.multirank
SLACK_S = 3.0  # of a busy machine, on top of a limit
ANSWER_LIMIT_S = 60.0

# Ranks are forked off a server that has imported torch once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([fault_rank.__name__])


class Rank:
    """A rank process and its answers."""

    def __init__(self, rank: int, num_ranks: int, store: Path, script: str) -> None:
        self.pipe, other = CONTEXT.Pipe()
        args = (rank, num_ranks, str(store), script, other)
        self.process = CONTEXT.Process(target=fault_rank.main, args=args, daemon=True)
        self.process.start()
        other.close()

    def answer(self) -> dict:
        assert self.pipe.poll(ANSWER_LIMIT_S), "no answer"
        return self.pipe.recv()

    def go(self) -> None:
        self.pipe.send("go")

    def exit_code(self) -> int:
        self.process.join(timeout=20)
        assert self.process.exitcode is not None, "the rank did not end"
        return self.process.exitcode


@pytest.fixture
def start(tmp_path):
    """Starts ranks with a script each, waits until all are open; kills what is left at the end."""
    ranks: list[Rank] = []

    def start_ranks(*scripts: str) -> list[Rank]:
        for r, script in enumerate(scripts):
            ranks.append(Rank(r, len(scripts), tmp_path / "store", script))
        for rank in ranks:
            assert rank.answer()["window"] > fault_rank.WINDOW_BYTES
        return ranks

    used = shutil.disk_usage("/dev/shm").used
    yield start_ranks
    for rank in ranks:
        rank.process.kill()
        rank.exit_code()
    # No window outlives its group, however the ranks ended. Windows have no names to look for.
    window = fault_rank.WINDOW_BYTES
    deadline = time.monotonic() + 20
    while shutil.disk_usage("/dev/shm").used - used >= window and time.monotonic() < deadline:
        time.sleep(0.2)
    assert shutil.disk_usage("/dev/shm").used - used < window


def check_record(record: dict, peer: int, *, observers: set[int], epoch: int | None) -> None:
    assert record["peer"] == peer, record
    assert record["rank"] in observers, record
    assert record["want"] != record["have"], record
    assert epoch is None or record["epoch"] == epoch, record
    assert record["waited"] < LIMIT_S + SLACK_S, record
    for word in (f"rank {peer}", record["role"], record["phase"], record["tag"], "want", "have"):
        assert word in record["message"], record


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_rank(start, victim):
    """Survivors name the rank, and say why the group cannot be reset; rank 0 is no exception."""
    scripts = ["run,hold,run,reset,run"] * 3
    scripts[victim] = "run,hold"
    ranks = start(*scripts)
    for rank in ranks:
        assert rank.answer()["ok"]
    ranks[victim].process.kill()
    ranks[victim].exit_code()
    survivors = {0, 1, 2} - {victim}
    for r in survivors:
        ranks[r].go()
    for r in survivors:
        record = ranks[r].answer()
        assert not record["ok"]
        check_record(record, victim, observers=survivors, epoch=2)
        assert (record["phase"], record["tag"]) == ("exchange", "counts_flag")
    for r in survivors:
        reset = ranks[r].answer()
        assert not reset["ok"]
        assert victim in reset["missing"]
        assert f"{RESET_LIMIT_S:g} s" in reset["message"]
        assert "new group" in reset["message"]
    for r in survivors:
        assert ranks[r].exit_code() != 0  # GroupBroken again: the last run is refused


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_lost_during_a_call(start, how):
    """Wherever in a call it happens, the others end within the limit and name the rank."""
    ranks = start("loop", "loop", "loop")
    for rank in ranks:
        assert rank.answer()["step"] == "loop"
    time.sleep(0.3)
    os.kill(ranks[1].process.pid, how)
    for r in (0, 2):
        check_record(ranks[r].answer(), 1, observers={0, 2}, epoch=None)
        assert ranks[r].exit_code() == 0


def test_late_rank_then_reset(start):
    """The late rank sees the same fault; reset makes the complete group right again."""
    ranks = start("run,run,reset,run", "run,late,run,reset,run")
    before = [rank.answer() for rank in ranks]
    assert all(b["ok"] for b in before)
    for rank in ranks:
        record = rank.answer()
        check_record(record, 1, observers={0}, epoch=2)
    for rank in ranks:
        assert rank.answer()["ok"]
    for rank, first in zip(ranks, before, strict=True):
        again = rank.answer()
        assert again["ok"]
        assert again["digest"] == first["digest"]
        assert rank.exit_code() == 0


def test_nothing_is_left_behind(start):
    """All ranks killed at once, in the middle of their calls."""
    ranks = start("loop", "loop")
    for rank in ranks:
        assert rank.answer()["step"] == "loop"
    for rank in ranks:
        rank.process.kill()
