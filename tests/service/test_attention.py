"""The model ``attention_pre`` over an echo: unmodified tritonclient, sequences, refusals."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import tritonclient.http as oip
from tritonclient.utils import InferenceServerException

from service.attention_model import PAGE_BYTES
from tests.service.attention import (
    OUTPUTS,
    assert_same,
    infer,
    inputs_of,
    keys_of,
    tokens,
)
from tests.service.echo import ATTENTION, BOTH, CONFIG, EchoEngine, Server
from tests.service.served import HTTP


@pytest.fixture
def engine():
    return EchoEngine(BOTH)


@pytest.fixture
def server(engine):
    with Server(CONFIG, engine) as running:
        yield running


@pytest.fixture
def client(server):
    with oip.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4) as client:
        yield client


def test_metadata(client):
    assert client.is_model_ready("attention_pre", "1")
    model = client.get_model_metadata("attention_pre")
    inputs = {tensor["name"]: tensor for tensor in model["inputs"]}
    assert inputs["hidden_states"]["shape"] == [-1, ATTENTION.hidden]
    assert inputs["hidden_states"]["parameters"] == {"max_tokens": 16, "max_keys": 512}
    assert inputs["index_cache"]["shape"] == [-1, PAGE_BYTES]
    assert inputs["index_cache"]["datatype"] == "UINT8"
    outputs = {tensor["name"]: tensor for tensor in model["outputs"]}
    assert outputs["absorbed"]["shape"] == [-1, 2, 128]
    assert outputs["logits"] == {
        "name": "logits", "datatype": "FP32", "shape": [-1, -1],
        "parameters": outputs["logits"]["parameters"],
    }  # fmt: skip


def test_without_the_layer_there_is_no_model():
    with Server(CONFIG, EchoEngine()) as server:
        answer = HTTP.get(server.url + "/v2/models/attention_pre")
        assert answer.status_code == 404
        said = answer.json()["error"]
        assert said.startswith("unknown model 'attention_pre': this service has 'moe' (--attention")
        assert HTTP.get(server.url + "/v2/models").json() == {"models": ["moe"]}
        server.engine.layer_info = None
        assert HTTP.get(server.url + "/v2/models/attention_pre").status_code == 503


def test_a_sequence_keeps_its_keys_on_the_ranks(client, engine):
    x, residual = tokens(5)
    first = infer(client, x, residual, sequence=7, start=True)
    assert_same(
        first.as_numpy("residual").view(np.uint16), x.view(np.uint16) ^ residual.view(np.uint16)
    )
    assert first.as_numpy("logits").shape == (5, 5)
    told = first.get_response()["parameters"]
    assert (told["sequence_id"], told["sequence_keys"]) == ("7", 5)
    assert told["kernel_us"] == 2000
    other = infer(client, *tokens(2), sequence=8, start=True).as_numpy("logits")
    second = infer(client, *tokens(2), sequence=7).as_numpy("logits")
    assert second.shape == (2, 7)
    assert second[:, :5].tolist() == [first.as_numpy("logits")[0].tolist()] * 2
    assert not set(second[0].tolist()) & set(other[0].tolist())
    assert engine.attended[-1].context_lens == [7]
    infer(client, *tokens(1), sequence=7, end=True)
    with pytest.raises(InferenceServerException, match="sequence 7 is not known") as caught:
        infer(client, *tokens(1), sequence=7)
    assert caught.value.status() == "400"


def test_a_request_without_tokens_looks_a_sequence_up_or_ends_it(client, engine):
    infer(client, *tokens(5), sequence=7, start=True)
    steps = len(engine.attended)
    result = infer(client, *tokens(0), sequence=7)
    assert result.get_response()["parameters"]["sequence_keys"] == 5
    shapes = {name: list(result.as_numpy(name).shape) for name in OUTPUTS}
    assert shapes["logits"] == [0, 5]
    assert shapes["queries"] == [0, 2, 128]
    wanted = ["latent_rows", "index_rows", "timings"]
    rows = infer(client, *tokens(0), sequence=7, outputs=wanted)
    assert list(rows.as_numpy("index_rows").shape) == [0, 132]
    assert keys_of(client, 7, end=True) == 5
    with pytest.raises(InferenceServerException, match="sequence 7 is not known"):
        keys_of(client, 7, end=True)
    assert len(engine.attended) == steps, "the ranks have nothing to do"
    with pytest.raises(InferenceServerException, match=r"n in 1\.\.16"):
        keys_of(client, 7, start=True)
    with pytest.raises(InferenceServerException, match=r"n in 1\.\.16"):
        infer(client, *tokens(0))


def test_a_request_that_was_sent_twice_appends_once(client, engine):
    """The answer to the first was lost: the second is refused, or takes its place."""
    infer(client, *tokens(16), sequence=7, start=True, parameters={"sequence_keys": 0})
    at_16 = {"sequence_keys": 16}
    first = infer(client, *tokens(6), sequence=7, parameters=at_16)
    with pytest.raises(
        InferenceServerException, match="has 22 keys, the request was made for 16"
    ) as caught:
        infer(client, *tokens(6), sequence=7, parameters=at_16)
    assert caught.value.status() == "409"
    again = infer(
        client, *tokens(6), sequence=7, parameters={**at_16, "sequence_rewind": True}
    )  # fmt: skip
    assert_same(again.as_numpy("logits"), first.as_numpy("logits"))
    assert engine.attended[-1].context_lens == [22]
    assert engine.attended[-1].block_table == engine.attended[-2].block_table
    assert keys_of(client, 7) == 22
    assert keys_of(client, 7, parameters={"sequence_keys": 3, "sequence_rewind": True}) == 3
    with pytest.raises(InferenceServerException, match="an earlier one is missing") as caught:
        infer(client, *tokens(1), sequence=7, parameters=at_16)
    assert caught.value.status() == "409"


def test_sequences_end_with_their_group_of_ranks(client, engine):
    infer(client, *tokens(1), sequence=7, start=True)
    engine.generation = 2
    with pytest.raises(InferenceServerException, match="not known"):
        infer(client, *tokens(1), sequence=7)
    infer(client, *tokens(1), sequence=7, start=True)
    assert engine.attended[-1].generation == 2


def test_two_requests_of_a_sequence_at_once(client, server, engine):
    infer(client, *tokens(1), sequence=7, start=True)
    engine.hold.set()
    slow = threading.Thread(target=lambda: infer(other, *tokens(1), sequence=7))
    with oip.InferenceServerClient(f"127.0.0.1:{server.port}") as other:
        slow.start()
        while not engine.running:
            time.sleep(0.005)
        with pytest.raises(InferenceServerException, match="in flight") as caught:
            infer(client, *tokens(1), sequence=7)
        engine.hold.clear()
        slow.join()
    assert caught.value.status() == "409"
    answer = infer(client, *tokens(1), sequence=7).get_response()
    assert answer["parameters"]["sequence_keys"] == 3


def test_pages_run_out(client):
    for name in range(1, 9):
        infer(client, *tokens(1), sequence=name, start=True)
    with pytest.raises(InferenceServerException, match="0 of 8 are free") as caught:
        infer(client, *tokens(1), sequence=9, start=True)
    assert caught.value.status() == "429"
    with pytest.raises(InferenceServerException, match="0 of 8 are free"):
        infer(client, *tokens(1))
    infer(client, *tokens(1), sequence=3, end=True)
    infer(client, *tokens(1), sequence=9, start=True)


def test_a_request_with_everything(client, engine):
    """Two requests, three new tokens, keys and pages of the client's numbering."""
    cache = np.random.default_rng(1).integers(0, 256, (4, PAGE_BYTES), np.uint8)
    more = {"context_lens": [130, 64], "new_tokens": [2, 1], "index_cache": cache}
    result = infer(client, *tokens(3), **more, block_table=[[3, 0, 2], [1, 9, -1]])
    request = engine.attended[-1]
    pages, sent = request.upload
    assert bytes(sent.join()) == cache.tobytes()
    assert request.block_table == [[pages[3], pages[0], pages[2]], [pages[1]]]
    assert (request.context_lens, request.new_tokens) == ([130, 64], [2, 1])
    assert result.as_numpy("logits").shape == (3, 130)
    rows = infer(client, *tokens(3), outputs=["latent_rows", "index_rows", "timings"])
    assert rows.as_numpy("latent_rows").shape == (3, 260)
    assert rows.as_numpy("index_rows").shape == (3, 132)
    assert rows.as_numpy("timings")[2] == 0.002
    assert "sequence_id" not in rows.get_response()["parameters"]
    # One token of each of as many requests needs no counts.
    infer(client, *tokens(2), context_lens=[1, 1])
    assert engine.attended[-1].new_tokens == [1, 1]


