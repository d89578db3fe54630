"""The CUDA backend: against the oracle, and bit for bit against itself however it is configured.

Ranks are threads of this process that share one GPU, each with a stream and its part of the SMs, so
that the protocol of several ranks is tested where one GPU is all there is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megamoe.backends.cuda import CudaSession
from megamoe.backends.cuda_driver import check, driver_api
from megamoe.backends.cuda_halves import _measured, words_of
from megamoe.backends.cuda_placing import find_swapped
from megamoe.backends.cuda_weights import _aligned
from megamoe.errors import PeerTimeout
from megamoe.layer import open_layer
from megamoe.spec import MoESpec
from megamoe.weights import random_experts
from tests.cases import Case, cases
from tests.compare import assert_bitwise, assert_matches_oracle
from tests.gpu.moe_runs import BIG, LARGE, MINIMUM, bits, by_name, gpu, opened, run_case
from tests.groups import run_group

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _loaded():
    """Loads torch's kernels: loading one may wait for kernels of other ranks on the same GPU."""
    for name in ("fp8-shared", "fp8-x8", "bf16", "fp8-int32"):
        run_case(by_name(1)[name], LARGE)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("config", [MINIMUM, LARGE, BIG], ids=["minimum", "large", "big"])
def test_matches_oracle(num_ranks, config):
    for case in cases(num_ranks):
        for rank, (y, want) in enumerate(zip(run_case(case, config), case.expected(), strict=True)):
            if want.shape[0]:
                what = f"{case.name} R={num_ranks} rank {rank}"
                assert_matches_oracle(y, want, case.spec, what, bits(case.spec))


MANY = [
    Case("many", MoESpec(hidden=512, inter=384, num_experts=4, topk=2), (300,)),
    Case("many-one", MoESpec(hidden=512, inter=384, num_experts=4, topk=2), (390,), "one_expert"),
    Case("many-narrow", MoESpec(hidden=256, inter=128, num_experts=8, topk=2), (399,), "zipf:1.2"),
    Case(
        "many-bf16",
        MoESpec(hidden=512, inter=384, num_experts=4, topk=2, weight_dtype="bf16"),
        (300,),
    ),
]


@pytest.mark.parametrize("case", MANY, ids=lambda c: c.name)
def test_many_rows_match_the_oracle_and_the_few_row_path(case):
    """The switch between the two tile paths changes no bit."""
    [many], [want] = run_case(case, BIG), case.expected()
    assert_matches_oracle(many, want, case.spec, case.name, bits(case.spec))
    for block_m in (8, 64, 128):
        [few] = run_case(case, replace(BIG, block_m=block_m))
        assert_bitwise(few, many, f"{case.name} block_m {block_m} against {BIG.block_m}")


def test_many_tokens_for_few_units():
    """Routes in several rounds of loads, more experts than a pass over them lists, and more tokens
    of a warp than it looks at once when it combines."""
    spec = MoESpec(hidden=384, inter=128, num_experts=40, topk=8, num_shared=1)
    case = Case("many-tokens", spec, (1101, 40, 0, 75), "uniform+masked:0.2")
    config = replace(LARGE, max_tokens=1101, num_workers=4)
    for rank, (y, want) in enumerate(zip(run_case(case, config), case.expected(), strict=True)):
        if want.shape[0]:
            assert_matches_oracle(y, want, spec, f"{case.name} rank {rank}", bits(spec))


def test_slots_of_several_pieces_and_as_many_as_there_may_be():
    """A row that no piece divides, 32 routes and 8 shared experts of a token, some masked."""
    spec = MoESpec(hidden=2176, inter=128, num_experts=40, topk=32, num_shared=8)
    case = Case("pieces", spec, (101,), "uniform+masked:0.2")
    [y], [want] = run_case(case, replace(LARGE, num_workers=4)), case.expected()
    assert_matches_oracle(y, want, spec, case.name, bits(spec))


def test_ids_may_begin_at_any_word():
    """Routes are listed by loads of 16 bytes; ids may be a part of a tensor."""
    case = Case("words", MoESpec(hidden=256, inter=128, num_experts=8, topk=3), (301,))
    x, ids, weight = (gpu(v) for v in case.inputs(0))

    def run(rendezvous):
        outputs = []
        with opened(case.spec, LARGE, rendezvous) as layer:
            layer.load_weights(case.experts(0))
            for first in range(4):
                storage = torch.full((first + ids.numel(),), 7, dtype=torch.int32, device="cuda")
                part = storage[first:].view(ids.shape)
                part.copy_(ids)
                assert part.data_ptr() % 16 == first * 4
                outputs.append(layer.run(x, part, weight).cpu())
        return outputs

    [outputs], [want] = run_group(1, run), case.expected()
    assert_matches_oracle(outputs[0], want, case.spec, case.name, bits(case.spec))
    for first, y in enumerate(outputs):
        assert_bitwise(y, outputs[0], f"from word {first}")


