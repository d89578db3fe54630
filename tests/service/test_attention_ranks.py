"""The model ``attention_pre`` over ranks: bit for bit the layer in this process, whatever comes."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as oip
from tritonclient.utils import InferenceServerException

from launcher.serving.attention import MAX_TOKENS, ROWS
from launcher.serving.source import AttentionSource
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch
from service.attention_model import PAGE_BYTES
from tests.service.attention import (
    OUTPUTS,
    SPEC,
    Peer,
    assert_same,
    bits,
    infer,
    inputs_of,
    keys_of,
    tokens,
)
from tests.service.served import Served, make_tokens, output_bits
from tests.service.served import inputs_of as moe_inputs

GPU_SPEC = "hidden=512,heads=8,q_lora=256,kv_lora=256,nope=64,rope=64,index_heads=8"


def test_the_rows_that_are_compiled_at_the_start_cover_every_request():
    planner = Planner(attention_pre_graph(AttentionSource(GPU_SPEC, 16, 0).spec()), 132)
    for rows in ROWS:
        planner.plan(Batch(((rows, rows),)))
    known = set(planner.specializations)
    edges = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, MAX_TOKENS]
    calls = [((rows, keys),) for rows in edges for keys in (rows, rows + 60, 900)]
    calls += [((1, 300),) * count for count in (2, 5, 32, MAX_TOKENS)]
    calls += [((2, 100), (3, 500)), ((60, 100), (60, 200)), ((1, 900), (100, 128))]
    for requests in calls:
        planner.plan(Batch(requests))
        new = set(planner.specializations) - known
        assert not new, f"{requests[:3]} of {len(requests)} needs {new}: it would be compiled late"


@pytest.fixture(scope="module")
def served():
    options = ("--attention-pre", SPEC, "--cache-pages", "12", "--fault-injection")
    with Served(*options, "--timeout", "5", "--heartbeat", "0.3") as running:
        running.wait_ready()
        yield running


@pytest.mark.multirank
@pytest.mark.timeout(180)
def test_ranks_append_to_sequences_beside_moe_requests(served):
    """Three sequences in turn, past the end of a page, each output bit for bit as the layer's."""
    peer = Peer(12)
    tables = {1: [[0, 1, 2]], 2: [[3, 4, 5]], 3: [[6, 7, 8]]}
    lengths = dict.fromkeys(tables, 0)
    case = make_tokens(30, 4)
    with oip.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=2) as client:
        want_moe = output_bits(client, *case)
        for turn, counts in enumerate([(60, 1, 33), (9, 128, 1), (1, 2, 90)]):
            for name, n in zip(tables, counts, strict=True):
                x, residual = tokens(n, 10 * turn + name)
                moe = client.async_infer("moe", moe_inputs(*case))
                have = infer(client, x, residual, sequence=name, start=turn == 0)
                lengths[name] += n
                want = peer.run(x, residual, [n], [lengths[name]], tables[name])
                for output in OUTPUTS:
                    assert_same(bits(have, output), want[output])
                assert_same(moe.get_result().as_numpy("output").view(np.uint16), want_moe)
        assert lengths == {1: 70, 2: 131, 3: 124}
        assert served.metric("megamoe_attention_sequences") == 3
        times = have.get_response()["parameters"]
        assert times["kernel_us"] > 0
        # The last one once more: its keys take their own place, the bits are the same.
        lengths[3] -= n
        keep = {"sequence_keys": lengths[3], "sequence_rewind": True}
        again = infer(client, x, residual, sequence=3, parameters=keep)
        for output in OUTPUTS:
            assert_same(bits(again, output), want[output])
        # And a shorter one in its stead, as after rejected guesses.
        x, residual = tokens(5, 99)
        have = infer(client, x, residual, sequence=3, parameters=keep)
        want = peer.run(x, residual, [5], [lengths[3] + 5], tables[3])
        for output in OUTPUTS:
            assert_same(bits(have, output), want[output])
        for name in tables:
            keys_of(client, name, end=True)
        assert served.metric("megamoe_attention_cache_pages_used") == 0


