"""The service over GPU ranks: answers, telemetry that is read, lost and stopped ranks.

Speaks the protocol by hand over httpx, so that a machine with GPUs needs the service's packages and
nothing else.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from megamoe.reference.moe import moe_forward_detail
from megamoe.reference.quant import quantize_1x128
from megamoe.reference.tolerance import FP8_TENSOR_CORE_BITS
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights, random_experts
from tests.compare import assert_bitwise, assert_matches_oracle
from tests.service.served import HTTP, Served

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
SPEC = MoESpec(hidden=512, inter=256, num_experts=8, topk=2)
SHAPE = "hidden=512,inter=256,experts=8,topk=2"
TIMEOUT_S = 3.0


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def on_cpu(expert: ExpertWeights) -> ExpertWeights:
    names = ("w1", "w1_scale", "w2", "w2_scale")
    return replace(expert, **{name: getattr(expert, name).cpu() for name in names})


def metrics(served: Served) -> str:
    return HTTP.get(served.url + "/metrics", timeout=5).text


def readings(served: Served, rank: int) -> int:
    return len(re.findall(rf'^megamoe_gpu_\w+{{.*rank="{rank}"', metrics(served), re.M))


def wait_until(happened, limit_s: float, served: Served) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, served.text()
        time.sleep(0.02)


def infer(
    url: str, model: str, parameters: dict, **tensors: tuple[str, torch.Tensor]
) -> tuple[bytes, dict]:
    """Bytes of all outputs, and what the answer says of itself.

    Tensors are given as (datatype, tensor).
    """
    parts, inputs = [], []
    for name, (datatype, tensor) in tensors.items():
        parts.append(raw(tensor))
        size = {"binary_data_size": len(parts[-1])}
        shape = list(tensor.shape)
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": size})
    asked = {"inputs": inputs, "parameters": {"binary_data_output": True, **parameters}}
    head = json.dumps(asked).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    content = head + b"".join(parts)
    path = f"{url}/v2/models/{model}/infer"
    answer = HTTP.post(path, content=content, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    size = int(answer.headers["inference-header-content-length"])
    return answer.content[size:], json.loads(answer.content[:size])["parameters"]


def infer_moe(url: str, **tensors: tuple[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """BF16 [T,H] and what the answer says of itself."""
    content, told = infer(url, "moe", {}, **tensors)
    y = torch.frombuffer(bytearray(content), dtype=torch.bfloat16)
    return y.view(-1, SPEC.hidden), told


@pytest.fixture(scope="module")
def served():
    """Two ranks or more; on a single GPU they share it."""
    ranks = min(max(torch.cuda.device_count(), 2), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        options = ("--backend", "cuda", "--fault-injection", "--timeout", str(TIMEOUT_S))
        options += ("--heartbeat", "0.2", "--telemetry-interval", "0.05")
        with Served(*options, ranks=ranks, shape=SHAPE) as running:
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
    y, _ = infer_moe(served.url, **tensors(x, ids, weights))
    experts = random_experts(SPEC, 0, 1, 0, device="cuda")
    detail = moe_forward_detail(SPEC, x, ids.long(), weights, [on_cpu(e) for e in experts], [])
    assert_matches_oracle(y, detail.y, SPEC, accumulator_bits=FP8_TENSOR_CORE_BITS)
    part, _ = infer_moe(served.url, **tensors(x[7:19], ids[7:19], weights[7:19]))
    assert_bitwise(part, y[7:19])


def test_requests_that_share_a_step_get_the_bits_of_their_own(served):
    """Those with NaN and Inf too, and those beside them."""
    calls = [call(seed, 1 + 2 * seed) for seed in range(24)]
    for x, _, weights in calls[::3]:
        x[0, :9], x[-1, 100] = torch.nan, torch.inf
        weights[0, 0] = -torch.inf
    cases = [tensors(*each) for each in calls]
    alone = [infer_moe(served.url, **case)[0] for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda case: infer_moe(served.url, **case), cases))
    for (y, _), want in zip(together, alone, strict=True):
        assert_bitwise(y, want)
    own = sum(len(y) for y in alone)
    assert sum(told["step_tokens"] for _, told in together) > own, "no two requests shared a step"


def test_fp8_activations_give_the_bits_of_their_bf16_origin(served):
    x, ids, weights = call(3, 33)
    q, scales = quantize_1x128(x)
    fp8 = {"hidden_states": ("UINT8", q.view(torch.uint8)), "hidden_scales": ("FP32", scales)}
    have, _ = infer_moe(served.url, **{**tensors(x, ids, weights), **fp8})
    assert_bitwise(have, infer_moe(served.url, **tensors(x, ids, weights))[0])


def test_routes_of_the_layers_router_do_not_depend_on_neighbours(served):
    x, _, _ = call(7, 100)
    y, _ = infer_moe(served.url, hidden_states=("BF16", x))
    for rows in (slice(0, 1), slice(99, 100), slice(13, 77)):
        part, _ = infer_moe(served.url, hidden_states=("BF16", x[rows]))
        assert_bitwise(part, y[rows])


def test_kernel_time_is_that_of_the_gpu(served):
    """By events: less than the call's wall time, which holds launches and copies too."""
    case = tensors(*call(4))
    taken = []
    for _ in range(20):
        begun = time.monotonic()
        _, told = infer_moe(served.url, **case)
        taken.append((told["kernel_us"], (time.monotonic() - begun) * 1e6))
    kernel, wall = (statistics.median(column) for column in zip(*taken, strict=True))
    assert 3 < kernel < wall / 2, (kernel, wall)


