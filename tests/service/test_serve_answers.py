"""The whole service over CPU ranks: answers, what it says of itself, and that both are private."""

from __future__ import annotations

import json
import random
import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.service.served import (
    HTTP,
    Load,
    infer,
    inputs_of,
    make_tokens,
    one_request,
    output_bits,
    same,
)

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(180)]


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
    generation = served.metric("megamoe_group_generation")
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
    assert served.metric("megamoe_group_generation") == generation
    # Their memory is free: as many tokens wait as ever may.
    full = make_tokens(128, seed=14)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: one_request(served, full), range(4)))
    for answer in answers[1:]:
        same(answer, answers[0])


def test_telemetry_says_what_it_cannot_read(served, client):
    deadline = time.monotonic() + 5
    while "megamoe_telemetry_available{" not in (text := HTTP.get(served.url + "/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    if not Path("/dev/nvidia0").exists():
        assert 'megamoe_telemetry_available{rank="0",source="nvml"} 0.0' in text
        assert "megamoe_gpu_" not in text
    assert served.metric('megamoe_steps_total{kind="heartbeat"}') > 0


def test_a_rank_that_goes_blind_says_so_and_lives_on(served, client):
    """The signals of fault injection reach the thread that reads sensors, and do not end it."""
    generation = served.metric("megamoe_group_generation")

    def unread(rank: int) -> str:
        name = ""
        with HTTP.stream("GET", served.url + "/events", timeout=10) as events:
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
    assert served.metric("megamoe_group_generation") == generation


def test_processes_and_files_are_private(served):
    [http] = served.running("service")
    assert "libtorch" not in Path(f"/proc/{http.pid}/maps").read_text()
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