@pytest.mark.multirank
@pytest.mark.timeout(180)
def test_lost_requests_have_happened_or_not_and_the_client_can_tell(served):
    """Connections reset at some moment of an append: the next scores fit the keys that are told."""
    peer, rng = Peer(12), random.Random(4)
    table, keys, happened = [[0, 1, 2, 3, 4, 5]], 5, 0
    with served.client() as client:
        x, residual = tokens(5, 1)
        infer(client, x, residual, sequence=6, start=True)
        peer.run(x, residual, [5], [5], table)
        for turn in range(40):
            x, residual = tokens(6, turn)
            body, size = oip.InferenceServerClient.generate_request_body(inputs_of(x, residual))
            head = json.loads(body[:size])
            head["parameters"] |= {"sequence_id": 6, "sequence_keys": keys}
            text = json.dumps(head).encode()
            whole = (
                b"POST /v2/models/attention_pre/infer HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n"
                % (len(text) + len(body) - size, len(text))
            )
            with socket.create_connection(("127.0.0.1", served.port)) as conn:
                conn.sendall(whole + text + bytes(body[size:]))
                time.sleep(rng.random() * 0.03)
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            told = told_after(client, 6)
            assert told in (keys, keys + 6)
            if told != keys:
                happened += 1
                peer.run(x, residual, [6], [told], table)
            keys = told
        assert 0 < happened < 40, "the moments are ill chosen: none lost, or all"
        x, residual = tokens(3, 99)
        have = infer(client, x, residual, sequence=6, parameters={"sequence_keys": keys})
        want = peer.run(x, residual, [3], [keys + 3], table)
        for output in OUTPUTS:
            assert_same(bits(have, output), want[output])
        keys_of(client, 6, end=True)


def told_after(client, sequence: int) -> int:
    """Keys of a sequence, once the request that was lost is not in flight any more."""
    while True:
        try:
            return keys_of(client, sequence)
        except InferenceServerException as error:
            if "in flight" not in error.message():
                raise
            time.sleep(0.005)


@pytest.mark.multirank
@pytest.mark.timeout(180)
def test_keys_of_another_client_leave_nothing_in_pages(served):
    """NaN keys in every page, then a sequence in the same pages: the bits of fresh caches."""
    peer = Peer(12)
    with served.client() as client:
        for turn in range(6):
            x, residual = tokens(128, turn)
            x[:] = np.array(np.nan, ml_dtypes.bfloat16)
            infer(client, x, residual, sequence="poison", start=turn == 0)
        assert served.metric("megamoe_attention_cache_pages_used") == 12
        assert keys_of(client, "poison", end=True) == 6 * 128
        keys = 0
        for n in (3, 70):
            x, residual = tokens(n, n)
            have = infer(client, x, residual, sequence=4, start=keys == 0)
            keys += n
            want = peer.run(x, residual, [n], [keys], [[0, 1]])
            for output in OUTPUTS:
                assert_same(bits(have, output), want[output])
        keys_of(client, 4, end=True)


@pytest.mark.multirank
@pytest.mark.timeout(180)
def test_ranks_run_requests_that_bring_their_cache(served):
    """The rows that one request wrote are the cache that the next one sends."""
    peer = Peer(12)
    x, residual = tokens(100, 5)
    more, more_residual = tokens(3, 6)
    with served.client() as client:
        first = infer(client, x, residual, outputs=[*OUTPUTS, "index_rows", "latent_rows"])
        want = peer.run(x, residual, [100], [100], [[0, 1]])
        for output in OUTPUTS:
            assert_same(bits(first, output), want[output])
        assert_same(first.as_numpy("latent_rows"), peer.layer.latent_cache[:100].numpy())
        rows = first.as_numpy("index_rows")
        cache = np.zeros((2, PAGE_BYTES), np.uint8)
        for key, row in enumerate(rows):
            page, place = divmod(key, 64)
            cache[page, place * 128 : (place + 1) * 128] = row[:128]
            at = 64 * 128 + place * 4
            cache[page, at : at + 4] = row[128:]
        second = infer(
            client, more, more_residual, context_lens=[103], index_cache=cache[::-1],
            block_table=[[1, 0]],
        )  # fmt: skip
        want = peer.run(more, more_residual, [3], [103], [[0, 1]])
        for output in OUTPUTS:
            assert_same(bits(second, output), want[output])


@pytest.mark.multirank
@pytest.mark.timeout(180)
def test_a_restart_of_the_ranks_ends_all_sequences(served):
    with served.client() as client:
        infer(client, *tokens(4), sequence=9, start=True)
        served.fault(0, "kill")
        served.wait_ready(generation=2)
        with pytest.raises(InferenceServerException, match="sequence 9 is not known"):
            infer(client, *tokens(1), sequence=9)
        assert served.metric("megamoe_attention_sequences") == 0
        infer(client, *tokens(1), sequence=9, start=True)


@pytest.mark.multirank
def test_a_killed_http_process_takes_ranks_and_supervisor_with_it(served):
    """The last of the tests that share this service."""
    [http] = served.running("service")
    http.kill()
    assert served.wait_exit(30) != 0, served.text()
    served.assert_nothing_left(30)
    assert list(Path(served.folder.name).iterdir()) == []
