"""What rank 0 prepares before it serves attention-pre: no request waits for a compiler."""

from __future__ import annotations

from launcher.serving.attention import MAX_TOKENS, ROWS
from launcher.serving.source import AttentionSource
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.plan import Planner
from megamoe.attention_pre.tiling import Batch

SPEC = "hidden=512,heads=8,q_lora=256,kv_lora=256,nope=64,rope=64,index_heads=8"


def test_the_rows_that_are_compiled_at_the_start_cover_every_request():
    planner = Planner(attention_pre_graph(AttentionSource(SPEC, 16, 0).spec()), 132)
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
