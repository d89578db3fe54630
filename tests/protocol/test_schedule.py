"""The tile order and the row sources against the rules, worked out here without their code.

A schedule is a list of (kind, expert, block, first_row, num_rows, n); kind 0 is Linear 1, 1 is
Linear 2; `block` counts through the call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import native

LINEAR1, LINEAR2 = 0, 1

EXAMPLES = settings(max_examples=1000, deadline=None)


def make_shape(**fields) -> native.MoEShape:
    values = {
        "num_ranks": 1,
        "num_experts": 1,
        "topk": 1,
        "num_shared": 0,
        "hidden": 128,
        "inter": 128,
        "is_fp8": 1,
        "max_tokens": 64,
        "block_m": 1,
        "tail_rows": 0,
        "ring_l1": 1,
        "ring_l2": 1,
        "wave_blocks": 1,
        "l2_lag": 1,
        "l2_tile_n": 128,
        "num_units": 1,
        "num_pullers": 1,
    }
    return native.MoEShape(**values | fields)


@dataclass(frozen=True)
class Problem:
    fields: dict[str, int]
    rows: list[int]  # per local expert, shared last

    @property
    def shape(self) -> native.MoEShape:
        return make_shape(**self.fields)


@st.composite
def problems(draw) -> Problem:
    ring_l1, ring_l2 = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    ranks, local = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 5))
    shared = draw(st.integers(0, 2))
    fields = {
        "num_ranks": ranks,
        "num_experts": ranks * local,
        "num_shared": shared,
        "hidden": 128 * draw(st.integers(1, 3)),
        "inter": 128 * draw(st.integers(1, 3)),
        "block_m": (block_m := draw(st.integers(1, 5))),
        "tail_rows": draw(st.integers(0, (block_m - 1) // 2)),
        "ring_l1": ring_l1,
        "ring_l2": ring_l2,
        "wave_blocks": draw(st.integers(1, min(ring_l1, ring_l2))),
        "l2_lag": draw(st.integers(0, 8)),
    }
    # Most experts have few rows, some none, one may have many.
    counts = st.one_of(st.just(0), st.integers(0, 6), st.integers(0, 30))
    return Problem(fields, draw(st.lists(counts, min_size=local + shared, max_size=local + shared)))


# ---------------------------------------------------------------- the rules, by brute force


def blocks_of_call(problem: Problem) -> list[tuple[int, int, int]]:
    """(expert, first row, rows) of every block: shared experts first, then the routed ones."""
    local = problem.fields["num_experts"] // problem.fields["num_ranks"]
    order = [*range(local, local + problem.fields["num_shared"]), *range(local)]
    return [
        (expert, sum(sizes[:i]), size)
        for expert in order
        for sizes in [cut(problem.rows[expert], problem.fields)]
        for i, size in enumerate(sizes)
    ]


def cut(rows: int, fields: dict[str, int]) -> list[int]:
    """Rows of an expert's blocks: short ones, but one less where one tail takes the last's rows."""
    short = fields["block_m"] - fields["tail_rows"]
    sizes = [min(short, rows - row) for row in range(0, rows, short)]
    if len(sizes) > 1 and sizes[-1] <= fields["tail_rows"]:
        spared = sizes.pop()
        sizes = [short + fields["tail_rows"], *sizes[1:]]
        sizes[-1] -= fields["tail_rows"] - spared
    return sizes


def waves_of_call(problem: Problem) -> list[list[int]]:
    """Blocks of the waves: runs of blocks of one expert, as long as allowed."""
    waves: list[list[int]] = []
    blocks = blocks_of_call(problem)
    for block, (expert, first_row, _) in enumerate(blocks):
        same = waves and blocks[waves[-1][0]][0] == expert
        if same and len(waves[-1]) < problem.fields["wave_blocks"] and first_row > 0:
            waves[-1].append(block)
        else:
            waves.append([block])
    return waves


def expected_tiles(problem: Problem) -> list[tuple[int, int, int, int, int, int]]:
    """Plays the rules: which blocks have had Linear 1, and which wait for Linear 2."""
    f, blocks = problem.fields, blocks_of_call(problem)
    to_start, started = waves_of_call(problem), []
    tiles: list[tuple[int, int, int, int, int, int]] = []

    def issue(kind: int, wave: list[int], columns: int) -> None:
        tiles.extend(
            (kind, blocks[b][0], b, blocks[b][1], blocks[b][2], n)
            for n, b in product(range(columns), wave)
        )

    while to_start or started:
        behind = [b for wave in started[1:] for b in wave]  # started after the oldest wave
        live = [b for wave in started for b in wave]  # in the L2 ring
        room = to_start and len(live) + len(to_start[0]) <= f["ring_l2"]
        if started and (not to_start or not room or len(behind) >= f["l2_lag"]):
            issue(LINEAR2, started.pop(0), f["hidden"] // 128)
        else:
            started.append(to_start.pop(0))
            issue(LINEAR1, started[-1], f["inter"] // 128)
    return tiles


# ---------------------------------------------------------------- tests


@EXAMPLES
@given(problems())
def test_the_order_is_the_one_of_the_rules(problem):
    tiles = native.schedule(problem.shape, problem.rows)
    expected = expected_tiles(problem)
    for ticket, (have, want) in enumerate(zip(tiles, expected, strict=False)):
        assert have == want, f"ticket {ticket}: {have}, the rules say {want}"
    assert len(tiles) == len(expected)


@EXAMPLES
@given(problems())
def test_what_progress_rests_on(problem):
    """Each tile once; every dependency has a smaller ticket; no more live blocks than slots."""
    f = problem.fields
    l1_tiles, l2_tiles = f["inter"] // 128, f["hidden"] // 128
    tiles = native.schedule(problem.shape, problem.rows)
    blocks = blocks_of_call(problem)

    ticket = {(kind, b, n): t for t, (kind, _, b, _, _, n) in enumerate(tiles)}
    assert len(ticket) == len(tiles), "a tile comes twice"
    linear1 = set(product([LINEAR1], range(len(blocks)), range(l1_tiles)))
    linear2 = set(product([LINEAR2], range(len(blocks)), range(l2_tiles)))
    assert set(ticket) == linear1 | linear2

    first: dict[tuple[int, int], int] = {}  # tickets by (kind, block)
    last: dict[tuple[int, int], int] = {}
    for t, (kind, _, b, _, _, _) in enumerate(tiles):
        first.setdefault((kind, b), t)
        last[kind, b] = t
    for b in range(len(blocks)):
        assert last[LINEAR1, b] < first[LINEAR2, b]
        if b >= f["ring_l2"]:
            assert last[LINEAR2, b - f["ring_l2"]] < first[LINEAR1, b]
        if b >= f["ring_l1"]:
            assert last[LINEAR1, b - f["ring_l1"]] < first[LINEAR1, b]

    left = Counter(dict.fromkeys(range(len(blocks)), l2_tiles))
    live: set[int] = set()
    for kind, _, b, _, _, _ in tiles:
        if kind == LINEAR1:
            live.add(b)
            assert len(live) <= f["ring_l2"], f"{len(live)} live blocks"
        else:
            left[b] -= 1
            if left[b] == 0:
                live.remove(b)
    assert not live


@EXAMPLES
@given(problems())
def test_rows_are_partitioned(problem):
    """Linear 1 of column 0 visits every row of every expert once; a wave stays in one expert."""
    tiles = native.schedule(problem.shape, problem.rows)
    seen = Counter()
    for kind, expert, _, first_row, num_rows, n in tiles:
        assert 1 <= num_rows <= problem.fields["block_m"]
        if kind == LINEAR1 and n == 0:
            seen.update((expert, row) for row in range(first_row, first_row + num_rows))
    assert seen == Counter((e, r) for e, rows in enumerate(problem.rows) for r in range(rows))
    of_block = {(b, kind): (e, row) for kind, e, b, row, _, _ in tiles}
    for (b, kind), where in of_block.items():
        assert where == of_block[b, 1 - kind], f"block {b} differs between Linear 1 and Linear 2"


def test_example_by_hand():
    """Two experts of 3 and 1 rows, blocks of 2 rows, two slots, Linear 2 one block behind."""
    shape = make_shape(num_experts=2, block_m=2, ring_l1=2, ring_l2=2, hidden=256)
    assert native.schedule(shape, [3, 1]) == [
        (LINEAR1, 0, 0, 0, 2, 0),
        (LINEAR1, 0, 1, 2, 1, 0),
        (LINEAR2, 0, 0, 0, 2, 0),
        (LINEAR2, 0, 0, 0, 2, 1),
        (LINEAR1, 1, 2, 0, 1, 0),
        (LINEAR2, 0, 1, 2, 1, 0),
        (LINEAR2, 0, 1, 2, 1, 1),
        (LINEAR2, 1, 2, 0, 1, 0),
        (LINEAR2, 1, 2, 0, 1, 1),
    ]


def test_tails_by_hand():
    """Blocks of 128 rows and up to 16 more, if that saves the expert a block."""
    shape = make_shape(block_m=144, tail_rows=16, ring_l1=9, ring_l2=9, wave_blocks=3)

    def blocks(rows: int) -> list[tuple[int, int]]:
        tiles = native.schedule(shape, [rows])
        return [(first, num) for kind, _, _, first, num, _ in tiles if kind == LINEAR1]

    assert blocks(144) == [(0, 144)]
    assert blocks(145) == [(0, 128), (128, 17)]
    assert blocks(256) == [(0, 128), (128, 128)]
    assert blocks(257) == [(0, 144), (144, 113)]
    assert blocks(272) == [(0, 144), (144, 128)]
    assert blocks(273) == [(0, 128), (128, 128), (256, 17)]
    assert blocks(385) == [(0, 144), (144, 128), (272, 113)]


def test_no_rows_no_tiles():
    assert native.schedule(make_shape(num_experts=3, num_shared=1), [0, 0, 0, 0]) == []


@pytest.mark.parametrize("rings", [{"ring_l1": 1, "ring_l2": 3}, {"ring_l1": 3, "ring_l2": 1}])
def test_a_wave_that_does_not_fit_is_refused(rings):
    with pytest.raises(ValueError, match="wave_blocks"):
        native.schedule(make_shape(wave_blocks=2, **rings), [1])


# ---------------------------------------------------------------- where rows come from


@st.composite
def routings(draw):
    """(ranks, local experts, topk, shared, per rank: topk_idx as a list of tokens)."""
    ranks, local = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    topk, shared = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    expert = st.integers(-1, ranks * local - 1)
    token = st.lists(expert, min_size=topk, max_size=topk)
    tokens = st.lists(token, max_size=6)
    return ranks, local, topk, shared, [draw(tokens) for _ in range(ranks)]


@EXAMPLES
@given(routings(), st.data())
def test_row_sources(routing, data):
    """An expert's rows: own rank first, then upwards; within a rank by token and slot."""
    ranks, local, topk, shared, topk_idx = routing
    rank = data.draw(st.integers(0, ranks - 1))
    shape = make_shape(
        num_ranks=ranks, num_experts=ranks * local, topk=topk, num_shared=shared, max_tokens=6
    )
    # What rank `rank` receives: a route is token * topk + slot, in lists by expert.
    routes, counts = [], []
    for source in range(ranks):
        by_expert = [
            [
                token * topk + slot
                for token, experts in enumerate(topk_idx[source])
                for slot, expert in enumerate(experts)
                if expert == rank * local + e
            ]
            for e in range(local)
        ]
        routes.append([route for one in by_expert for route in one])
        counts.extend(len(one) for one in by_expert)

    expected = []
    for e in range(local):
        row = 0
        for i in range(ranks):
            source = (rank + i) % ranks
            for token, experts in enumerate(topk_idx[source]):
                for slot, expert in enumerate(experts):
                    if expert == rank * local + e:
                        expected.append((e, row, source, token, slot))
                        row += 1
    for s in range(shared):
        expected += [(local + s, t, rank, t, topk + s) for t in range(len(topk_idx[rank]))]

    have = native.row_sources(shape, rank, len(topk_idx[rank]), counts, routes)
    assert have == expected
