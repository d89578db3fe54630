"""The service over GPU ranks: answers, telemetry that is read, and a lost rank.

Speaks the protocol by hand over httpx, so that a machine with GPUs needs the service's packages and
nothing else.
"""

from __future__ import annotations

import json
import time

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from megamoe.reference.moe import moe_forward_detail
from megamoe.reference.tolerance import FP8_TENSOR_CORE_BITS
from megamoe.spec import MoESpec
from megamoe.weights import random_experts
from tests.compare import assert_bitwise, assert_matches_oracle
from tests.service.served import Served

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
SPEC = MoESpec(hidden=512, inter=256, num_experts=8, topk=2)
SHAPE = "hidden=512,inter=256,experts=8,topk=2"


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def infer(url: str, **tensors: tuple[str, torch.Tensor]) -> torch.Tensor:
    """BF16 [T,H] for tensors given as (datatype, tensor)."""
    parts, inputs = [], []
    for name, (datatype, tensor) in tensors.items():
        parts.append(raw(tensor))
        size = {"binary_data_size": len(parts[-1])}
        shape = list(tensor.shape)
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": size})
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    content = head + b"".join(parts)
    answer = httpx.post(url + "/v2/models/moe/infer", content=content, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    body = answer.content[int(answer.headers["inference-header-content-length"]) :]
    return torch.frombuffer(bytearray(body), dtype=torch.bfloat16).view(-1, SPEC.hidden)


@pytest.fixture(scope="module")
def served():
    ranks = min(torch.cuda.device_count(), 4)
    with Served(
        "--backend", "cuda", "--fault-injection", "--timeout", "5", ranks=ranks, shape=SHAPE
    ) as running:
        running.wait_ready(170)
        yield running


def call(seed: int = 1, tokens: int = 50):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, SPEC.hidden, generator=generator).to(torch.bfloat16)
    ids = torch.randint(-1, SPEC.num_experts, (tokens, SPEC.topk), generator=generator)
    weights = torch.rand(tokens, SPEC.topk, generator=generator)
    return x, ids.to(torch.int32), weights


def tensors(x, ids, weights):
    return {
        "hidden_states": ("BF16", x),
        "topk_ids": ("INT32", ids),
        "topk_weights": ("FP32", weights),
    }


def test_answers_match_the_oracle_and_do_not_depend_on_neighbours(served):
    x, ids, weights = call()
    y = infer(served.url, **tensors(x, ids, weights))
    experts = list(random_experts(SPEC, 0, 1, 0))
    detail = moe_forward_detail(SPEC, x, ids.long(), weights, experts, [])
    assert_matches_oracle(y, detail.y, SPEC, accumulator_bits=FP8_TENSOR_CORE_BITS)
    part = infer(served.url, **tensors(x[7:19], ids[7:19], weights[7:19]))
    assert_bitwise(part, y[7:19])


def test_sensors_are_read(served):
    deadline = time.monotonic() + 10
    while served.metric("megamoe_gpu_power_watts") == 0:
        assert time.monotonic() < deadline, httpx.get(served.url + "/metrics").text
        time.sleep(0.2)
    assert served.metric("megamoe_gpu_sm_clock_hertz") > 1e8
    assert served.metric("megamoe_gpu_temperature_celsius") > 0
    assert served.metric("megamoe_telemetry_available") >= 1


def test_a_killed_gpu_rank_comes_back(served):
    case = tensors(*call(2))
    want = infer(served.url, **case)
    generation = served.metric("megamoe_group_generation")
    served.fault(0, "kill")
    served.wait_ready(170, generation=int(generation) + 1)
    assert_bitwise(infer(served.url, **case), want)
