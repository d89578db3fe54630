"""Begin and end of the service over CPU ranks: settings, checkpoints, signals."""

from __future__ import annotations

import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from tests.service.served import (
    BIG_SHAPE,
    Served,
    infer,
    make_tokens,
    one_request,
    output_bits,
)

pytestmark = [pytest.mark.multirank, pytest.mark.timeout(180)]


def slow_service(ranks: int) -> Served:
    """A queue that holds many full steps, so that a signal finds requests in flight."""
    options = ("--heartbeat", "5", "--drain", "25", "--queue-tokens", "16384")
    return Served(*options, ranks=ranks, shape=BIG_SHAPE)


def in_flight(served: Served, count: int, tokens: int):
    """Requests of a full step each, in threads; their outcomes."""
    case = make_tokens(tokens, seed=1, hidden=1024, topk=8)
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


def test_sigterm_finishes_what_runs_and_ends_with_0():
    with slow_service(ranks=2) as served:
        served.wait_ready()
        threads, outcomes = in_flight(served, 32, tokens=128)
        served.signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while served.ready():
            assert time.monotonic() < deadline
        with pytest.raises(InferenceServerException, match="shutting down") as caught:
            one_request(served, make_tokens(1, seed=1, hidden=1024, topk=8))
        assert caught.value.status() == "503"
        for thread in threads:
            thread.join(60)
        assert outcomes == ["ok"] * 32
        assert served.wait_exit(30) == 0, served.text()
        served.assert_nothing_left()


def test_a_second_sigterm_does_not_wait():
    with slow_service(ranks=1) as served:
        served.wait_ready()
        threads, outcomes = in_flight(served, 64, tokens=64)
        begun = time.monotonic()
        served.signal(signal.SIGTERM)
        while "draining" not in served.text():
            assert time.monotonic() < begun + 5
            time.sleep(0.01)
        served.signal(signal.SIGTERM)
        assert served.wait_exit(30) == 1
        took = time.monotonic() - begun
        for thread in threads:
            thread.join(30)
        # Else the drain was over before the second signal came: give it more requests.
        assert outcomes.count("ok") < len(outcomes) == 64
        assert took < 15
        served.assert_nothing_left()


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
        (("--drain", "60"), "--drain: drain_s = 60"),
        (("--max-body-mib", "0"), "--max-body-mib: max_body_bytes = 0"),
        (("--request-timeout", "0"), "--request-timeout: request_timeout_s = 0"),
        (("--telemetry-interval", "0.001"), "must be 0, for none, or at least 0.05 s"),
    ],
)
def test_bad_settings_end_before_anything_starts(options, said, monkeypatch):
    argv = ["--random", "hidden=256,inter=128,experts=8,topk=2", "--port", "0"]
    assert said in refusal([*argv, *options], monkeypatch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--layer is missing: MoE layers of"),
        (("--layer", "0"), "is a dense layer; MoE layers are 1"),
        (("--layer", "7"), "is not among the 2 layers; MoE layers are 1"),
        (("--layer", "1", "--ranks", "3"), "num_experts = 8 is not divisible by num_ranks = 3"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused_before_anything_starts(
    checkpoint, options, said, monkeypatch
):
    assert said in refusal(["--checkpoint", str(checkpoint.path), *options], monkeypatch)


def test_a_checkpoint_that_is_not_there(tmp_path, monkeypatch):
    for folder, said in (("none", "there is no such folder"), (".", "has no config.json")):
        argv = ["--checkpoint", str(tmp_path / folder), "--layer", "1"]
        assert said in refusal(argv, monkeypatch)


def refusal(argv: list[str], monkeypatch) -> str:
    """What ``megamoe serve`` says before it ends with status 2, no process started."""
    from launcher.cli import app

    def spawned(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", spawned)
    ended = CliRunner().invoke(app, ["serve", *argv])
    assert ended.exit_code == 2, ended.output
    return " ".join(ended.output.split())