@pytest.mark.parametrize("rows", [7, 16, 30, 45, 64, 77, 96, 97, 128, 129, 137, 144])
def test_every_box_of_rows_gives_the_same_bits(rows):
    """One block of so many rows, each box of the few-row path and both of the other, against
    blocks of 8."""
    spec = MoESpec(hidden=512, inter=384, num_experts=4, topk=2)
    _same_in_blocks_of_8(Case(f"rows-{rows}", spec, (rows,), "one_expert"))


@pytest.mark.parametrize("weight_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("rows", [145, 257, 272, 273, 288, 289, 390])
def test_tails_beside_other_blocks_give_the_same_bits(rows, weight_dtype):
    """Experts whose blocks partly have tails; an odd number of stages; both types."""
    spec = MoESpec(hidden=640, inter=384, num_experts=4, topk=2, weight_dtype=weight_dtype)
    _same_in_blocks_of_8(Case(f"tails-{rows}-{weight_dtype}", spec, (rows,), "one_expert"))


def _same_in_blocks_of_8(case):
    [y], [want] = run_case(case, BIG, calls=2), case.expected()
    assert_matches_oracle(y, want, case.spec, case.name, bits(case.spec))
    [small] = run_case(case, replace(BIG, block_m=8))
    assert_bitwise(small, y, case.name)


RINGS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (3, 2, 2), (5, 4, 3), (64, 64, 8)]


@pytest.mark.parametrize("name", ["fp8-shared", "fp8-all-to-one", "bf16-unequal", "fp8-zipf"])
def test_bits_do_not_depend_on_rings(name):
    case = by_name(2)[name]
    base = run_case(case, BIG)
    for b1, b2, wave in RINGS:
        for workers, lag, block_m in ((1, 0, 8), (3, 2, 16), (0, 1, 144)):
            config = replace(
                MINIMUM,
                block_m=block_m,
                ring_l1_blocks=b1,
                ring_l2_blocks=b2,
                wave_blocks=wave,
                l2_lag_blocks=lag,
                num_workers=workers,
            )
            for rank, (y, want) in enumerate(
                zip(run_case(case, config, calls=2), base, strict=True)
            ):
                assert_bitwise(y, want, f"{name} {config} rank {rank}")


@pytest.mark.parametrize("name", ["fp8-shared", "bf16-shared-clamp", "fp8-duplicates-masked"])
def test_bits_do_not_depend_on_ep_size(name):
    """One batch, dealt over 1, 2 and 4 ranks."""
    case = by_name(1)[name]
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    [whole] = run_case(case, LARGE)
    for tokens in ((4, x.shape[0] - 4), (0, 1, x.shape[0] - 3, 2)):
        part = replace(case, tokens=tokens)
        first = [sum(tokens[:r]) for r in range(len(tokens))]

        def body(rendezvous, part=part, first=first, tokens=tokens):
            r = rendezvous.rank
            rows = slice(first[r], first[r] + tokens[r])
            config = replace(MINIMUM, num_ranks=len(tokens), timeout_s=5)
            with opened(part.spec, config, rendezvous) as layer:
                layer.load_weights(part.experts(r))
                return layer.run(x[rows], ids[rows], weight[rows]).cpu()

        assert_bitwise(torch.cat(run_group(len(tokens), body)), whole, f"{name} over {tokens}")


@pytest.mark.parametrize("weight_dtype", ["fp8", "bf16"])
def test_bits_do_not_depend_on_the_batch(weight_dtype):
    """A token's row is the same alone, among others, and at any place in the batch."""
    case = by_name(1)["fp8-shared"]
    case = replace(case, spec=replace(case.spec, weight_dtype=weight_dtype), tokens=(350,))
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    with open_layer(case.spec, replace(BIG, timeout_s=5), backend="cuda") as layer:
        layer.load_weights(case.experts(0))
        whole = layer.run(x, ids, weight)
        order = torch.randperm(350, generator=torch.Generator().manual_seed(3)).cuda()
        shuffled = layer.run(x[order], ids[order], weight[order])
        assert_bitwise(shuffled.cpu(), whole[order].cpu(), "shuffled")
        for t in (0, 31, 349):
            y = layer.run(x[t : t + 1], ids[t : t + 1], weight[t : t + 1])
            assert_bitwise(y[0].cpu(), whole[t].cpu(), f"token {t} alone")


