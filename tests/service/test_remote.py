"""The remote engine against ranks made of two sockets each: stale, replayed and broken messages."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from service import ipc
from service.engine import EngineBusy, EngineUnavailable, RequestExpired
from service.reports import EngineFault
from tests.service.fake_group import FakeGroup, open_group, request, serving, until


def test_answers_in_any_order_reach_their_own_request():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            wanted = [request(2 + i, seed=i) for i in range(4)]
            jobs = [asyncio.create_task(engine.run_moe(r)) for r in wanted]
            submits = [await asyncio.to_thread(group.hear, ipc.Submit) for _ in jobs]
            assert engine.status().num_requests == 4
            assert engine.status().num_tokens == 2 + 3 + 4 + 5
            for submit in reversed(submits):
                group.answer(submit)
            for given, result in zip(wanted, await asyncio.gather(*jobs), strict=True):
                want = np.frombuffer(given.hidden.join(), np.uint16) ^ 0x8000
                assert result.output == want.tobytes()
                result.release()
                assert result.kernel_s == 0.001
                assert result.high_water == ((1, 2), (3, 4))
            assert engine.status().num_requests == 0
            free = engine._group.arena.free_bytes
            assert free == engine._group.arena.nbytes

    asyncio.run(main())


def test_the_queue_is_bounded():
    async def main():
        async with serving(queue_tokens=150) as (engine, group):
            with pytest.raises(EngineUnavailable, match="starting"):
                await engine.run_moe(request())
            await open_group(engine, group)
            jobs = [asyncio.create_task(engine.run_moe(request(70))) for _ in range(2)]
            await asyncio.sleep(0.02)
            with pytest.raises(EngineBusy, match=r"140 tokens wait already .* at most 150"):
                await engine.run_moe(request(11))
            jobs += [asyncio.create_task(engine.run_moe(request(1))) for _ in range(2)]
            await asyncio.sleep(0.02)
            with pytest.raises(EngineBusy, match="4 requests wait already"):
                await engine.run_moe(request(1))
            for job in jobs:
                job.cancel()

    asyncio.run(main())


def test_a_withdrawn_request_keeps_its_memory_until_the_ranks_are_done():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            arena = engine._group.arena
            job = asyncio.create_task(engine.run_moe(request()))
            submit = await asyncio.to_thread(group.hear, ipc.Submit)
            job.cancel()
            cancel = await asyncio.to_thread(group.hear, ipc.Cancel)
            assert cancel.request == submit.request
            assert arena.free_bytes < arena.nbytes  # the ranks may be writing
            group.answer(submit)
            await until(lambda: arena.free_bytes == arena.nbytes)
            assert engine.rejected == []

    asyncio.run(main())


def test_an_expired_request_did_not_run():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            submit = await asyncio.to_thread(group.hear, ipc.Submit)
            group.say(ipc.Dropped(group.name, submit.request, True))
            with pytest.raises(RequestExpired, match="deadline"):
                await job
            assert engine._group.arena.free_bytes == engine._group.arena.nbytes

    asyncio.run(main())


def test_stale_replayed_and_malformed_messages_are_refused():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            submit = await asyncio.to_thread(group.hear, ipc.Submit)
            now = time.monotonic()
            # A former group, an unknown request, no MessagePack, another message's bytes.
            group.say(ipc.Done("b" * 16, submit.request, 1, 1, now, 0.0, []))
            await until(lambda: engine.rejected == ["other group"])
            group.done(submit.request + 1000)
            group.links[0].send(b"\xc1 no MessagePack")
            group.links[0].send(ipc.encode(ipc.Stop()))
            group.links[0].send_multipart([b"two", b"frames", b"more"])
            await until(lambda: len(engine.rejected) == 5)
            assert engine.rejected[1:] == ["unknown request"] + ["malformed"] * 3
            assert not job.done()
            group.answer(submit)
            (await job).release()
            # The answer again, and the step again.
            group.done(submit.request)
            group.stepped(1)
            group.say(ipc.Hello(group.name, 1, 2, os.getpid(), None), 1)
            await until(lambda: len(engine.rejected) == 8)
            # The hello came over another socket: its turn is not certain.
            assert sorted(engine.rejected[5:]) == [
                "other group",
                "replayed step",
                "unknown request",
            ]
            assert engine.status().state == "ready"

    asyncio.run(main())


def test_a_rank_that_dies_fails_the_requests_at_once_and_a_new_group_serves():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            jobs = [asyncio.create_task(engine.run_moe(request())) for _ in range(3)]
            await asyncio.to_thread(group.hear, ipc.Submit)
            begun = time.monotonic()
            group.processes[1].kill()
            for job in jobs:
                with pytest.raises(EngineUnavailable, match="rank 1 died"):
                    await job
            assert time.monotonic() - begun < 1.0
            assert engine.status().state == "failed"
            assert engine.status().reason == "rank 1 died"
            assert [f.kind for f in engine.faults] == ["died"]
            # What is left of the group is ended too.
            await until(lambda: group.processes[0].poll() is not None)
            assert group.processes[0].returncode == -signal.SIGKILL
            # The old group's words count no more; a new one's do.
            group.stepped(99)
            await until(lambda: engine.rejected == ["other group"])
            fresh = FakeGroup(engine.dir, "c" * 16)
            await open_group(engine, fresh)
            assert engine.status().generation == 2
            fresh.close()

    asyncio.run(main())


def test_a_rank_whose_connection_ends_first_is_lost_all_the_same():
    """The request that finds the connection gone is refused like those in flight, not an error."""

    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            await asyncio.to_thread(group.hear, ipc.Submit)
            group.links[0].close(linger=0)
            await asyncio.sleep(0.3)
            for late in (engine.run_moe(request()), job):
                with pytest.raises(EngineUnavailable, match="rank 0 died"):
                    await late
            assert engine.status().state == "failed"
            assert [f.kind for f in engine.faults] == ["died"]
            await until(lambda: all(p.poll() is not None for p in group.processes))

    asyncio.run(main())


def test_a_group_that_stands_still_is_found_and_the_silent_rank_named(monkeypatch):
    monkeypatch.setattr("service.group.SILENCE_S", 0.4)

    async def main():
        async with serving(progress_timeout_s=0.8) as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            stop = threading.Event()

            def live():
                while not stop.wait(0.1):
                    group.alive(0)

            thread = threading.Thread(target=live)
            thread.start()
            with pytest.raises(EngineUnavailable, match="rank 1 gave no sign of life"):
                await asyncio.wait_for(job, 5)
            stop.set()
            thread.join()
            assert engine.faults[0].kind == "stuck"
            assert engine.faults[0].rank == 1

    asyncio.run(main())


def test_the_rank_is_named_from_the_moment_on_at_which_the_group_is_late():
    """The status may be asked for before the watchdog looks."""

    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            engine._group.progress_at -= 60
            for number, rank in engine._group.ranks.items():
                rank.alive_at -= 60 if number == 1 else 0
            status = engine.status()
            assert status.state == "failed"
            assert status.reason.startswith("rank 1 gave no sign of life for 6"), status.reason

    asyncio.run(main())


def test_a_timeout_keeps_its_record():
    async def main():
        async with serving() as (engine, group):
            await open_group(engine, group)
            job = asyncio.create_task(engine.run_moe(request()))
            await asyncio.to_thread(group.hear, ipc.Submit)
            record = {"rank": 0, "peer": 1, "phase": "counts", "epoch": 3, "want": 4, "have": 3}
            fault = EngineFault(
                kind="timeout", rank=1, message="rank 0 waited 3 s for rank 1", record=record
            )
            group.say(ipc.Fault(group.name, fault))
            with pytest.raises(EngineUnavailable, match="rank 0 waited 3 s for rank 1"):
                await job
            assert engine.status().last_fault.record == record

    asyncio.run(main())


def test_a_layer_that_cannot_be_opened_is_fatal():
    async def main():
        async with serving() as (engine, group):
            group.say(ipc.CannotStart(1, "rank 1: a window of 9 bytes does not fit"))
            await until(lambda: engine.fatal)
            assert engine.fatal == ["rank 1: a window of 9 bytes does not fit"]
            assert "does not fit" in engine.status().reason

    asyncio.run(main())


def test_an_arena_that_does_not_fit_is_fatal():
    async def main():
        async with serving(queue_tokens=1 << 32) as (engine, group):
            group.hello()
            await until(lambda: engine.fatal)
            assert "bytes of /dev/shm" in engine.fatal[0]

    asyncio.run(main())


def test_the_socket_is_private():
    async def main():
        async with serving() as (engine, _):
            assert stat.S_IMODE((engine.dir / "engine.sock").stat().st_mode) == 0o600

    asyncio.run(main())
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with pytest.raises(PermissionError, match="only this user"):
            ipc.private_directory(Path(folder))
        with pytest.raises(PermissionError, match="shorter --run-dir"):
            ipc.private_directory(Path(folder) / ("x" * 100))


def test_fault_injection_reaches_the_process():
    async def main():
        async with serving() as (engine, group):
            with pytest.raises(EngineUnavailable):
                engine.inject_fault(0, "kill")
            await open_group(engine, group)
            with pytest.raises(ValueError, match="rank = 2"):
                engine.inject_fault(2, "kill")
            with pytest.raises(ValueError, match="one of kill, stop, continue, blind, see"):
                engine.inject_fault(0, "tickle")
            engine.inject_fault(0, "stop")
            state = Path(f"/proc/{group.processes[0].pid}/stat")
            await until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
            engine.inject_fault(0, "continue")
            group.processes[1].kill()
            group.processes[1].wait()
            with pytest.raises(EngineUnavailable, match="rank 1 died"):
                engine.inject_fault(1, "stop")

    asyncio.run(main())