def test_what_the_kernel_does_not_count_is_absent(served):
    infer_moe(served.url, **tensors(*call(5)))
    text = HTTP.get(served.url + "/metrics").text
    assert 'megamoe_steps_total{kind="work"}' in text
    assert "megamoe_ring_high_water_blocks{" not in text
    assert "megamoe_ring_backpressure_events_total{" not in text


def test_sensors_are_read(served):
    deadline = time.monotonic() + 10
    while served.metric("megamoe_gpu_power_watts") == 0:
        assert time.monotonic() < deadline, HTTP.get(served.url + "/metrics").text
        time.sleep(0.2)
    assert served.metric("megamoe_gpu_sm_clock_hertz") > 1e8
    assert served.metric("megamoe_gpu_temperature_celsius") > 0
    assert served.metric("megamoe_telemetry_available") >= 1
    assert served.metric("megamoe_gpu_energy_joules_total") > 0
    assert served.metric("megamoe_gpu_memory_used_bytes") > 1 << 20


def test_each_rank_reads_the_gpu_that_it_runs_on(served):
    """As many GPUs as ranks have, by UUID: none is read in another's place."""
    ranks = min(max(torch.cuda.device_count(), 2), 4)
    gpus = [torch.cuda.get_device_properties(n).uuid for n in range(torch.cuda.device_count())]
    wait_until(lambda: all(readings(served, rank) > 5 for rank in range(ranks)), 5, served)
    text = metrics(served)
    for rank in range(ranks):
        found = re.findall(rf'^megamoe_gpu_power_watts{{device="(.*)",rank="{rank}"', text, re.M)
        assert len(found) == 1, text
        assert found[0].endswith(f"GPU-{gpus[rank % len(gpus)]}"), (found, gpus)