def test_calls_follow_each_other_with_other_inputs():
    """State of one call (counts, routes, ring positions) never reaches the next."""
    every = [c for c in cases(2) if c.spec == by_name(2)["fp8"].spec and c.seed == 1]

    def body(rendezvous):
        config = replace(MINIMUM, num_ranks=2, timeout_s=5)
        with opened(every[0].spec, config, rendezvous) as layer:
            layer.load_weights(every[0].experts(rendezvous.rank))
            inputs = [[gpu(v) for v in c.inputs(rendezvous.rank)] for c in every]
            return [layer.run(*i).cpu() for _ in range(3) for i in inputs]

    results = run_group(2, body)
    for i, case in enumerate(every * 3):
        for rank, want in enumerate(case.expected()):
            if want.shape[0]:
                what = f"call {i} {case.name} rank {rank}"
                assert_matches_oracle(results[rank][i], want, case.spec, what, bits(case.spec))


def test_graphs_replay_with_changed_inputs():
    """Two graphs on one window, replayed in turn with new inputs, against eager calls."""
    case = replace(by_name(1)["fp8-shared"], tokens=(40,))
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    ids = ids.int()
    session = CudaSession(case.spec, replace(BIG, timeout_s=5), _alone())
    session.load_weights(case.experts(0))

    def eager(tokens, shift):
        y = torch.full(
            (tokens, case.spec.hidden), float("nan"), dtype=torch.bfloat16, device="cuda"
        )
        session.stage(x[shift : shift + tokens], None)
        session.run_moe(
            ids[shift : shift + tokens].contiguous(), weight[shift : shift + tokens].contiguous(), y
        )
        return y

    graphs = []
    for tokens in (9, 20):
        sx, si, sw = x[:tokens].clone(), ids[:tokens].clone(), weight[:tokens].clone()
        y = torch.zeros(tokens, case.spec.hidden, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            session.stage(sx, None)
            session.launch(si, sw, y)
        graphs.append((graph, tokens, sx, si, sw, y))
    for shift in (0, 7, 19):
        want = [eager(tokens, shift) for _, tokens, *_ in graphs]
        for (graph, tokens, sx, si, sw, y), expected in zip(graphs, want, strict=True):
            rows = slice(shift, shift + tokens)
            sx.copy_(x[rows])
            si.copy_(ids[rows])
            sw.copy_(weight[rows])
            y.fill_(float("nan"))
            for _ in range(3):
                graph.replay()
            session.check()
            assert_bitwise(y.cpu(), expected.cpu(), f"{tokens} tokens from {shift}")
    session.close()


def test_a_call_that_fails_in_its_combine_is_mended():
    """Its CTAs have counted themselves out by then, so it closes the call and fails."""
    case = replace(by_name(1)["fp8-shared"], tokens=(40,))
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    ids = ids.int()
    session = CudaSession(case.spec, replace(BIG, timeout_s=0.3), _alone())
    session.load_weights(case.experts(0))

    def call():
        y = torch.full_like(x, float("nan"), dtype=torch.bfloat16)
        session.stage(x, None)
        session.run_moe(ids, weight, y)
        return y.cpu()

    want = call()
    address = session._address("token_arrived") + 4 * 17  # no count that a token can have
    check(driver_api().cuMemsetD8(address, 0x11, 4), "a wrong count")
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeout) as caught:
        call()
    record = caught.value.record
    assert (record.phase, record.tag, record.index) == ("combine", "token_arrived", 17)
    assert record.epoch == 2
    with pytest.raises(PeerTimeout):
        call()  # only reset() mends it
    session.reset(20)
    assert_bitwise(call(), want, "after reset")
    session.close()