X, R = tokens(4)
PAGES = np.zeros((2, PAGE_BYTES), np.uint8)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"positions": [0, 1, 2, 512]}, r"'positions'[3] = 512: must be in 0..511"),
        ({"positions": [0]}, "'positions' has shape [1]: must be [4]"),
        ({"context_lens": [4, 0]}, "'context_lens'[1] = 0: must be in 1..512"),
        ({"context_lens": [513]}, "'context_lens'[0] = 513: must be in 1..512"),
        ({"context_lens": [[4]]}, "'context_lens' has shape [1, 1]: must be [b]"),
        ({"context_lens": [2, 2]}, "'new_tokens' is missing: 4 tokens of 2 requests"),
        ({"context_lens": [2, 2], "new_tokens": [1, 2]}, "adds up to 3: hidden_states has 4"),
        ({"new_tokens": [4]}, "'context_lens' is missing"),
        ({"context_lens": [3]}, "request 0 has 4 new tokens and context_lens 3"),
        ({"context_lens": [9]}, "context_lens exceed new_tokens: send the earlier keys"),
        ({"context_lens": [4], "block_table": [[0]]}, "goes with 'index_cache'"),
        ({"context_lens": [9], "index_cache": PAGES}, "goes with 'block_table'"),
        (
            {"context_lens": [9], "index_cache": PAGES[:, 1:], "block_table": [[0]]},
            f"'index_cache' has shape [2, {PAGE_BYTES - 1}]",
        ),
        (
            {"context_lens": [9], "index_cache": PAGES, "block_table": [[2]]},
            "'block_table'[0, 0] = 2: must be in 0..1",
        ),
        (
            {"context_lens": [70], "index_cache": PAGES, "block_table": [[0]]},
            "'block_table' has shape [1, 1]: must be [1, w] with w in 2..8",
        ),
        (
            {"context_lens": [9], "index_cache": PAGES, "block_table": np.zeros((1, 60_000))},
            "'block_table' has shape [1, 60000]: must be [1, w] with w in 1..8",
        ),
        (
            {"context_lens": [9, 9], "new_tokens": [2, 2], "index_cache": PAGES,
             "block_table": [[0], [0]]},
            "block_table gives two new tokens the same place",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(client, engine, changed, said):
    with pytest.raises(InferenceServerException) as caught:
        infer(client, X, R, **changed)
    assert said in caught.value.message()
    assert caught.value.status() == "400"
    assert not engine.attended


def test_more_refusals(client, server, engine):
    def refused(*args, **more):
        with pytest.raises(InferenceServerException) as caught:
            infer(client, *args, **more)
        assert caught.value.status() == "400"
        return caught.value.message()

    assert "n in 1..16" in refused(*tokens(17))
    assert "'hidden_states' has shape [4, 128]" in refused(*tokens(4, hidden=128))
    assert "'residual' has shape [3, 256]" in refused(X, R[:3])
    assert "does not go with sequence_id" in refused(X, R, sequence=1, context_lens=[4])
    url = server.url + "/v2/models/attention_pre/infer"
    given = {"name": "hidden_states", "shape": [1, 256], "datatype": "FP32", "data": [0.0] * 256}
    both = [given, {**given, "name": "residual"}]
    for body, said in (
        ({"inputs": [given]}, "'hidden_states' and 'residual' are needed"),
        ({"inputs": both}, "datatype FP32: must be BF16"),
        ({"inputs": [{**given, "name": "y"}]}, "'y' does not exist"),
        ({"inputs": both, "outputs": [{"name": "output"}]}, "'output' does not exist"),
    ):
        answer = HTTP.post(url, json=body)
        assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text
    body, size = oip.InferenceServerClient.generate_request_body(inputs_of(X, R))
    head = json.loads(body[:size])
    for parameters, said in (
        ({"sequence_id": 1.5}, "sequence_id = '1.5'"),
        ({"sequence_start": True}, "need a sequence_id"),
        ({"sequence_keys": 0}, "need a sequence_id"),
        ({"sequence_id": 1, "sequence_keys": -1}, "sequence_keys = '-1'"),
        ({"sequence_id": 1, "sequence_keys": 1.0}, "sequence_keys = '1.0'"),
        ({"sequence_id": 1, "sequence_keys": True}, "sequence_keys = 'True'"),
        ({"sequence_id": 1, "sequence_start": True, "sequence_keys": 2}, "starts with 0 keys"),
        ({"sequence_id": 1, "sequence_rewind": True}, "sequence_rewind needs sequence_keys"),
        ({"sequence_id": 1, "sequence_end": 1}, "sequence_end = '1': must be true or false"),
        ({"binary_data_output": False}, "output 'residual': BF16 cannot be sent as JSON"),
    ):
        head["parameters"] = {"binary_data_output": True, **parameters}
        text = json.dumps(head).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))}
        answer = HTTP.post(url, content=text + body[size:], headers=headers)
        assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text


