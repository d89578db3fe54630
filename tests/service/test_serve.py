"""The whole service over CPU ranks: answers, and every row of the fault matrix.

One service lives through the faults in turn, as a deployed one would; each test leaves it serving.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.service.served import (
    BIG_SHAPE,
    ROOT,
    SHAPE,
    Served,
    infer,
    inputs_of,
    make_tokens,
    output_bits,
)
from tests.service.test_remote import serving, until

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(180)]
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def served():
    options = ("--fault-injection", "--timeout", str(TIMEOUT_S), "--max-restarts", "4")
    with Served(*options, "--heartbeat", "0.2", "--progress-timeout", "8") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def client(served):
    served.wait_ready()
    with served.client() as client:
        yield client


def same(have, want):
    differ = np.argwhere(have != want)
    assert have.shape == want.shape
    assert not len(differ), f"at {differ[0]}: {have[tuple(differ[0])]} != {want[tuple(differ[0])]}"


# ---------------------------------------------------------------- answers


def test_answers_match_the_oracle(client):
    import torch

    from megamoe.reference.moe import moe_forward_detail
    from megamoe.spec import MoESpec
    from megamoe.weights import random_experts
    from tests.compare import assert_matches_oracle

    spec = MoESpec(hidden=256, inter=128, num_experts=8, topk=2, num_shared=1)
    x, ids, weights = make_tokens(77, seed=5)
    have = infer(client, x, ids, weights).as_numpy("output")
    every = list(random_experts(spec, 0, 1, 0))
    torch_x = torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    args = (torch_x, torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights))
    detail = moe_forward_detail(spec, *args, every[:8], every[8:])
    y = torch.from_numpy(have.view(np.uint16).copy()).view(torch.bfloat16)
    assert_matches_oracle(y, detail.y, spec)


def test_an_answer_does_not_depend_on_its_neighbours(served, client):
    """64 requests at once, of both kinds, NaN, Inf and arbitrary bits among them: every bit is that
    of the request alone.
    """
    cases = []
    for seed in range(64):
        x, ids, weights = make_tokens(1 + seed * 5 % 23, seed)
        if seed % 8 == 1:
            x[0, :7] = np.array(np.nan, ml_dtypes.bfloat16)
        if seed % 8 == 5:
            x[-1, 9] = np.array(np.inf, ml_dtypes.bfloat16)
            weights[0] = (np.nan, np.inf)
        if seed % 4 < 2:
            cases.append((x, ids, weights))
            continue
        # FP8: usual values, or any code with scales at both ends of what is accepted.
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 56, x.shape, np.uint8) | rng.integers(0, 2, x.shape, np.uint8) << 7
        scales = np.full((len(x), 2), 0.5, np.float32)
        if seed % 8 == 6:
            codes = rng.integers(0, 256, x.shape, np.uint8)
            scales = rng.choice(np.array([0, 1e-45, 1, 3e38], np.float32), scales.shape)
        cases.append((codes, ids, weights, scales))
    alone = [output_bits(client, *case) for case in cases]
    together: dict[int, np.ndarray] = {}
    step_sizes = []

    def work(first: int) -> None:
        with served.client() as mine:
            for number in range(first, 64, 16):
                result = infer(mine, *cases[number])
                step_sizes.append(result.get_response()["parameters"]["step_tokens"])
                together[number] = result.as_numpy("output").view(np.uint16)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, want in enumerate(alone):
        same(together[number], want)
    own = [len(case[0]) for case in cases]
    assert sum(step_sizes) > sum(own), "no two requests shared a step"


def test_fp8_activations_give_the_bits_of_their_bf16_origin(client):
    import torch

    from megamoe.reference.quant import quantize_1x128

    x, ids, weights = make_tokens(33, seed=6)
    q, scales = quantize_1x128(torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16))
    raw = q.view(torch.uint8).numpy()
    same(
        output_bits(client, raw, ids, weights, scales.numpy()), output_bits(client, x, ids, weights)
    )


def test_the_layers_router_decides_when_no_routes_come(client):
    x, _, _ = make_tokens(21, seed=7)
    wanted = ["output", "topk_ids", "topk_weights", "routing_counts", "ring_high_water", "timings"]
    result = infer(client, x, outputs=wanted)
    ids, weights = result.as_numpy("topk_ids"), result.as_numpy("topk_weights")
    assert ids.min() >= 0
    assert weights.sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    same(result.as_numpy("output").view(np.uint16), output_bits(client, x, ids, weights))
    counts = np.bincount(ids.ravel(), minlength=8)
    assert result.as_numpy("routing_counts").tolist() == counts.tolist()
    water = result.as_numpy("ring_high_water")
    assert water.shape == (2, 2)
    assert (water > 0).all()
    queue, host, kernel = result.as_numpy("timings")
    assert kernel > 0
    assert queue >= 0
    assert host > 0
    # One token is routed the same in any company.
    one = infer(client, x[4:5], outputs=["topk_ids", "topk_weights"])
    assert one.as_numpy("topk_ids").tolist() == ids[4:5].tolist()
    assert one.as_numpy("topk_weights").tobytes() == weights[4:5].tobytes()


def test_the_fullest_request_and_one_token_more(client):
    x, ids, weights = make_tokens(128, seed=8)
    assert output_bits(client, x, ids, weights).shape == (128, 256)
    x, ids, weights = make_tokens(129, seed=8)
    with pytest.raises(InferenceServerException, match=r"129 tokens: must be 0\.\.128") as caught:
        infer(client, x, ids, weights)
    assert caught.value.status() == "400"


def test_clients_that_hang_up_leave_no_trace(served, client):
    """Three hundred requests whose clients are gone at some moment, beside four that wait."""
    case = make_tokens(31, seed=12)
    want = output_bits(client, *case)
    body, size = InferenceServerClient.generate_request_body(inputs_of(*make_tokens(64, seed=13)))
    head = (
        f"POST /v2/models/moe/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {size}\r\n\r\n"
    ).encode()
    rng = random.Random(5)
    with Load(served, want, case, clients=4) as load:
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", served.port)) as conn:
                whole = head + bytes(body)
                conn.sendall(whole[: rng.choice([len(whole), len(whole), len(whole) // 2])])
                time.sleep(rng.random() * 0.02)
                # Reset: neither side has the answer.
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert load.good > 20
    assert not load.wrong
    deadline = time.monotonic() + 5
    while served.metric("megamoe_queue_requests"):
        assert time.monotonic() < deadline, "a request of nobody waits"
        time.sleep(0.05)
    assert served.metric("megamoe_group_generation") == 1
    # Their memory is free: as many tokens wait as ever may.
    full = make_tokens(128, seed=14)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: one_request(served, full), range(4)))
    for answer in answers[1:]:
        same(answer, answers[0])


def one_request(served: Served, case) -> np.ndarray:
    with served.client() as client:
        return output_bits(client, *case)


def test_telemetry_says_what_it_cannot_read(served, client):
    deadline = time.monotonic() + 5
    while "megamoe_telemetry_available{" not in (text := httpx.get(served.url + "/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if not Path("/dev/nvidia0").exists():
        assert 'megamoe_telemetry_available{rank="0",source="nvml"} 0.0' in text
        assert "megamoe_gpu_" not in text
    assert served.metric('megamoe_steps_total{kind="heartbeat"}') > 0


def test_a_rank_that_goes_blind_says_so_and_lives_on(served, client):
    """The signals of fault injection reach the thread that reads sensors, and do not end it."""

    def unread(rank: int) -> str:
        name = ""
        with httpx.stream("GET", served.url + "/events", timeout=10) as events:
            for line in events.iter_lines():
                if line == "event: state":
                    name = "state"
                elif name and line.startswith("data:"):
                    sensors = json.loads(line[5:])["telemetry"]
                    return next((s["unavailable"] for s in sensors if s["rank"] == rank), "")
        raise AssertionError("no state was sent")

    for action, blind in (("blind", True), ("see", False)):
        served.fault(1, action)
        deadline = time.monotonic() + 5
        while (unread(1) == "told not to look") != blind:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert unread(0) != "told not to look"
    assert served.metric("megamoe_group_generation") == 1


def test_processes_and_files_are_private(served):
    served.note_processes()
    commands = {pid: " ".join(p.cmdline()) for pid, p in served.seen.items() if p.is_running()}
    [http] = [pid for pid, line in commands.items() if "-m service" in line]
    assert "libtorch" not in Path(f"/proc/{http}/maps").read_text()
    [folder] = Path(served.folder.name).iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.glob("*.sock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # Shared memory has no name that could be left behind.
    mine = set(served.seen)
    for pid in mine:
        maps = Path(f"/proc/{pid}/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        assert all("(deleted)" in line for line in lines if "/dev/shm/" in line)


def test_under_torchrun_with_the_smallest_rings_beside_another_service(client):
    """The same bits as from roomy rings; a third service that wants its port is told so."""
    with Served("--ring-blocks", "1", "--timeout", "20", direct=True) as served:
        served.wait_ready()
        argv = [sys.executable, "-m", "launcher.serve", "--random", "hidden=128,inter=128,"
                "experts=2,topk=1", "--ranks", "1", "--port", str(served.port)]  # fmt: skip
        third = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert third.returncode == 2
        assert f"cannot listen on 127.0.0.1:{served.port}" in third.stderr
        case = make_tokens(128, seed=3)
        with served.client() as mine:
            tight = output_bits(mine, *case)
        assert served.metric("megamoe_ring_backpressure_events_total") > 0
        same(output_bits(client, *case), tight)  # the other service on this machine
        served.signal(signal.SIGTERM)
        served.wait_exit(40)
        assert "draining" in served.text()
        served.assert_nothing_left()


# ---------------------------------------------------------------- faults of ranks


class Load:
    """Clients that infer until told to stop; every answer is right, or a clean refusal."""

    def __init__(self, served: Served, want: np.ndarray, case, clients: int = 8) -> None:
        self.served, self.want, self.case = served, want, case
        self.stop = threading.Event()
        self.good = 0
        self.refused: list[str] = []
        self.wrong: list[str] = []
        self.slowest = 0.0
        self.threads = [threading.Thread(target=self.work) for _ in range(clients)]

    def work(self) -> None:
        with self.served.client() as client:
            while not self.stop.is_set():
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
                    time.sleep(0.02)
                self.slowest = max(self.slowest, time.monotonic() - begun)

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a request hangs"


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
        served.fault(rank, action)
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
        served.note_processes()
        [rank] = [p for p in served.seen.values() if "launcher.serve" in p.cmdline()]
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


# ---------------------------------------------------------------- drain, ports, second service


@pytest.fixture
def slow_service():
    """A queue that holds many full steps, so that a signal finds requests in flight."""
    options = ("--heartbeat", "5", "--drain", "25", "--queue-tokens", "16384")
    with Served(*options, shape=BIG_SHAPE) as running:
        running.wait_ready()
        yield running


def in_flight(served: Served, count: int):
    """Requests of a full step each, in threads; their outcomes."""
    case = make_tokens(128, seed=1, hidden=1024, topk=8)
    outcomes: list[str] = []

    def work() -> None:
        try:
            with served.client() as client:
                output_bits(client, *case)
            outcomes.append("ok")
        except InferenceServerException as error:
            outcomes.append(error.status() or "lost")
        except OSError:
            outcomes.append("closed")

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while served.metric("megamoe_queue_requests") + len(outcomes) < count:
        assert time.monotonic() < deadline, outcomes
    assert len(outcomes) < count, "the layer is too fast for this test: give it more requests"
    return threads, outcomes


def test_sigterm_finishes_what_runs_and_ends_with_0(slow_service):
    threads, outcomes = in_flight(slow_service, 32)
    slow_service.signal(signal.SIGTERM)
    deadline = time.monotonic() + 5
    while slow_service.ready():
        assert time.monotonic() < deadline
    with pytest.raises(InferenceServerException, match="shutting down") as caught:
        one_request(slow_service, make_tokens(1, seed=1, hidden=1024, topk=8))
    assert caught.value.status() == "503"
    for thread in threads:
        thread.join(60)
    assert outcomes == ["ok"] * 32
    assert slow_service.wait_exit(30) == 0, slow_service.text()
    slow_service.assert_nothing_left()


def test_a_second_sigterm_does_not_wait(slow_service):
    threads, outcomes = in_flight(slow_service, 32)
    begun = time.monotonic()
    slow_service.signal(signal.SIGTERM)
    time.sleep(0.5)
    slow_service.signal(signal.SIGTERM)
    code = slow_service.wait_exit(30)
    took = time.monotonic() - begun
    for thread in threads:
        thread.join(30)
    assert len(outcomes) == 32
    if "".join(outcomes) != "ok" * 32:
        assert code != 0
    assert took < 15
    slow_service.assert_nothing_left()


def test_sigterm_while_the_ranks_load():
    with Served() as served:
        deadline = time.monotonic() + 60
        while not served.port:
            assert time.monotonic() < deadline, served.text()
            served.look_for_port()
            time.sleep(0.05)
        assert not served.ready()
        served.signal(signal.SIGTERM)
        assert served.wait_exit(30) == 0, served.text()
        served.assert_nothing_left()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from launcher.synthetic import write_checkpoint
    from megamoe.checkpoint import Checkpoint

    folder = tmp_path_factory.mktemp("served") / "model"
    return Checkpoint.open(write_checkpoint(folder, "deepseek_v3", seed=5))


@pytest.fixture(scope="module")
def served_checkpoint(checkpoint):
    options = ("--checkpoint", str(checkpoint.path), "--layer", "1", "--max-restarts", "0")
    with Served(*options, shape=None) as running:
        running.wait_ready()
        yield running


def test_a_layer_of_a_checkpoint_with_its_router(checkpoint, served_checkpoint):
    """``megamoe serve --checkpoint DIR --layer N``: routes and weights are those of the files."""
    import torch

    from megamoe.reference.moe import moe_forward_detail
    from megamoe.weights import iter_local_experts
    from tests.compare import assert_matches_oracle

    spec = checkpoint.moe_spec(1)
    x, _, _ = make_tokens(40, seed=3, hidden=spec.hidden)
    torch_x = torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    want_ids, want_weights = checkpoint.router(1)(torch_x)
    experts = list(iter_local_experts(checkpoint, 1, 0, 1))
    routed, shared = experts[: spec.num_experts], experts[spec.num_experts :]
    wanted = ["output", "topk_ids", "topk_weights"]
    with served_checkpoint.client() as client:
        result = infer(client, x, outputs=wanted)
        assert client.get_model_metadata("moe")["inputs"][0]["shape"] == [-1, spec.hidden]
    ids, weights = result.as_numpy("topk_ids"), result.as_numpy("topk_weights")
    assert (ids == want_ids.numpy()).all(), np.argwhere(ids != want_ids.numpy())[0]
    assert weights == pytest.approx(want_weights.float().numpy(), rel=1e-6)
    args = torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(weights.copy())
    detail = moe_forward_detail(spec, torch_x, *args, routed, shared)
    y = torch.from_numpy(result.as_numpy("output").view(np.uint16).copy()).view(torch.bfloat16)
    assert_matches_oracle(y, detail.y, spec)


def test_a_killed_supervisor_takes_everything_with_it(served_checkpoint):
    served_checkpoint.signal(signal.SIGKILL)
    served_checkpoint.wait_exit(5)
    served_checkpoint.assert_nothing_left(60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "0.0.0.0"), "no API key"),
        (("--random", "hidden=100,inter=128,experts=8,topk=2"), "hidden = 100"),
        (("--random", "hidden=256"), "missing"),
        (("--random", "nothing"), "not understood"),
        (("--checkpoint", "/nonexistent"), "give either"),
        (("--drain", "60"), "drain_s = 60"),
        (("--telemetry-interval", "0.001"), "must be 0, for none, or at least 0.05 s"),
    ],
)
def test_bad_settings_end_before_anything_starts(options, said, monkeypatch):
    from launcher.cli import app

    def spawned(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", spawned)
    argv = ["serve", "--random", "hidden=256,inter=128,experts=8,topk=2", "--port", "0"]
    ended = CliRunner().invoke(app, [*argv, *options])
    assert ended.exit_code == 2
    assert said in " ".join(ended.output.split())


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
