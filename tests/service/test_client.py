"""Unmodified tritonclient against the service: every bit arrives and comes back."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as oip
from tritonclient.utils import InferenceServerException

from tests.service.echo import LAYER, EchoEngine, echo, tokens


@pytest.fixture(scope="module")
def client(server):
    with oip.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def put(name, array, datatype, binary=True):
    tensor = oip.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def bits(array):
    return np.ascontiguousarray(array).view(np.uint16)


def assert_same_bits(have, want):
    assert have.shape == want.shape
    differ = np.argwhere(have != want)
    assert not len(differ), f"at {differ[0]}: {have[tuple(differ[0])]} != {want[tuple(differ[0])]}"


def test_metadata(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("moe")
    assert client.is_model_ready("moe", "1")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    model = client.get_model_metadata("moe", "1")
    assert model["name"] == "moe"
    assert model["versions"] == ["1"]
    assert model["inputs"][0]["shape"] == [-1, LAYER.hidden]
    assert model["outputs"][0]["name"] == "output"


@pytest.mark.parametrize("n", [1, 7, LAYER.capacity])
def test_bf16_is_bit_exact(client, n):
    hidden, ids, weights = tokens(n, seed=n)
    inputs = [
        put("hidden_states", hidden, "BF16"),
        put("topk_ids", ids, "INT32"),
        put("topk_weights", weights, "FP32"),
    ]
    result = client.infer("moe", inputs, request_id="r-1")
    assert result.get_response()["id"] == "r-1"
    output = result.as_numpy("output")
    assert_same_bits(bits(output), echo(bits(hidden), None, ids, weights))
    times = result.get_response()["parameters"]
    assert times["kernel_us"] == 1000
    assert times["host_us"] == 200
    assert times["queue_us"] >= 0


def test_every_fp8_bit_pattern_and_scale_passes(client):
    n = 4
    hidden = np.resize(np.arange(256, dtype=np.uint8), (n, LAYER.hidden))
    scales = np.geomspace(1e-30, 3e38, n * 2, dtype=np.float32).reshape(n, 2)
    _, ids, weights = tokens(n)
    inputs = [
        put("hidden_states", hidden, "UINT8"),
        put("hidden_scales", scales, "FP32"),
        put("topk_ids", ids.astype(np.int64), "INT64"),
        put("topk_weights", weights, "FP32"),
    ]
    output = client.infer("moe", inputs).as_numpy("output")
    assert_same_bits(bits(output), echo(hidden, scales, ids, weights))


def test_no_tokens_are_no_step(client, server):
    """As ``megamoe run`` takes a file without rows."""
    steps = server.engine.steps
    hidden, ids, weights = (array[:0] for array in tokens(1))
    names = ["output", "topk_ids", "topk_weights", "routing_counts", "timings"]
    wanted = [oip.InferRequestedOutput(name, binary_data=True) for name in names]
    routes = [put("topk_ids", ids, "INT32"), put("topk_weights", weights, "FP32")]
    fp8 = [
        put("hidden_states", np.zeros((0, LAYER.hidden), np.uint8), "UINT8"),
        put("hidden_scales", np.zeros((0, 2), np.float32), "FP32"),
    ]
    bf16 = [put("hidden_states", hidden, "BF16")]
    for inputs in (bf16, bf16 + routes, fp8, fp8 + routes):
        result = client.infer("moe", inputs, outputs=wanted)
        assert result.as_numpy("output").shape == (0, LAYER.hidden)
        assert result.as_numpy("topk_ids").shape == (0, LAYER.topk)
        assert result.as_numpy("routing_counts").tolist() == [0] * LAYER.num_experts
        assert result.as_numpy("timings").tolist() == [0, 0, 0]
    assert server.engine.steps == steps


def test_the_router_chooses_when_no_routes_are_sent(client):
    n = 5
    hidden, _, _ = tokens(n)
    names = ["output", "topk_ids", "topk_weights", "routing_counts", "ring_high_water", "timings"]
    wanted = [
        oip.InferRequestedOutput(name, binary_data=i % 2 == 0) for i, name in enumerate(names)
    ]
    result = client.infer("moe", [put("hidden_states", hidden, "BF16")], outputs=wanted)
    ids, weights = result.as_numpy("topk_ids"), result.as_numpy("topk_weights")
    assert ids.dtype == np.int32
    assert_same_bits(bits(result.as_numpy("output")), echo(bits(hidden), None, ids, weights))
    counts = np.bincount(ids.ravel(), minlength=LAYER.num_experts)
    assert (result.as_numpy("routing_counts") == counts).all()
    assert result.as_numpy("ring_high_water").tolist() == [[7, 3], [5, 2]]
    assert result.as_numpy("timings")[1:].tolist() == [0.0002, 0.001]


def test_small_tensors_may_come_as_json(client):
    hidden, ids, weights = tokens(3)
    weights = weights.astype(np.float16).astype(np.float32)
    inputs = [
        put("hidden_states", hidden, "BF16"),
        put("topk_ids", ids, "INT32", binary=False),
        put("topk_weights", weights, "FP32", binary=False),
    ]
    output = client.infer("moe", inputs).as_numpy("output")
    assert_same_bits(bits(output), echo(bits(hidden), None, ids, weights))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client, algorithm):
    hidden, ids, weights = tokens(3)
    inputs = [
        put("hidden_states", hidden, "BF16"),
        put("topk_ids", ids, "INT32"),
        put("topk_weights", weights, "FP32"),
    ]
    result = client.infer("moe", inputs, request_compression_algorithm=algorithm)
    want = echo(bits(hidden), None, ids, weights)
    assert_same_bits(bits(result.as_numpy("output")), want)


def refused(client, inputs, status="400", **more):
    with pytest.raises(InferenceServerException) as caught:
        client.infer("moe", inputs, **more)
    assert caught.value.status() == status
    return caught.value.message()


def good(n=4):
    hidden, ids, weights = tokens(n)
    return {
        "hidden_states": (hidden, "BF16"),
        "topk_ids": (ids, "INT32"),
        "topk_weights": (weights, "FP32"),
    }


def changed(**tensors):
    named = {**good(), **tensors}
    return [put(name, *given) for name, given in named.items() if given is not None]


BAD = {
    "no hidden": (changed(hidden_states=None), "'hidden_states' is missing"),
    "columns": (changed(hidden_states=(tokens(4)[0][:, :128], "BF16")), "must be [n, 256]"),
    "rank 1": (changed(hidden_states=(tokens(4)[0].ravel(), "BF16")), "must be [n, 256]"),
    "too many": (changed(hidden_states=(tokens(129)[0], "BF16")), "129 tokens: must be 0..128"),
    "dtype": (changed(hidden_states=(np.zeros((4, 256), "f4"), "FP32")), "BF16 or UINT8"),
    "no scales": (changed(hidden_states=(np.zeros((4, 256), "u1"), "UINT8")), "'hidden_scales'"),
    "scales": (changed(hidden_scales=(np.ones((4, 2), "f4"), "FP32")), "only with them"),
    "ids alone": (changed(topk_weights=None), "send both or neither"),
    "weights alone": (changed(topk_ids=None), "send both or neither"),
    "ids dtype": (changed(topk_ids=(np.zeros((4, 2), "f4"), "FP32")), "INT32 or INT64"),
    "ids rows": (changed(topk_ids=(np.zeros((3, 2), "i4"), "INT32")), "must be [4, 2]"),
    "ids columns": (changed(topk_ids=(np.zeros((4, 3), "i4"), "INT32")), "must be [4, 2]"),
    "id >= E": (
        changed(topk_ids=(np.full((4, 2), 8, "i4"), "INT32")),
        "[0, 0] = 8: must be in 0..7",
    ),
    "id < -1": (changed(topk_ids=(np.full((4, 2), -2, "i4"), "INT32")), "= -2"),
    "huge id": (changed(topk_ids=(np.full((4, 2), 1 << 40, "i8"), "INT64")), "= 1099511627776"),
    "unknown": (changed(extra=(np.zeros((1,), "f4"), "FP32")), "'extra' does not exist"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_requests_name_the_tensor(client, case):
    inputs, part = BAD[case]
    assert part in refused(client, inputs)


def test_bad_scales_are_found(client):
    scales = np.ones((4, 2), np.float32)
    scales[2, 1] = np.nan
    inputs = changed(
        hidden_states=(np.zeros((4, 256), np.uint8), "UINT8"), hidden_scales=(scales, "FP32")
    )
    assert "[2, 1] = nan" in refused(client, inputs)


def test_bf16_output_as_json_is_refused_before_it_runs(client, server):
    before = server.engine.steps
    wanted = [oip.InferRequestedOutput("output", binary_data=False)]
    assert "BF16 cannot be sent as JSON" in refused(client, changed(), outputs=wanted)
    wanted = [oip.InferRequestedOutput("logits")]
    assert "'logits' does not exist" in refused(client, changed(), outputs=wanted)
    wanted = [oip.InferRequestedOutput("output", class_count=3)]
    assert "classification" in refused(client, changed(), outputs=wanted)
    assert server.engine.steps == before


def test_shared_memory_regions_are_refused(client):
    inputs = changed()
    inputs[0].set_shared_memory("region", inputs[0]._raw_data.__len__())
    assert "shared memory" in refused(client, inputs)


def test_unknown_model_and_version(client):
    with pytest.raises(InferenceServerException, match="unknown model 'other'"):
        client.get_model_metadata("other")
    with pytest.raises(InferenceServerException, match="unknown version '2'"):
        client.get_model_metadata("moe", "2")
    assert not client.is_model_ready("attention_pre")


def test_timeout_is_in_microseconds(make_running):
    running = make_running()
    running.engine.hold.set()
    with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        message = refused(client, changed(), status="503", timeout=150_000)
    assert "deadline" in message


def test_a_full_queue_is_429_with_retry_after(make_running):
    running = make_running(EchoEngine(limit=0))
    with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        assert "retry later" in refused(client, changed(), status="429")
        body, size = client.generate_request_body(changed())
        answer = client._post(
            "v2/models/moe/infer",
            body,
            {"Inference-Header-Content-Length": size, "Host": "localhost"},
            {},
        )
        assert answer.get("retry-after") == "1"
        json.loads(answer.read())["error"]


def test_not_ready_is_503(make_running):
    running = make_running()
    with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        for state in ("starting", "draining", "failed"):
            running.engine.state = state
            assert not client.is_server_ready()
            assert client.is_server_live()
            assert not client.is_model_ready("moe")
            assert f"told to be {state}" in refused(client, changed(), status="503")


def test_a_bf16_layer_takes_no_fp8(make_running):
    from msgspec.structs import replace

    layer = replace(LAYER, weight_dtype="bf16", has_router=False)
    running = make_running(EchoEngine(layer))
    with oip.InferenceServerClient(f"127.0.0.1:{running.port}") as client:
        names = [t["name"] for t in client.get_model_metadata("moe")["inputs"]]
        assert names == ["hidden_states", "topk_ids", "topk_weights"]
        inputs = changed(
            hidden_states=(np.zeros((4, 256), np.uint8), "UINT8"),
            hidden_scales=(np.ones((4, 2), np.float32), "FP32"),
        )
        assert "must be BF16" in refused(client, inputs)
        inputs = changed(topk_ids=None, topk_weights=None)
        assert "has no router" in refused(client, inputs)


def test_bfloat16_comes_back_as_bfloat16(client):
    assert client.infer("moe", changed()).as_numpy("output").dtype == ml_dtypes.bfloat16