def test_a_sequence_fills_all_pages_and_no_more(client):
    for at in range(32):
        infer(client, *tokens(16), sequence=5, start=at == 0)
    with pytest.raises(InferenceServerException, match="513 keys: the caches hold 512") as caught:
        infer(client, *tokens(1), sequence=5)
    assert caught.value.status() == "400"


def test_logits_as_json_have_null_where_a_token_may_not_look(server):
    body, size = oip.InferenceServerClient.generate_request_body(
        inputs_of(*tokens(3), context_lens=[1, 2], new_tokens=[1, 2]),
        outputs=[oip.InferRequestedOutput("logits", binary_data=False)],
    )
    headers = {"Inference-Header-Content-Length": str(size)}
    url = server.url + "/v2/models/attention_pre/infer"
    answer = HTTP.post(url, content=bytes(body), headers=headers)
    [logits] = answer.json()["outputs"]
    assert logits["shape"] == [3, 2]
    assert [value is None for value in logits["data"]] == [False, True] + [False] * 4


def test_metrics_and_dashboard_know_it(client, server):
    infer(client, *tokens(3), sequence=1, start=True)
    text = HTTP.get(server.url + "/metrics").text
    for line in (
        'megamoe_steps_total{kind="attention_pre"} 1.0',
        "megamoe_attention_tokens_total 3.0",
        "megamoe_attention_sequences 1.0",
        "megamoe_attention_cache_pages_used 1.0",
        "megamoe_attention_cache_pages 8.0",
        'megamoe_attention_step_seconds_count{phase="kernel"} 1.0',
    ):
        assert line in text, line
    state = server.app.state.dashboard.state()
    assert state["attention"]["step"]["num_tokens"] == 3
    assert (state["attention"]["pages_used"], state["attention"]["pages"]) == (1, 8)
    assert state["step"] is None
