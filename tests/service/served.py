"""A real service: supervisor, HTTP process, torchrun and CPU ranks, and clients that load it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
SHAPE = "hidden=256,inter=128,experts=8,topk=2,shared=1"
BIG_SHAPE = "hidden=1024,inter=1024,experts=8,topk=8"
TIMEOUT_S = 3.0
"""Of each wait inside a step, where a test waits for that."""
HTTP = httpx.Client(timeout=10, verify=False, limits=httpx.Limits(max_keepalive_connections=0))
"""A connection for each request, like ``httpx.get``: that reads the trusted certificates each time,
60 ms of a core."""


class Served:
    """One running service. ``direct`` starts torchrun itself instead of the supervisor.

    Without a shape, ``options`` say what is served.
    """

    def __init__(
        self, *options: str, ranks: int = 2, direct: bool = False, shape: str | None = SHAPE
    ) -> None:
        argv = ["--random", shape] if shape else []
        argv += ["--port", "0", "--max-tokens", "64", *options]
        if direct:
            head = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            head += ["-m", "launcher.serve"]
        else:
            head = ["-m", "launcher.serve", "--ranks", str(ranks)]
        self.log = tempfile.NamedTemporaryFile("w+", prefix="served-", suffix=".log")  # noqa: SIM115
        self.folder = tempfile.TemporaryDirectory(prefix="mm-")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": self.folder.name}
        env.pop("MEGAMOE_API_KEY", None)
        self.process = subprocess.Popen(
            [sys.executable, *head, *argv], cwd=ROOT, env=env, stdout=self.log, stderr=self.log
        )
        self.port = 0
        self.seen: dict[int, psutil.Process] = {}

    def text(self) -> str:
        return Path(self.log.name).read_text()

    def wait_ready(self, limit_s: float = 90.0, generation: int = 1) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            self.note_processes()
            self.look_for_port()
            if self.port and self.ready() and self.metric("megamoe_group_generation") >= generation:
                return
            time.sleep(0.1)

    def look_for_port(self) -> None:
        if not self.port and (found := re.search(r"127\.0\.0\.1:(\d+)", self.text())):
            self.port = int(found[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return HTTP.get(self.url + "/ready", timeout=5).status_code == 200
        return False

    def why_not_ready(self) -> str:
        return HTTP.get(self.url + "/ready", timeout=5).json().get("error", "")

    def metric(self, name: str) -> float:
        text = HTTP.get(self.url + "/metrics", timeout=5).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        return sum(values)

    def note_processes(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            mine = psutil.Process(self.process.pid).children(recursive=True)
            for process in mine:
                self.seen.setdefault(process.pid, process)
        for process in list(self.seen.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in process.children(recursive=True):
                    self.seen.setdefault(child.pid, child)

    def running(self, word: str) -> list[psutil.Process]:
        """Living processes with this word on their command line."""
        self.note_processes()
        found = []
        for process in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and word in process.cmdline():
                    found.append(process)
        return found

    def client(self):
        import tritonclient.http as oip

        return oip.InferenceServerClient(
            f"127.0.0.1:{self.port}", network_timeout=60.0, connection_timeout=60.0
        )

    def fault(self, rank: int, action: str) -> None:
        self.note_processes()
        body = {"rank": rank, "action": action}
        answer = HTTP.post(self.url + "/debug/fault", json=body, timeout=5)
        assert answer.status_code == 200, answer.text

    def signal(self, number: signal.Signals) -> None:
        self.note_processes()
        self.process.send_signal(number)

    def wait_exit(self, limit_s: float = 60.0) -> int:
        self.process.wait(limit_s)
        return self.process.returncode

    def assert_nothing_left(self, limit_s: float = 10.0) -> None:
        """No process of this service lives, and its folder is empty."""
        deadline = time.monotonic() + limit_s
        while True:
            alive = [p for p in self.seen.values() if p.is_running() and not _zombie(p)]
            left = list(Path(self.folder.name).rglob("*.sock"))
            if not alive and not left:
                return
            assert time.monotonic() < deadline, (alive, left, self.text())
            time.sleep(0.1)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_) -> None:
        self.note_processes()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for process in [self.process, *self.seen.values()]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait()
        self.log.close()
        with contextlib.suppress(OSError):
            self.folder.cleanup()


def _zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def make_tokens(n: int, seed: int, *, hidden: int = 256, experts: int = 8, topk: int = 2):
    """(hidden BF16 [n,H], ids int32 [n,K], weights float32 [n,K])."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, hidden), np.float32).astype(ml_dtypes.bfloat16)
    ids = rng.integers(0, experts, (n, topk), np.int32)
    ids[rng.random((n, topk)) < 0.1] = -1
    return x, ids, rng.random((n, topk), np.float32)


def inputs_of(x, ids=None, weights=None, scales=None):
    import tritonclient.http as oip

    named = [("hidden_states", x, "BF16" if scales is None else "UINT8")]
    if scales is not None:
        named.append(("hidden_scales", scales, "FP32"))
    if ids is not None:
        named += [("topk_ids", ids, "INT32"), ("topk_weights", weights, "FP32")]
    inputs = []
    for name, array, datatype in named:
        tensor = oip.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def infer(client, *arrays, outputs=None, **more):
    import tritonclient.http as oip

    wanted = None
    if outputs is not None:
        wanted = [oip.InferRequestedOutput(name, binary_data=True) for name in outputs]
    return client.infer("moe", inputs_of(*arrays), outputs=wanted, **more)


def output_bits(client, *arrays) -> np.ndarray:
    return infer(client, *arrays).as_numpy("output").view(np.uint16)


def one_request(served: Served, case) -> np.ndarray:
    """Bits of the answer to a request of a client of its own."""
    with served.client() as client:
        return output_bits(client, *case)


def same(have: np.ndarray, want: np.ndarray) -> None:
    """Bit for bit."""
    differ = np.argwhere(have != want)
    assert have.shape == want.shape
    assert not len(differ), f"at {differ[0]}: {have[tuple(differ[0])]} != {want[tuple(differ[0])]}"


class Load:
    """Clients that infer until told to stop; every answer is right, or a clean refusal."""

    def __init__(self, served: Served, want: np.ndarray, case, clients: int = 8) -> None:
        self.served, self.want, self.case = served, want, case
        self.stop, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.good = 0
        self.refused: list[str] = []
        self.wrong: list[str] = []
        self.slowest = 0.0
        self.threads = [threading.Thread(target=self.work) for _ in range(clients)]

    def work(self) -> None:
        from tritonclient.utils import InferenceServerException

        with self.served.client() as client:
            while not self.stop.is_set():
                self.go.wait()
                begun = time.monotonic()
                try:
                    have = output_bits(client, *self.case)
                    if (have != self.want).any():
                        self.wrong.append("other bits")
                    self.good += 1
                except InferenceServerException as error:
                    if error.status() not in ("503", "429"):
                        self.wrong.append(f"{error.status()}: {error.message()}")
                    self.refused.append(error.message())
                    time.sleep(0.1)
                self.slowest = max(self.slowest, time.monotonic() - begun)

    def pause(self) -> None:
        """Until ``go`` is set again, nobody asks; returns when all have their answers."""
        self.go.clear()
        deadline = time.monotonic() + 10
        while self.served.metric("megamoe_queue_requests"):
            assert time.monotonic() < deadline, "requests hang"
            time.sleep(0.02)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        self.go.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a request hangs"