def test_more_calls_than_a_counts_flag_has_epochs():
    """A flag is a whole 65536th of its word for each call (protocol.hpp), so it starts over."""
    case = replace(by_name(1)["fp8-shared"], tokens=(9,))
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    ids = ids.int()
    session = CudaSession(case.spec, replace(BIG, timeout_s=5), _alone())
    session.load_weights(case.experts(0))
    y = torch.zeros(9, case.spec.hidden, dtype=torch.bfloat16, device="cuda")
    session.stage(x, None)
    session.run_moe(ids, weight, y)
    want = y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(64):
            session.stage(x, None)
            session.launch(ids, weight, y)
    for _ in range(2**16 // 64 + 2):
        graph.replay()
    y.fill_(float("nan"))
    graph.replay()
    session.check()
    assert session.counters().epoch > 2**16
    assert_bitwise(y.cpu(), want.cpu(), "after 65536 calls")
    session.close()


@pytest.mark.parametrize("block_m", [16, 128, 144])
@pytest.mark.parametrize("weight_dtype", ["fp8", "bf16"])
def test_two_streams_of_tickets_change_no_bit(weight_dtype, block_m, monkeypatch):
    """More tickets than CTAs and fewer, none at all, and rings with room for hardly a wave."""
    spec = MoESpec(hidden=1024, inter=768, num_experts=16, topk=4, weight_dtype=weight_dtype)
    case = Case("streams", spec, (400,), "zipf:1.2")
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    found, streams, placed = {}, {}, {}
    for name, asked, rings, workers in (
        ("one", "1", 0, 0),
        ("two", "", 0, 0),
        ("two, short rings", "", 3, 0),
        ("few CTAs", "", 0, 100),
    ):
        monkeypatch.setenv("MEGAMOE_STREAMS", asked)
        config = replace(
            BIG,
            block_m=block_m,
            wave_blocks=2,
            ring_l1_blocks=rings,
            ring_l2_blocks=rings,
            num_workers=workers,
            timeout_s=5,
        )
        with open_layer(spec, config, backend="cuda") as layer:
            layer.load_weights(case.experts(0))
            streams[name] = layer._session.num_streams
            placed[name] = layer._session.placed
            found[name] = [
                layer.run(x[:n], ids[:n], weight[:n]).cpu() for n in (400, 3, 0, 37, 400, 1)
            ]
    most = 1 if _halves() is None else 2
    assert streams == {"one": 1, "two": most, "two, short rings": most, "few CTAs": 1}
    two = _has_the_pattern()
    assert placed == {"one": False, "two": two, "two, short rings": two, "few CTAs": False}
    assert_matches_oracle(found["one"][0], case.expected()[0], spec, case.name, bits(spec))
    for name, outputs in found.items():
        for call, (y, want) in enumerate(zip(outputs, found["one"], strict=True)):
            assert_bitwise(y, want, f"{name}, call {call}")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _halves() -> list[bool] | None:
    """As measured; an H200's SMs must show them."""
    found = _measured(_device())
    assert found or "H200" not in torch.cuda.get_device_name()
    return found


def _has_the_pattern() -> bool:
    """Whether this GPU's memory belongs to halves of L2 as an H200's; an H200's must."""
    halves = _halves()
    if halves is None:
        return False
    tiles = _aligned((1, 2, 2048, 256, 128), _device())
    found = find_swapped([tiles], words_of(halves)) is not None
    assert found or "H200" not in torch.cuda.get_device_name()
    return found


@pytest.mark.parametrize(("hidden", "weight_dtype"), [(896, "fp8"), (4480, "bf16")])
def test_placed_weights_change_no_bit(hidden, weight_dtype, monkeypatch):
    """Loaded in any order, and again; half a tile at the end; one word of bits for K and two."""
    spec = MoESpec(
        hidden=hidden, inter=768, num_experts=8, topk=2, num_shared=1, weight_dtype=weight_dtype
    )
    case = Case("placed", spec, (400,), "zipf:1.2")
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    config = replace(BIG, block_m=128, wave_blocks=2, timeout_s=5)
    found, placed = {}, {}
    for asked in ("1", ""):
        monkeypatch.setenv("MEGAMOE_STREAMS", asked)
        with open_layer(spec, config, backend="cuda") as layer:
            layer.load_weights(random_experts(spec, 0, 1, seed=77))
            other = layer.run(x, ids, weight).cpu()
            experts = list(case.experts(0))
            layer.load_weights(experts[::-2])
            layer.load_weights(experts[-2::-2])
            found[asked] = other, layer.run(x, ids, weight).cpu()
            placed[asked] = layer._session.placed
    if hidden < 1024:
        assert_matches_oracle(found["1"][1], case.expected()[0], spec, case.name, bits(spec))
    for y, want, what in zip(found[""], found["1"], ("first", "second"), strict=True):
        assert_bitwise(y, want, f"the {what} weights")
    assert placed == {"1": False, "": _has_the_pattern()}


def test_measuring_memory_leaves_it_as_it_is():
    """Whatever the halves are."""
    halves = _halves() or [False]
    tiles = _aligned((2, 4, 56, 256, 128), _device()).random_(0, 256)
    before = tiles.clone()
    first, second = (find_swapped([tiles], words_of(halves)) for _ in range(2))
    assert torch.equal(tiles, before)
    if first is not None:
        assert second is not None
        assert first[0].shape == (2, 2, 56)
        share = (first[0] == second[0]).double().mean()
        assert share > 0.99, f"windows that were measured alike: {share}"


def kernels(work) -> Counter:
    """Names of the kernels that some calls launched, and how often."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        work()
        torch.cuda.synchronize()
    return Counter(
        event.name
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    )


@pytest.mark.parametrize("name", ["fp8-shared", "fp8-x8", "bf16"])
def test_a_call_is_one_kernel(name):
    """What the profiler sees of seven calls, staging included, and what ``run``'s checks add."""
    case = by_name(1)[name]
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    ids = ids.int()
    hidden, scale = x if isinstance(x, tuple) else (x, None)
    y = torch.empty(hidden.shape, dtype=torch.bfloat16, device="cuda")
    session = CudaSession(case.spec, replace(BIG, timeout_s=5), _alone())
    session.load_weights(case.experts(0))

    def calls():
        for _ in range(7):
            session.stage(hidden, scale)
            session.launch(ids, weight, y)

    kernels(calls)  # the profiler's own first start
    assert kernels(calls) == {"megamoe_moe": 7}
    session.close()
    with open_layer(case.spec, replace(BIG, timeout_s=5), backend="cuda") as layer:
        layer.load_weights(case.experts(0))
        found = kernels(lambda: [layer.run(x, ids, weight) for _ in range(7)])
    ours = {k: n for k, n in found.items() if k.startswith("megamoe")}
    assert ours == {"megamoe_moe": 7}
    # Ids are looked at before a peer is touched.
    others = [k for k in found if k not in ours]
    assert all("reduce" in k or "minmax" in k.lower() for k in others), others


@pytest.mark.parametrize("name", ["fp8-x8", "bf16"])
def test_rows_written_into_the_window_are_not_staged(name):
    """The kernel is told of no rows, and gives the same bits."""
    case = by_name(1)[name]
    x, ids, weight = (gpu(v) for v in case.inputs(0))
    ids = ids.int()
    [want] = run_case(case, BIG)
    with open_layer(case.spec, replace(BIG, timeout_s=5), backend="cuda") as layer:
        layer.load_weights(case.experts(0))
        buffers = layer.input_buffers()
        rows = ids.shape[0]
        own = [b[:rows] for b in buffers if b is not None]
        for target, source in zip(own, x if isinstance(x, tuple) else (x,), strict=True):
            target.view(torch.uint8).copy_(source.view(torch.uint8))
        given = tuple(own) if len(own) == 2 else own[0]
        y = layer.run(given, ids, weight)
        assert_bitwise(y.cpu(), want, f"{name} in place")
        session = layer._session
        session.stage(*given if isinstance(given, tuple) else (given, None))
        assert not session._params.stage_x, "rows of the window would be staged onto themselves"
        session.stage(*x if isinstance(x, tuple) else (x, None))
        assert session._params.stage_x


def test_a_missing_rank_is_named_and_reset_mends_it():
    """Rank 1 does not call: rank 0 raises within the limit, the context lives, reset repairs."""
    case = by_name(2)["fp8-shared"]
    want = run_case(case, LARGE)

    def body(rendezvous):
        config = replace(LARGE, num_ranks=2, timeout_s=0.3)
        with opened(case.spec, config, rendezvous) as layer:
            layer.load_weights(case.experts(rendezvous.rank))
            inputs = [gpu(v) for v in case.inputs(rendezvous.rank)]
            if rendezvous.rank == 0:
                with pytest.raises(PeerTimeout) as caught:
                    layer.run(*inputs)
                assert caught.value.record.peer == 1
                assert caught.value.record.tag == "counts_flag"
            layer.reset(20)
            return layer.run(*inputs).cpu()

    for rank, (y, expected) in enumerate(zip(run_group(2, body), want, strict=True)):
        assert_bitwise(y, expected, f"rank {rank} after reset")


def _alone():
    from megamoe.symmetric.base import find_rendezvous

    return find_rendezvous(1)
