"""The oracle against a second, naive implementation, and the tolerance against planted bugs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import megamoe.reference.moe as moe
from megamoe.errors import InputError
from megamoe.reference.moe import combine, moe_forward, moe_forward_detail
from megamoe.reference.quant import dequantize_1x128, quantize_1x128
from megamoe.spec import MoESpec
from megamoe.weights import ExpertWeights
from tests.cases import Case, cases
from tests.compare import assert_bitwise, assert_matches_oracle

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=2)
LARGE = Case("large", MoESpec(hidden=512, inter=384, num_experts=8, topk=4), (96,), "masked:0.1")


# ---------------------------------------------------------------- a second implementation


def _round_e4m3(v: np.ndarray) -> np.ndarray:
    """Values of e4m3 codes nearest to v, by arithmetic on the grid instead of a cast."""
    magnitude = np.minimum(np.abs(v.astype(np.float64)), 448)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.copysign(np.rint(magnitude / step) * step, v).astype(np.float32)


def _quantise(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.maximum(np.abs(v.reshape(-1, 128)).max(1), np.float32(1e-30)) / np.float32(448)
    inverse = np.float32(1) / scale
    return _round_e4m3(v * inverse.repeat(128)), scale


def _matvec(x: np.ndarray, xs: np.ndarray, w: np.ndarray, ws: np.ndarray) -> np.ndarray:
    """One row, FP32 throughout, products one by one: the order of a simple kernel."""
    acc = np.zeros(w.shape[0], np.float32)
    for kb in range(len(x) // 128):
        partial = np.zeros_like(acc)
        for k in range(kb * 128, kb * 128 + 128):
            partial = partial + x[k] * w[:, k]
        acc = acc + partial * (xs[kb] * ws[:, kb].repeat(128))
    return acc


def _bf16(v: np.ndarray) -> np.ndarray:
    return torch.from_numpy(v.astype(np.float32)).bfloat16().float().numpy()


def _arrays(expert: ExpertWeights) -> tuple[np.ndarray, ...]:
    """(w1, scales, w2, scales); BF16 weights get scales of 1."""
    out = []
    for w, scale in ((expert.w1, expert.w1_scale), (expert.w2, expert.w2_scale)):
        if scale is None:
            scale = torch.ones(w.shape[0] // 128, w.shape[1] // 128)
        out += [w.float().numpy(), scale.numpy()]
    return tuple(out)


def _naive(case: Case) -> torch.Tensor:
    """Token by token and route by route, in numpy."""
    spec, rows = case.spec, []
    local = spec.experts_per_rank(case.num_ranks)
    every = [e for r in range(case.num_ranks) for e in case.experts(r)[:local]]
    experts = [_arrays(e) for e in (*every, *case.experts(0)[local:])]

    def requantise(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if spec.weight_dtype == "fp8":
            return _quantise(v)
        return _bf16(v), np.ones(len(v) // 128, np.float32)

    for rank in range(case.num_ranks):
        x, ids, weights = case.inputs(rank)
        for t in range(case.tokens[rank]):
            xq, xs = requantise(x[t].float().numpy())
            y = np.zeros(spec.hidden, np.float32)
            routes = [(int(e), float(w)) for e, w in zip(ids[t], weights[t], strict=True)]
            routes += [(spec.num_experts + s, 1.0) for s in range(spec.num_shared)]
            for e, weight in routes:
                if e < 0:
                    continue
                w1, s1, w2, s2 = experts[e]
                gate_up = _matvec(xq, xs, w1, s1)
                g, u = gate_up[: spec.inter], gate_up[spec.inter :]
                if spec.swiglu_clamp:
                    c = np.float32(spec.swiglu_clamp)
                    g, u = np.minimum(g, c), np.maximum(np.minimum(u, c), -c)
                hq, hs = requantise(g / (1 + np.exp(-g)) * u)
                slot = _bf16(_matvec(hq, hs, w2, s2)).astype(np.float64)
                y = (y + np.float64(np.float32(weight)) * slot).astype(np.float32)
            rows.append(torch.from_numpy(y).bfloat16())
    return torch.stack(rows)


NAIVE = [
    Case("fp8", SPEC, (5, 3)),
    Case("fp8-shared", replace(SPEC, num_shared=2, topk=3), (3, 4), "masked:0.4"),
    Case("fp8-clamp", replace(SPEC, swiglu_clamp=0.7), (6,), "duplicates:1"),
    Case("fp8-wide", replace(SPEC, hidden=512, inter=384), (5,)),
    Case("bf16", replace(SPEC, weight_dtype="bf16", num_shared=1), (5, 2), "masked:0.3"),
    Case("bf16-clamp", replace(SPEC, weight_dtype="bf16", swiglu_clamp=0.5), (5,)),
]


@pytest.mark.parametrize("case", NAIVE, ids=lambda c: c.name)
def test_oracle_equals_a_naive_implementation(case):
    assert_matches_oracle(_naive(case), case.expected_detail().y, case.spec, case.name)


# ---------------------------------------------------------------- the contract's corners


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_case_is_consistent(num_ranks):
    """Shapes, and non-finite values only where the input put them."""
    for case in cases(num_ranks):
        detail = case.expected_detail()
        tokens = sum(case.tokens)
        assert detail.y.shape == (tokens, case.spec.hidden), case.name
        assert detail.y.dtype == torch.bfloat16
        x = torch.cat([_dense(case.inputs(r)[0]) for r in range(num_ranks)])
        ids = torch.cat([case.inputs(r)[1] for r in range(num_ranks)])
        routed = (ids >= 0).any(1) | (case.spec.num_shared > 0)
        bad_in = ~x.isfinite().all(1) & routed
        bad_out = ~detail.y.isfinite().all(1)
        assert torch.equal(bad_in, bad_out), (case.name, bad_in.nonzero(), bad_out.nonzero())


def _dense(x) -> torch.Tensor:
    return dequantize_1x128(*x) if isinstance(x, tuple) else x.float()


def test_a_token_does_not_depend_on_its_batch():
    for case in (LARGE, replace(LARGE, spec=replace(LARGE.spec, weight_dtype="bf16"))):
        x, ids, weights = case.inputs(0)
        experts = case.experts(0)
        whole = moe_forward(case.spec, x, ids, weights, experts)
        rows = torch.tensor([90, 3, 41])
        part = moe_forward(case.spec, x[rows], ids[rows], weights[rows], experts)
        assert_bitwise(part, whole[rows])


def test_quantised_input_equals_bf16_input():
    x, ids, weights = LARGE.inputs(0)
    experts = LARGE.experts(0)
    a = moe_forward(LARGE.spec, x, ids, weights, experts)
    b = moe_forward(LARGE.spec, quantize_1x128(x), ids.int(), weights, experts)
    assert_bitwise(b, a)


def test_masked_routes_and_their_weights_are_not_read():
    x, ids, weights = Case("", SPEC, (6,), "masked:0.5").inputs(0)
    experts = dict(enumerate(Case("", SPEC, (6,)).experts(0)))
    assert bool(weights.isnan().any())
    y = moe_forward(SPEC, x, ids, weights, experts)
    assert bool(y.isfinite().all())
    used = {e for e in ids.flatten().tolist() if e >= 0}
    only = {e: w for e, w in experts.items() if e in used}
    assert_bitwise(moe_forward(SPEC, x, ids, weights, only), y)
    ids[2] = -1
    assert float(moe_forward(SPEC, x, ids, weights, experts)[2].abs().max()) == 0


def test_duplicates_count_each_time():
    x, ids, _ = Case("", SPEC, (4,)).inputs(0)
    experts = Case("", SPEC, (4,)).experts(0)
    ids[:, 1] = ids[:, 0]
    twice = moe_forward(SPEC, x, ids, torch.full((4, 2), 0.5), experts)
    single = torch.tensor([[1.0, 0.0]]).expand(4, 2).contiguous()
    once = moe_forward(SPEC, x, torch.stack([ids[:, 0], torch.full((4,), -1)], 1), single, experts)
    assert_bitwise(twice, once)  # 0.5 s + 0.5 s is exact


def test_a_shared_expert_is_a_route_of_weight_one_for_every_token():
    spec = replace(SPEC, topk=1, num_shared=1)
    case = Case("", spec, (7,))
    x, ids, _ = case.inputs(0)
    experts = case.experts(0)
    shared = experts[-1]
    nothing = torch.full_like(ids, -1)
    zero = torch.zeros(7, 1)
    alone = moe_forward(spec, x, nothing, zero, [], [shared])
    as_route = moe_forward(
        replace(SPEC, topk=1), x, torch.zeros_like(ids), torch.ones(7, 1), [shared]
    )
    assert_bitwise(alone, as_route)
    assert float(alone.float().abs().min(1).values.max()) > 0


def test_combine_is_an_fma_chain_in_ascending_order():
    generator = torch.Generator().manual_seed(5)
    slots = torch.randn(50, 4, 16, generator=generator).bfloat16()
    weights = torch.randn(50, 3, generator=generator)
    ids = torch.randint(-1, 4, (50, 3), generator=generator)
    slots[:, :3][ids < 0] = float("nan")
    want = torch.zeros(50, 16, dtype=torch.bfloat16)
    for t in range(50):
        y = np.zeros(16, np.longdouble)
        for j in range(4):
            if j == 3 or ids[t, j] >= 0:
                weight = np.longdouble(1.0 if j == 3 else weights[t, j].item())
                # 64 bits hold the product (24 + 8 bits) and, here, the sum: one rounding to FP32.
                y = np.longdouble((y + weight * slots[t, j].double().numpy()).astype(np.float32))
        want[t] = torch.from_numpy(y.astype(np.float32)).bfloat16()
    assert_bitwise(combine(slots, ids, weights), want)


def test_no_tokens():
    x, ids, weights = Case("", replace(SPEC, num_shared=1), (0,)).inputs(0)
    experts = Case("", replace(SPEC, num_shared=1), (0,)).experts(0)
    detail = moe_forward_detail(
        replace(SPEC, num_shared=1), x, ids, weights, experts[:-1], experts[-1:]
    )
    assert detail.y.shape == (0, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(x=a["x"].float()), "float32: give BF16"),
        (lambda a: a.update(x=a["x"][:, :128]), r"\(6, 128\): want \[T, 256\]"),
        (lambda a: a.update(x=(a["x"], torch.ones(6, 2))), "pair with torch.bfloat16"),
        (lambda a: a["ids"].__setitem__((3, 1), 8), r"topk_idx\[3, 1\] = 8.*0\.\.7"),
        (lambda a: a["ids"].__setitem__((0, 0), -2), r"topk_idx\[0, 0\] = -2"),
        (lambda a: a.update(ids=a["ids"][:, :1]), "want int32 or int64"),
        (lambda a: a.update(weights=a["weights"].double()), "want float32"),
        (lambda a: a.update(shared=a["experts"][:1]), "1 shared experts given: the spec has 0"),
    ],
)
def test_bad_input_is_named(change, message):
    case = Case("", SPEC, (6,))
    x, ids, weights = case.inputs(0)
    arguments = {"x": x, "ids": ids, "weights": weights, "experts": case.experts(0), "shared": ()}
    change(arguments)
    a = arguments
    with pytest.raises(InputError, match=message):
        moe_forward(SPEC, a["x"], a["ids"], a["weights"], a["experts"], a["shared"])


# ---------------------------------------------------------------- the tolerance finds bugs


_MATMUL, _SWIGLU, _COMBINE, _EXPERT = (
    moe.scaled_matmul,
    moe.swiglu,
    moe.combine,
    moe.expert_forward,
)


def _expert_with(requantise):
    """``expert_forward`` whose second linear reads what ``requantise`` makes of h."""

    def expert_forward(spec, x, x_scale, expert):
        _, inter, inter_scale = _EXPERT(spec, x, x_scale, expert)
        h = _SWIGLU(_MATMUL(x, x_scale, expert.w1, expert.w1_scale), None)
        ones = torch.ones_like(inter_scale)
        out = _MATMUL(requantise(h), ones, expert.w2, expert.w2_scale)
        return out.bfloat16(), inter, inter_scale

    return expert_forward


def _per_64(h):
    """Groups of 64, as a peer had them: closer to h, and not what the contract says."""
    groups = torch.nn.functional.pad(h.unflatten(1, (-1, 64)), (0, 64)).flatten(1)
    return dequantize_1x128(*quantize_1x128(groups)).unflatten(1, (-1, 128))[..., :64].flatten(1)


def _one_element(slots, ids, weights):
    y = _COMBINE(slots, ids, weights)
    y[7, 9] += 3 * y[7].float().pow(2).mean().sqrt()
    return y


BUGS = {
    "64-column groups": {"expert_forward": _expert_with(_per_64)},
    "not requantised": {"expert_forward": _expert_with(lambda h: h)},
    "gate and up swapped": {"swiglu": lambda g, c: _SWIGLU(g.roll(g.shape[1] // 2, 1), c)},
    "weight scale of the neighbour block": {
        "scaled_matmul": lambda x, xs, w, ws: _MATMUL(x, xs, w, ws.roll(1, 1))
    },
    "activation scale of the next group": {
        "scaled_matmul": lambda x, xs, w, ws: _MATMUL(x, xs.roll(1, 1), w, ws)
    },
    "last route lost": {
        "combine": lambda s, i, w: _COMBINE(s[:, :-1], i[:, :-1], w[:, :-1]),
    },
    "weights of another route": {"combine": lambda s, i, w: _COMBINE(s, i, w.roll(1, 1))},
    "one element of one token": {"combine": _one_element},
    "two tokens exchanged": {
        "combine": lambda s, i, w: _COMBINE(s, i, w)[[1, 0, *range(2, s.shape[0])]]
    },
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_outside_the_tolerance(bug, monkeypatch):
    case = replace(LARGE, routing="uniform")
    good = case.expected_detail().y
    for name, wrong in BUGS[bug].items():
        monkeypatch.setattr(moe, name, wrong)
    bad = case.expected_detail().y
    with pytest.raises(AssertionError, match=r"at \(\d+, \d+\): actual .* expected"):
        assert_matches_oracle(bad, good, case.spec, bug)


def test_a_missing_rounding_of_slots_is_outside_the_tolerance():
    case = replace(LARGE, routing="uniform")
    good = case.expected_detail()
    _, ids, weights = case.inputs(0)
    y = torch.zeros(len(ids), case.spec.hidden)
    for e, expert in enumerate(case.experts(0)):
        t, j = (ids == e).nonzero(as_tuple=True)
        inter = good.inter.view(torch.uint8)[t, j].view(torch.float8_e4m3fn)
        out = _MATMUL(inter, good.inter_scale[t, j], expert.w2, expert.w2_scale)
        y.index_add_(0, t, weights[t, j, None] * out)
    with pytest.raises(AssertionError, match="worst rows"):
        assert_matches_oracle(y.bfloat16(), good.y, case.spec)


def test_non_finite_values_must_agree():
    expected = torch.ones(2, 256).bfloat16()
    expected[1, 3] = float("nan")
    assert_matches_oracle(expected.clone(), expected, SPEC)
    for value in (1.0, float("inf")):
        actual = expected.clone()
        actual[1, 3] = value
        with pytest.raises(AssertionError, match=r"non-finite values differ; at \(1, 3\)"):
            assert_matches_oracle(actual, expected, SPEC)
    actual = expected.clone()
    actual[0, 200] = float("nan")
    with pytest.raises(AssertionError, match=r"at \(0, 200\): actual nan, expected 1.0"):
        assert_matches_oracle(actual, expected, SPEC)


def test_a_row_of_zeros_must_be_zeros():
    expected = torch.ones(2, 256).bfloat16()
    expected[1] = 0
    actual = expected.clone()
    actual[1, 3] = 1e-30
    with pytest.raises(AssertionError, match=r"at \(1, 3\)"):
        assert_matches_oracle(actual, expected, SPEC)


def test_bitwise_comparison_sees_a_last_bit_and_a_sign():
    a = torch.ones(2, 3).bfloat16()
    for value in (1.0078125, -1.0):
        b = a.clone()
        b[1, 2] = value
        with pytest.raises(AssertionError, match=r"1 of 6 differ; at \(1, 2\)"):
            assert_bitwise(b, a)
    zero = torch.zeros(1)
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        assert_bitwise(-zero, zero)


def test_the_tolerance_lets_another_order_of_summation_pass(monkeypatch):
    """FP32 partials by torch's own matmul: nothing to do with the oracle's order."""
    for spec in (LARGE.spec, replace(LARGE.spec, weight_dtype="bf16")):
        case = replace(LARGE, spec=spec)
        good = case.expected_detail()

        def matmul(x, xs, w, ws):
            acc = torch.zeros(x.shape[0], w.shape[0])
            for kb in range(x.shape[1] // 128):
                cols = slice(kb * 128, kb * 128 + 128)
                partial = x[:, cols].float() @ w[:, cols].float().T
                acc += (
                    partial
                    if xs is None
                    else partial * (xs[:, kb, None] * ws[:, kb].repeat_interleave(128))
                )
            return acc

        monkeypatch.setattr(moe, "scaled_matmul", matmul)
        other = case.expected_detail()
        monkeypatch.setattr(moe, "scaled_matmul", _MATMUL)
        found = assert_matches_oracle(other.y, good.y, spec)
        assert found.norm < 1e-3