def test_signals_under_load_end_no_rank(served):
    """A signal may find a driver's thread that is older than the rank's signal mask."""
    case = tensors(*call(8))
    want, _ = infer_moe(served.url, **case)
    generation = served.metric("megamoe_group_generation")
    ends = time.monotonic() + 4

    def work(_: int) -> int:
        answers = 0
        while time.monotonic() < ends:
            assert_bitwise(infer_moe(served.url, **case)[0], want)
            answers += 1
        return answers

    told = 0
    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=served.url) as http:
        clients = [pool.submit(work, number) for number in range(4)]
        while time.monotonic() < ends:
            for rank in (0, 1):
                body = {"rank": rank, "action": ("blind", "see")[told // 2 % 2]}
                answer = http.post("/debug/fault", json=body)
                assert answer.status_code == 200, answer.text + served.text()
                told += 1
            time.sleep(0.01)
        assert sum(client.result() for client in clients) > 40
    assert told > 60
    for rank in (0, 1):
        served.fault(rank, "see")
    assert served.ready(), served.text()
    assert served.metric("megamoe_group_generation") == generation


def test_sensors_that_cannot_be_read_any_more_are_absent(served):
    served.fault(1, "blind")
    wait_until(
        lambda: 'telemetry_available{rank="1",source="nvml"} 0.0' in metrics(served), 3, served
    )
    assert not readings(served, 1)
    assert readings(served, 0) > 5  # rank 0 looks on
    served.fault(1, "see")
    wait_until(lambda: readings(served, 1) > 5, 3, served)


def test_a_gpu_rank_that_is_stopped_and_continued_goes_on(served):
    case = tensors(*call(9))
    want, _ = infer_moe(served.url, **case)
    generation = served.metric("megamoe_group_generation")
    for rank in (1, 0):
        served.fault(rank, "stop")
        time.sleep(0.3)
        served.fault(rank, "continue")
    time.sleep(0.5)
    assert served.ready(), served.text()
    assert served.metric("megamoe_group_generation") == generation
    assert_bitwise(infer_moe(served.url, **case)[0], want)


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_gpu_rank_is_named_and_the_group_comes_back(served, rank):
    case = tensors(*call(2))
    want, _ = infer_moe(served.url, **case)
    generation = served.metric("megamoe_group_generation")
    served.fault(rank, "kill")
    wait_until(lambda: not served.ready(), 2.0, served)
    assert f"rank {rank}" in served.why_not_ready()
    served.wait_ready(170, generation=int(generation) + 1)
    assert_bitwise(infer_moe(served.url, **case)[0], want)


def test_a_stopped_gpu_rank_is_a_timeout_with_a_record(served):
    """Rank 0's kernel waits for a rank that launches nothing; its bounded wait ends the group."""
    case = tensors(*call(6))
    want, _ = infer_moe(served.url, **case)
    generation = served.metric("megamoe_group_generation")
    served.fault(1, "stop")
    begun = time.monotonic()
    wait_until(lambda: not served.ready(), 2 * TIMEOUT_S + 5, served)
    reason = served.why_not_ready()
    assert re.search(rf"waited more than {TIMEOUT_S:g} s for rank 1: role \w+, phase \w+", reason)
    assert re.search(r"epoch \d+, want \d+, have \d+", reason)
    assert time.monotonic() - begun > TIMEOUT_S - 1
    served.wait_ready(170, generation=int(generation) + 1)
    assert_bitwise(infer_moe(served.url, **case)[0], want)
    assert served.metric('megamoe_faults_total{kind="timeout",rank="1"}') == 1


ATTENTION = "hidden=512,heads=8,q_lora=256,kv_lora=256,nope=64,rope=64,index_heads=8"


@pytest.mark.timeout(300)
def test_attention_pre_over_a_sequence_gives_the_layers_bits():
    """Against the same layer in this process, on the same kind of GPU."""
    from launcher.serving.source import AttentionSource

    source = AttentionSource(ATTENTION, 16, 0)
    options = ("--backend", "cuda", "--attention-pre", ATTENTION, "--cache-pages", "16")
    with Served(*options, ranks=1, shape=SHAPE) as served, source.options().open("cuda") as peer:
        served.wait_ready(280)
        # Another client's NaN keys in every page, which are free again afterwards.
        for turn in range(8):
            infer(
                served.url,
                "attention_pre",
                {"sequence_id": 9, "sequence_start": turn == 0, "sequence_end": turn == 7},
                hidden_states=("BF16", torch.full((128, 512), torch.nan).to(torch.bfloat16)),
                residual=("BF16", torch.zeros(128, 512, dtype=torch.bfloat16)),
            )
        keys = 0
        table = torch.arange(16, dtype=torch.int32)[None]
        for turn, rows in enumerate((60, 1, 8, 3)):
            generator = torch.Generator().manual_seed(turn)
            x, residual = (
                torch.randn(rows, 512, generator=generator).to(torch.bfloat16) for _ in range(2)
            )
            keys += rows
            want = peer.run(
                x.cuda(), residual.cuda(), new_tokens=[rows], context_lens=[keys], block_table=table
            )
            have, _ = infer(
                served.url,
                "attention_pre",
                {"sequence_id": 1, "sequence_start": turn == 0},
                hidden_states=("BF16", x),
                residual=("BF16", residual),
            )
            at = 0
            for name, tensor in want._asdict().items():
                wanted = raw((tensor[:, :keys] if name == "logits" else tensor).cpu())
                assert have[at : at + len(wanted)] == wanted, (turn, name)
                at += len(wanted)
            assert at == len(have)
