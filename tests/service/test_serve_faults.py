"""Lost ranks, lost processes, small memory: each row of the fault matrix that needs ranks.

One service lives through the faults in turn, as a deployed one would; each test leaves it serving.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from launcher.serving.worker import Shared, Worker
from service import ipc
from service.engine import EngineUnavailable
from tests.service.fake_group import open_group, request, serving, until
from tests.service.served import (
    ROOT,
    SHAPE,
    TIMEOUT_S,
    Load,
    Served,
    make_tokens,
    output_bits,
    same,
)

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(180)]


def test_under_torchrun_with_the_smallest_rings_beside_another_service(client):
    """The same bits as from roomy rings; a third service that wants its port is told so."""
    with Served("--ring-blocks", "1", "--timeout", "20", direct=True) as served:
        served.wait_ready()
        argv = [sys.executable, "-m", "launcher.serve", "--random", "hidden=128,inter=128,"
                "experts=2,topk=1", "--ranks", "1", "--port", str(served.port)]  # fmt: skip
        third = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert third.returncode == 2
        assert f"cannot listen on 127.0.0.1:{served.port}: Address already in use: " in third.stderr
        assert "choose another --port" in third.stderr
        case = make_tokens(128, seed=3)
        with served.client() as mine:
            tight = output_bits(mine, *case)
        # A rank that takes its blocks late: the others wait for room, and nothing is overwritten.
        [slow] = [p for p in served.running("launcher.serve") if p.environ().get("RANK") == "1"]
        with Load(served, tight, case, clients=4) as load:
            for _ in range(6):
                time.sleep(0.03)
                slow.suspend()
                time.sleep(0.1)
                slow.resume()
        assert load.good > 0
        assert load.slowest > 0.09, "the rank was slow for nobody"
        assert load.wrong + load.refused == []
        assert served.metric("megamoe_ring_backpressure_events_total") > 0
        same(output_bits(client, *case), tight)  # the other service on this machine
        served.signal(signal.SIGTERM)
        served.wait_exit(40)
        assert "draining" in served.text()
        served.assert_nothing_left()


def test_what_is_stopped_and_continued_goes_on(served, client):
    """As with Ctrl-Z, or under a debugger: it is not taken for a signal to end."""
    generation = served.metric("megamoe_group_generation")
    case = make_tokens(24, seed=9)
    want = output_bits(client, *case)
    for rank in (0, 1):
        served.fault(rank, "stop")
        time.sleep(0.25)
        served.fault(rank, "continue")
    served.signal(signal.SIGSTOP)
    time.sleep(0.25)
    served.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert served.ready(), served.text()
    assert served.metric("megamoe_group_generation") == generation
    same(output_bits(client, *case), want)


@pytest.mark.parametrize(
    ("rank", "action", "within_s"),
    [(1, "kill", 1.5), (0, "kill", 1.5), (1, "stop", TIMEOUT_S + 6), (0, "stop", 8 + 3)],
    ids=["kill-rank-1", "kill-rank-0", "stop-rank-1", "stop-rank-0"],
)
def test_a_lost_rank_is_named_and_the_group_comes_back(served, client, rank, action, within_s):
    case = make_tokens(24, seed=9)
    want = output_bits(client, *case)
    generation = served.metric("megamoe_group_generation")
    with Load(served, want, case) as load:
        time.sleep(0.5)
        assert load.good > 0
        if (rank, action) == (1, "stop"):
            load.pause()  # rank 1 waits for a step: the layer will find it missing, not its report
        served.fault(rank, action)
        load.go.set()
        deadline = time.monotonic() + within_s
        while served.ready():
            assert time.monotonic() < deadline, served.text()
            time.sleep(0.02)
        assert f"rank {rank}" in served.why_not_ready()
        served.wait_ready(generation=int(generation) + 1)
        good = load.good
        time.sleep(0.5)
        assert load.good > good, "no answers after the restart"
    assert not load.wrong
    assert any(f"rank {rank}" in message for message in load.refused), set(load.refused)
    assert load.slowest < within_s + 5
    same(output_bits(client, *case), want)
    if (rank, action) == (1, "stop"):
        # The wait that expired is on record: who waited for whom, in which phase.
        message = next(m for m in load.refused if "waited more than" in m)
        assert re.search(r"waited more than 3 s for rank 1: role \w+, phase \w+", message)
        assert re.search(r"epoch \d+, want \d+, have \d+", message)


def test_when_restarts_run_out_the_service_ends_with_a_failure(served):
    """The last of the tests that share this service: four restarts are behind it."""
    served.wait_ready()
    served.fault(0, "kill")
    assert served.wait_exit(40) != 0
    served.assert_nothing_left()
    assert list(Path(served.folder.name).iterdir()) == []


def test_signals_reach_the_rank_whatever_thread_takes_them(tmp_path, monkeypatch):
    """A driver's thread, older than the rank's signal mask, may be the one that a signal finds."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, threading, time\n"
        "if 'RANK' in os.environ:\n"
        "    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "    from megamoe.telemetry import Sampler\n"
        "    read = Sampler.read\n"  # takes ms on a GPU, in which nobody waits for signals
        "    Sampler.read = lambda self: (time.sleep(0.03), read(self))[1]\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    options = ("--fault-injection", "--telemetry-interval", "0.05", "--max-restarts", "0")
    with Served(*options, ranks=1) as served:
        served.wait_ready()
        rank = next(p for p in served.running("launcher.serve") if "RANK" in p.environ())
        blocked = [
            int(re.search(r"SigBlk:\s*(\w+)", (thread / "status").read_text())[1], 16)
            for thread in Path(f"/proc/{rank.pid}/task").iterdir()
            if thread.name != str(rank.pid)
        ]
        assert 0 in blocked, "no such thread: this test shows nothing"
        with httpx.Client(base_url=served.url) as http:
            for turn in range(100):
                body = {"rank": 0, "action": ("blind", "see")[turn % 2]}
                assert http.post("/debug/fault", json=body).status_code == 200, served.text()
        time.sleep(0.5)
        assert served.ready(), served.text()
        assert served.metric("megamoe_group_generation") == 1
        rank.send_signal(signal.SIGTERM)
        served.wait_exit(30)
        assert "draining" in served.text()
        assert "died" not in served.text()


