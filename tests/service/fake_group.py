"""A group of two ranks made of two sockets each, and an engine that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq

from service import ipc
from service.arena import Arena
from service.config import ServiceConfig
from service.engine import MoERequest, Segments
from service.remote import RemoteEngine
from service.reports import StepRecord, TelemetrySample
from tests.service.echo import LAYER


class FakeGroup:
    """Two ranks: sleeping processes, and one thread that talks for them."""

    def __init__(self, run_dir: Path, name: str = "a" * 16) -> None:
        self.name = name
        self.context = zmq.Context()
        self.processes = [
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            for _ in range(2)
        ]
        self.links = []
        for rank in range(2):
            link = ipc.connect(self.context, ipc.engine_address(run_dir), f"{name}:{rank}")
            self.links.append(link)
        self.submitted: list[ipc.Submit] = []
        self.cancelled: list[int] = []
        self.arena: Arena | None = None
        self.step = 0

    def say(self, message, rank: int = 0) -> None:
        self.links[rank].send(ipc.encode(message))

    def hello(self) -> None:
        for rank in (1, 0):
            layer = LAYER if rank == 0 else None
            self.say(ipc.Hello(self.name, rank, 2, self.processes[rank].pid, layer), rank)

    def hear(self, kind, limit_s: float = 5.0):
        """The next message of a kind to rank 0; remembers the others."""
        while True:
            assert self.links[0].poll(int(limit_s * 1000)), f"no {kind.__name__} came"
            message = ipc.decode_to_rank(self.links[0].recv())
            if isinstance(message, kind):
                return message

    def welcome(self) -> None:
        message = self.hear(ipc.Welcome)
        assert message.pids == [p.pid for p in self.processes]
        self.arena = Arena.attach(message.arena)

    def stepped(self, step: int | None = None) -> None:
        self.step = self.step + 1 if step is None else step
        record = StepRecord(
            step=self.step,
            num_requests=0,
            num_tokens=2,
            queue_s=0.0,
            host_s=0.0,
            kernel_s=0.0,
            rank_tokens=(1, 1),
        )
        self.say(ipc.Stepped(self.name, record))

    def alive(self, rank: int) -> None:
        sample = TelemetrySample(rank=rank, unavailable="no GPU")
        self.say(ipc.SignOfLife(self.name, rank, sample), rank)

    def answer(self, submit: ipc.Submit) -> None:
        """Writes the negated input as output, and says done."""
        at, n = submit.layout, submit.num_tokens
        view = np.frombuffer(self.arena.view, np.uint16)
        hidden = view[at.hidden // 2 :][: n * LAYER.hidden]
        view[at.output // 2 :][: n * LAYER.hidden] = hidden ^ 0x8000
        self.done(submit.request)

    def done(self, request: int) -> None:
        now = time.monotonic()
        self.say(ipc.Done(self.name, request, 7, 9, now, 0.001, [(1, 2), (3, 4)]))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def serving(**settings):
    config = ServiceConfig(**{"queue_requests": 4, "progress_timeout_s": 0.6, **settings})
    with tempfile.TemporaryDirectory(prefix="mm-") as folder:
        os.chmod(folder, 0o700)
        fatal: list[str] = []
        engine = RemoteEngine(config, Path(folder), on_fatal=fatal.append)
        engine.fatal = fatal
        engine.rejected = []
        engine.faults = []
        engine.observers.ipc_rejected.append(engine.rejected.append)
        engine.observers.fault.append(engine.faults.append)
        engine.dir = Path(folder)
        group = FakeGroup(engine.dir)
        try:
            yield engine, group
        finally:
            group.close()
            await asyncio.wait_for(engine.close(0.0), 5)


async def until(condition, limit_s: float = 5.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def open_group(engine, group):
    group.hello()
    await until(lambda: engine.layer is not None)
    await asyncio.to_thread(group.welcome)
    assert engine.status().state == "starting"  # until a step has proved progress
    group.stepped()
    await until(lambda: engine.status().state == "ready")


def request(n: int = 2, seed: int = 0, **more) -> MoERequest:
    rng = np.random.default_rng(seed)
    hidden = rng.integers(0, 1 << 16, n * LAYER.hidden, np.uint16)
    ids = np.zeros((n, LAYER.topk), np.int32)
    weights = np.ones((n, LAYER.topk), np.float32)
    return MoERequest(
        num_tokens=n,
        hidden=Segments([hidden.tobytes()]),
        topk_ids=memoryview(ids.tobytes()),
        topk_weights=memoryview(weights.tobytes()),
        **more,
    )
