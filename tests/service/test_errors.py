"""Every refusal has the one error body, and no input makes the service answer 500."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import pytest

from tests.service.echo import CONFIG, EchoEngine, tokens

INFER = "/v2/models/moe/infer"


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert body["error"]
    return body["error"]


def one_input(**changes):
    given = {"name": "topk_ids", "shape": [2, 2], "datatype": "INT32", "data": [0, 1, 2, 3]}
    given.update(changes)
    return {"inputs": [{k: v for k, v in given.items() if v is not None}]}


def test_paths_and_methods(http):
    assert "/nothing" in error_of(http.get("/nothing"), 404)
    assert "unknown model" in error_of(http.get("/v2/models/other"), 404)
    assert "--attention-pre" in error_of(http.get("/v2/models/attention_pre"), 404)
    assert "unknown model" in error_of(http.post("/v2/models/other/infer", json={}), 404)
    answer = http.get(INFER)
    assert "GET is not allowed" in error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    error_of(http.request("DELETE", "/v2"), 405)
    error_of(http.get("/v2/models/" + "m" * 80), 422)
    # Fault injection does not exist unless it was asked for.
    error_of(http.post("/debug/fault", json={"rank": 0, "action": "kill"}), 404)


def test_a_bug_is_500_in_the_same_shape(make_running):
    engine = EchoEngine()
    engine.crash = KeyError("a bug")
    running = make_running(engine)
    hidden, _, _ = tokens(2)
    raw = hidden.tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "hidden_states",
                    "shape": [2, 256],
                    "datatype": "BF16",
                    "parameters": {"binary_data_size": len(raw)},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    with httpx.Client(base_url=running.url) as http:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = http.post(INFER, content=head + raw, headers=headers)
        message = error_of(answer, 500)
        assert "KeyError" in message
        assert "a bug" not in message  # internals stay in the log
        engine.crash = None
        assert http.post(INFER, content=head + raw, headers=headers).status_code == 200


JSON_BODIES = {
    "empty": b"",
    "no json": b"hello",
    "not utf-8": b'{"inputs": [{"name": "\xff\xfe"}]}',
    "array": b"[]",
    "no inputs": b"{}",
    "inputs empty": b'{"inputs": []}',
    "inputs wrong": b'{"inputs": {"name": "x"}}',
    "deep array": b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep object": b'{"a":' * 40_000 + b"1" + b"}" * 40_000,
    "deep data": b'{"inputs": [{"name":"topk_ids","shape":[1],"datatype":"INT32","data":'
    + b"[" * 900
    + b"1"
    + b"]" * 900
    + b"}]}",
    "nan": b'{"inputs": [{"name":"topk_weights","shape":[1],"datatype":"FP32","data":[NaN]}]}',
    "negative shape": json.dumps(one_input(shape=[-2, 2])).encode(),
    "fractional shape": json.dumps(one_input(shape=[2.5, 2])).encode(),
    "huge shape": json.dumps(one_input(shape=[1 << 40, 1 << 40, 1 << 40])).encode(),
    "too many dims": json.dumps(one_input(shape=[1] * 9)).encode(),
    "string data": json.dumps(one_input(data="0123")).encode(),
    "few values": json.dumps(one_input(data=[0, 1])).encode(),
    "bool values": json.dumps(one_input(data=[True, 1, 2, 3])).encode(),
    "null values": json.dumps(one_input(data=[None, 1, 2, 3])).encode(),
    "float ids": json.dumps(one_input(data=[0.5, 1, 2, 3])).encode(),
    "int32 overflow": json.dumps(one_input(data=[1 << 31, 1, 2, 3])).encode(),
    "int64 overflow": json.dumps(one_input(data=[1 << 70, 1, 2, 3])).encode(),
    "ragged data": json.dumps(one_input(data=[[0, 1], [2]])).encode(),
    "mixed nesting": json.dumps(one_input(data=[[0, 1], 2, 3])).encode(),
    "nested too deep": json.dumps(one_input(data=[[[0], [1]], [[2], [3]]])).encode(),
    "no data": json.dumps(one_input(data=None)).encode(),
    "both": json.dumps(one_input(parameters={"binary_data_size": 16})).encode(),
    "binary size": json.dumps(one_input(data=None, parameters={"binary_data_size": 15})).encode(),
    "binary size text": json.dumps(
        one_input(data=None, parameters={"binary_data_size": "16"})
    ).encode(),
    "binary missing": json.dumps(
        one_input(data=None, parameters={"binary_data_size": 16})
    ).encode(),
    "datatype": json.dumps(one_input(datatype="FP8")).encode(),
    "fp32 overflow": json.dumps(one_input(datatype="FP32", data=[1e39, 0, 0, 0])).encode(),
    "bf16 json": json.dumps(one_input(datatype="BF16")).encode(),
    "given twice": json.dumps({"inputs": one_input()["inputs"] * 2}).encode(),
    "timeout text": json.dumps(
        {**one_input(name="hidden_states"), "parameters": {"timeout": "1"}}
    ).encode(),
    "binary flag": json.dumps({**one_input(), "parameters": {"binary_data_output": 1}}).encode(),
    "output twice": json.dumps(
        {**one_input(), "outputs": [{"name": "timings"}, {"name": "timings"}]}
    ).encode(),
}


@pytest.mark.parametrize("case", JSON_BODIES)
def test_malformed_json_is_400(http, case):
    error_of(http.post(INFER, content=JSON_BODIES[case]), 400)


@pytest.mark.parametrize(
    "length", ["-1", "0", "abc", "1e3", "99999999999999999999", "5000", "", "٣", "4 2"]
)
def test_bad_header_lengths_are_400(http, length):
    body = json.dumps(one_input()).encode()
    headers = [(b"inference-header-content-length", length.encode())]
    error_of(http.post(INFER, content=body, headers=headers), 400)


def test_header_length_that_cuts_the_json(http):
    body = json.dumps(one_input()).encode()
    headers = {"Inference-Header-Content-Length": str(len(body) - 3)}
    assert "cannot parse" in error_of(http.post(INFER, content=body, headers=headers), 400)
    headers = {"Inference-Header-Content-Length": str(len(body))}
    answer = http.post(INFER, content=body + b"tail", headers=headers)
    assert "4 bytes behind" in error_of(answer, 400)
    answer = http.post(INFER, content=body + b"tail")
    assert "send Inference-Header-Content-Length" in error_of(answer, 400)


def test_body_size_is_bounded(http, server):
    big = CONFIG.max_body_bytes + 1
    message = error_of(http.post(INFER, content=bytes(big)), 413)
    assert str(big) in message
    assert "--max-body-mib" in message

    def chunks():
        for _ in range(20):
            yield bytes(1 << 16)

    assert "more than" in error_of(http.post(INFER, content=chunks()), 413)
    # A declared giant is refused without waiting for it.
    answer = server.raw(
        b"POST /v2/models/moe/infer HTTP/1.1\r\nhost: localhost\r\n"
        b"content-length: 99999999999999\r\n\r\n{"
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert http.get("/health").status_code == 200


def test_json_part_is_bounded(http):
    body = b" " * (CONFIG.max_json_bytes + 1)
    assert "send tensors in binary" in error_of(http.post(INFER, content=body), 413)


def test_content_encodings(http):
    body = json.dumps(one_input()).encode()
    answer = http.post(INFER, content=body, headers={"Content-Encoding": "br"})
    assert "'br' is not supported" in error_of(answer, 415)
    packed = gzip.compress(body)
    for broken in (b"\x1f\x8bgarbage", packed[:-5], packed + b"tail"):
        answer = http.post(INFER, content=broken, headers={"Content-Encoding": "gzip"})
        assert "decompress" in error_of(answer, 400)
    answer = http.post(INFER, content=packed, headers={"Content-Encoding": "gzip"})
    assert "hidden_states" in error_of(answer, 400)  # it was read


def test_a_compression_bomb_is_bounded(http):
    bomb = zlib.compress(bytes(64 << 20), 9)
    assert len(bomb) < 100_000
    answer = http.post(INFER, content=bomb, headers={"Content-Encoding": "deflate"})
    assert "decompressed request body exceeds" in error_of(answer, 413)


def test_bytes_that_are_no_http(server):
    answer = server.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert list(json.loads(body)) == ["error"]
    answer = server.raw(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 40_000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    answer = server.raw(
        b"POST /v2/models/moe/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_health_version_and_schema(http):
    assert http.get("/health").json() == {"live": True}
    assert http.get("/ready").json() == {"live": True, "ready": True}
    assert http.get("/version").json()["name"] == "megamoe"
    assert http.get("/v2/models").json() == {"models": ["moe"]}
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")