def test_a_window_that_does_not_fit_says_how_many_bytes():
    """One rank, with this test as its HTTP process."""

    async def main():
        async with serving() as (engine, _):
            (engine.dir / "http.pid").write_text(str(os.getpid()))
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            env = {
                **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "MEGAMOE_RUN_DIR": str(engine.dir),
            }  # fmt: skip
            argv = [sys.executable, "-m", "launcher.serve", "--random", SHAPE]
            rank = subprocess.Popen([*argv, "--max-tokens", "16000000"], cwd=ROOT, env=env)
            try:
                await until(lambda: engine.fatal or rank.poll() is not None, 90)
                assert re.search(r"a window of \d{9,} bytes does not fit", engine.fatal[0])
                await until(lambda: rank.poll() is not None, 20)
                assert rank.returncode != 0
            finally:
                rank.kill()
                rank.wait()

    asyncio.run(main())


def test_a_heartbeat_with_other_bits_ends_the_group():
    """A worker whose layer computes something else than at first, and what clients hear of it."""

    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            await asyncio.to_thread(group.hear, ipc.Submit)
            shared = Shared(group=group.name)
            worker = Worker(SimpleNamespace(run_dir=engine.dir), 1, 2, shared)

            def steps():
                for step, checksum in ((1, 7), (2, 0), (3, 7), (4, 9)):  # 0: of a step with work
                    report = ipc.RankReport(1, step, 0.0, 1, checksum, [], None, None, [])
                    assert worker._checked(report) is report

            worker._serve = steps
            await asyncio.to_thread(worker.work)
            assert shared.code != 0
            with pytest.raises(EngineUnavailable, match="rank 1: heartbeat of step 4 gave other"):
                await asyncio.wait_for(job, 5)
            assert [(fault.kind, fault.rank) for fault in engine.faults] == [("mismatch", 1)]
            assert engine.status().state == "failed"

    asyncio.run(main())
