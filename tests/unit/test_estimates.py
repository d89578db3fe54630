"""Models of time against numbers worked out by hand, published tables and measured rows."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.estimate_gaps import (
    DECODERS,
    WAYS,
    KernelWork,
    Way,
    decode_kernels,
    gap_estimate,
    read_kernels,
)
from launcher.estimate_layer import FITTED, fit, moe_error, predict
from launcher.estimate_once import distinct_ranks, once_per_rank
from launcher.estimates import H200, load, overlap, padded_rows, roofline
from launcher.workloads import route
from megamoe.errors import SpecError
from megamoe.spec import MODELS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def estimate(*args: str):
    return CliRunner().invoke(app, ["estimate", *args])


def rows_of(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["rows"]


# ---------------------------------------------------------------- gaps

# The published table of the estimate: model, batch, context, µs of data, then the step one by one
# and in a graph with gaps of 0.5, 1, 2 and 3 µs.
PUBLISHED = [
    ("qwen3-0.6b", 1, 1024, 283, 461, (1415, 602, 744, 1027, 1310)),
    ("qwen3-8b", 1, 1024, 363, 5371, (5552, 5552, 5734, 6097, 6460)),
    ("qwen3-0.6b", 64, 4096, 283, 11023, (11164, 11164, 11306, 11589, 11872)),
]


@pytest.mark.parametrize(("model", "batch", "context", "count", "data", "steps"), PUBLISHED)
def test_gaps_reproduce_the_published_table(model, batch, context, count, data, steps):
    kernels = decode_kernels(DECODERS[model], batch, context)
    ways = [(0.5, 5.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]
    for (gap, launch), total in zip(ways, steps, strict=True):
        found = gap_estimate(kernels, 3.35e12 * 0.85, Way("", gap, launch, ""))
        assert found.kernels == count
        assert round(found.data_us) == data
        assert round(found.total_us) == total, (gap, launch)
        assert found.share == pytest.approx(1 - data / total, abs=2e-3)


def test_a_slow_host_is_the_bound_only_where_it_is_slower():
    kernels = [KernelWork("a", us=3.0, count=10)]
    assert gap_estimate(kernels, 1e12, Way("", 1.0, 5.0, "")).bound == "host"
    gpu = gap_estimate(kernels, 1e12, Way("", 1.0, 3.5, ""))
    assert (gpu.bound, gpu.total_us, gpu.gaps_us) == ("gpu", 40.0, 10.0)


def test_kernel_lists_are_read_from_json_and_csv(tmp_path):
    as_json, as_csv = tmp_path / "list.json", tmp_path / "list.csv"
    as_json.write_text('[{"name": "a", "bytes": 8e6, "count": 3}, {"name": "b", "us": 2.5}]')
    as_csv.write_text("name,bytes,us,count\na,8e6,,3\nb,,2.5,\n")
    expected = [KernelWork("a", 8e6, None, 3), KernelWork("b", 0.0, 2.5, 1)]
    assert read_kernels(as_json) == read_kernels(as_csv) == expected
    found = gap_estimate(expected, 4e12, Way("", 0.5, 0.0, ""))
    assert (found.kernels, found.data_us) == (4, pytest.approx(3 * 2.0 + 2.5))
    shown = estimate("gaps", "--kernels", str(as_csv), "--json")
    assert shown.exit_code == 0, shown.output
    assert {w["kernels"] for w in json.loads(shown.stdout)["ways"]} == {4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no kernels"),
        ("{", "no JSON file"),
        ("[3]", "kernel 0 is 3"),
        ('[{"name": "a"}]', "either bytes or us"),
        ('[{"bytes": 1, "us": 2}]', "either bytes or us"),
        ('[{"bytes": 1}, {"bytes": "x"}]', "kernel 1"),
        ('[{"us": -1}]', "not negative"),
        ('[{"us": 1, "count": 0}]', "count from 1"),
    ],
)
def test_a_bad_kernel_list_is_refused_with_its_place(tmp_path, text, message):
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_kernels(path)
    assert estimate("gaps", "--kernels", str(path)).exit_code == 2


def test_measured_ways_are_those_of_the_committed_run():
    found = json.loads((RESULTS / "pdl_chain_h200.json").read_text())
    layers = found["meta"]["layers"]
    rows = {(r["mode"], r["trigger"]): r for r in found["rows"] if r["elements"] == 16384}
    modes = [
        ("stream", None),
        ("stream_pdl", "end"),
        ("graph", None),
        ("graph_pdl", "end"),
        ("graph_pdl", "start"),
    ]
    for way, mode in zip(WAYS, modes, strict=False):
        assert way.gap_us == round(rows[mode]["stamped"]["gap_us"], 2), mode
        launch = 0.0 if mode[0].startswith("graph") else round(rows[mode]["host_us"] / layers, 1)
        assert way.launch_us == launch, mode


# ---------------------------------------------------------------- overlap and roofline


def test_overlap_bound_is_the_published_one():
    """V4-Pro: 6hd FLOPs over 3h bytes, so 2d = 6144 FLOP/B."""
    found = {f.name: f.value for f in overlap(MODELS["v4-pro"], 8, H200)}
    assert found["published bound"] == 6144
    assert found["C/B"] == pytest.approx(1250e12 / 335e9)
    # By hand: a row of 7168 e4m3 and 56 scales in, 7168 BF16 out, 7 of 8 rows remote.
    assert found["V_comm"] == (7168 + 56 * 4 + 2 * 7168) * 7 / 8
    assert found["bound here"] == pytest.approx(6 * 7168 * 3072 / found["V_comm"])
    assert found["hidden"] == 1.0


def test_what_cannot_be_hidden_says_which_link_would():
    slow = replace(H200, link=100e9)
    found = {f.name: f.value for f in overlap(MODELS["qwen3-30b"], 8, slow)}
    assert found["hidden"] < 1
    enough = replace(slow, link=found["link needed"] * 1e9)
    again = {f.name: f.value for f in overlap(MODELS["qwen3-30b"], 8, enough)}
    assert again["hidden"] == pytest.approx(1.0)
    alone = {f.name: f.value for f in overlap(MODELS["qwen3-30b"], 1, slow)}
    assert alone["bound here"] == math.inf
    assert alone["hidden"] == 1.0


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "floor"),
    # Floors of public rows at EP4, µs, uniform routing: arithmetic or weights.
    [("v4-flash", 4, 512, 343), ("v4-flash", 4, 8192, 1988), ("deepseek-v3", 4, 4096, 2320)],
)
def test_floor_is_that_of_the_results(model, ranks, tokens, floor):
    """Measured floors are of one draw of routes, so of a rank a little busier than the mean."""
    spec = replace(MODELS[model], num_shared=0)
    found = {f.name: f.value for f in roofline(load(spec, ranks, tokens), H200)}
    assert found["floor"] == pytest.approx(floor, rel=0.01)


def test_load_counts_by_hand():
    """E 8, K 2, R 2, T 1: a rank's 4 experts; 2 routes of 2 tokens, each away from home by half."""
    spec = replace(MODELS["qwen3-30b"], num_experts=8, topk=2)
    work = load(spec, 2, 1)
    assert work.rows == 2
    assert work.active_experts == pytest.approx(4 * (1 - (6 / 8) ** 2))
    assert work.flops == 6 * 2 * 2048 * 768
    row, back = 2048 + 2048 / 128 * 4, 2 * 2048
    assert work.link_bytes == pytest.approx(0.5 * 2 * (row + back))
    assert load(spec, 1, 1).link_bytes == 0
    busy = load(spec, 2, 1, imbalance=2.0)
    assert busy.rows == 4
    # Out: own rows at half the routes, and results of twice as many received ones.
    assert busy.link_bytes == pytest.approx(0.5 * max(4 * row + 2 * back, 2 * row + 4 * back))


def test_padded_rows_are_the_kernels_boxes():
    expected = {0: 0, 1: 8, 8: 8, 9: 16, 33: 48, 96: 96, 97: 128, 128: 128, 129: 136, 250: 256}
    assert {n: padded_rows(n) for n in expected} == expected


# ---------------------------------------------------------------- a layer's time


def test_phases_add_up_and_the_floor_is_below():
    found = predict(MODELS["v4-flash"], 8, 1024)
    assert found.total_us == pytest.approx(sum(p.value for p in found.phases))
    assert found.floor_us < found.total_us
    assert {"staging", "routes", "counts", "fixed", "tiles", "combine"} == {
        p.name for p in found.phases
    }


@pytest.mark.parametrize("tokens", [8, 512, 8192])
def test_more_link_never_costs_time_and_no_phase_is_negative(tokens):
    times = [
        predict(MODELS["deepseek-v3"], 8, tokens, replace(H200, link=gbs * 1e9)).total_us
        for gbs in (25, 50, 100, 335, 900)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    assert all(p.value >= 0 for p in predict(MODELS["deepseek-v3"], 1, tokens).phases)


def test_tiles_of_a_link_bound_call_approach_the_link():
    """With a link a thousand times slower, everything else vanishes in the p-norm."""
    slow = replace(H200, link=335e6)
    tiles = next(p for p in predict(MODELS["v4-flash"], 8, 4096, slow).phases if p.name == "tiles")
    work = load(MODELS["v4-flash"], 8, 4096)
    assert tiles.value == pytest.approx(work.link_bytes / 335e6 * 1e6, rel=1e-3)


def test_ranks_of_a_token_by_counting_all_choices():
    spec = replace(MODELS["qwen3-30b"], num_experts=12, topk=3)
    for ranks in (1, 2, 3, 4, 6, 12):
        local = 12 // ranks
        choices = list(combinations(range(12), 3))
        counted = sum(len({e // local for e in chosen}) for chosen in choices) / len(choices)
        assert distinct_ranks(spec, ranks) == pytest.approx(counted), ranks


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_of_a_token_and_bytes_are_those_of_drawn_routes(ranks):
    """Uniform routes as benchmarks draw them: means of 8192 tokens, within five of their sigmas."""
    spec, tokens = replace(MODELS["v4-flash"], num_shared=0), 8192 // ranks
    local, away = spec.experts_per_rank(ranks), 0
    distinct = []
    for rank in range(ranks):
        ids, _ = route("uniform", spec, ranks, rank, tokens, 3)
        of_tokens = [set(row) for row in (ids // local).tolist()]
        distinct += [len(owners) for owners in of_tokens]
        away += sum(len(owners - {rank}) for owners in of_tokens)
    found = once_per_rank(spec, ranks, tokens)
    sigma = statistics.stdev(distinct) / math.sqrt(len(distinct))
    assert statistics.mean(distinct) == pytest.approx(found.distinct, abs=5 * sigma)
    counted = away / ranks * (4096 * (1 + 4 / 128) + 2 * 4096)
    assert found.summed_first_bytes == pytest.approx(counted, rel=0.02)
    assert found.summed_first_bytes < found.pulled_once_bytes < found.link_bytes


def test_sending_once_saves_nothing_without_repeats_and_never_costs():
    for ranks in (1, 2, 8, 64):
        once = once_per_rank(MODELS["deepseek-v3"], ranks, 4096)
        assert once.total_us == predict(MODELS["deepseek-v3"], ranks, 4096).total_us
        assert once.summed_first_us < once.pulled_once_us <= once.total_us
    alone = replace(MODELS["deepseek-v3"], num_experts=64, topk=1)
    once = once_per_rank(alone, 8, 4096)
    assert once.distinct == pytest.approx(1)
    assert once.summed_first_bytes == pytest.approx(once.link_bytes)
    assert once.summed_first_us == pytest.approx(once.total_us)


# Files on which the docs state the model's error: below 5 % root mean square and 10 % at worst.
MEASURED = ("moe_h200x1.json", "moe_h200x2.json", "moe_h200x4.json")


@pytest.mark.parametrize("name", MEASURED)
def test_error_on_measured_rows_is_as_stated(name):
    errors = [e["error"] for e in moe_error(rows_of(name))]
    assert errors, "no measured rows"
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) <= 0.05, errors
    assert max(map(abs, errors)) <= 0.10, errors


def test_coefficients_are_those_of_the_committed_rows():
    """Within what a new run of the same kernel may move them."""
    rows = [row for name in MEASURED for row in rows_of(name)]

    def rms(coefficients):
        errors = [e["error"] for e in moe_error(rows, with_=coefficients)]
        return math.sqrt(sum(e * e for e in errors) / len(errors))

    assert rms(FITTED) <= rms(fit(rows)) + 0.01


def test_a_fit_recovers_the_coefficients_of_made_up_rows():
    wanted = replace(FITTED, flops=0.84, read=0.94, sharpness=4.0, fixed_us=20.0)
    rows = [
        {
            "model": model,
            "ranks": 2,
            "tokens": tokens,
            "routing": "uniform",
            "total_us": predict(
                replace(MODELS[model], num_shared=0), 2, tokens, with_=wanted
            ).total_us,
        }
        for model in ("v4-flash", "deepseek-v3")
        for tokens in (8, 256, 1024, 8192)
    ]
    assert fit(rows) == wanted
    with pytest.raises(SpecError, match="at least 6"):
        fit(rows[:5])


X2 = str(RESULTS / "moe_h200x2.json")


def test_options_choose_the_rows_that_the_model_is_compared_with():
    def rows(*args):
        found = estimate("moe", "--against", X2, *args, "--json")
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)["rows"]

    every = rows()
    assert {r["model"] for r in every} == {"v4-flash", "deepseek-v3", "v4-pro"}
    few = rows("--model", "deepseek-v3", "--tokens", "64,8192", "--ranks", "2")
    assert [(r["model"], r["tokens"]) for r in few] == [("deepseek-v3", 64), ("deepseek-v3", 8192)]
    assert all(r in every for r in few)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["moe", "--model", "gpt-2"], "--model gpt-2"),
        (["moe", "--ranks", "72", "--model", "v4-pro"], "not divisible"),
        (["moe", "--ranks", "0"], "--ranks 0"),
        (["moe", "--imbalance", "9", "--ranks", "8"], "imbalance = 9"),
        (["moe", "--refit"], "--refit needs"),
        (["moe", "--against", str(RESULTS / "stress_cpu.json")], "no rows of `megamoe bench moe`"),
        (["moe", "--against", str(RESULTS / "moe_cpu.json"), "--refit"], "on CPU ranks"),
        (["moe", "--against", X2, "--imbalance", "2"], "--imbalance"),
        (["moe", "--against", X2, "--ranks", "7"], "of ranks 7: it has deepseek-v3 EP2 of 256"),
        (["roofline", "--tokens", "few"], "--tokens few"),
        (["overlap", "--link-gbs", "-3"], "--link-gbs: -3e+09 a second; a rate must be positive"),
        (["gaps", "--model", "gpt-2"], "--kernels FILE"),
        (["gaps", "--kernels", "k.csv", "--batch", "2"], "leave --batch out"),
        (["gaps", "--bandwidth", "-1"], "bandwidth"),
    ],
)
def test_estimates_say_what_is_wrong(args, message):
    found = estimate(*args)
    assert found.exit_code == 2, found.output
    assert message in found.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["gaps"],
        ["overlap", "--ranks", "1,2,72"],
        ["roofline"],
        ["moe", "--ranks", "1,8,72", "--experts", "432"],
        ["moe", "--against", str(RESULTS / "moe_h200x1.json")],
    ],
)
def test_every_estimate_is_labelled_a_model_and_names_sources(args):
    found = estimate(*args, "--json")
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["label"] == "a model, not a measurement"
    assert "NaN" not in found.stdout
    assert "Infinity" not in found.stdout
    shown = estimate(*args)
    assert shown.exit_code == 0, shown.output
    assert "model" in shown.stdout
    if "--against" not in args:
        assert "source" in found.stdout


# ---------------------------------------------------------------- docs

DOC = Path(__file__).parents[2] / "docs" / "estimates.md"


def doc_rows(first: str) -> list[list[str]]:
    """Cells of the table whose first column is headed ``first``."""
    lines = iter(DOC.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    assert found, first
    return found


def test_the_documented_chain_is_the_committed_run():
    rows = json.loads((RESULTS / "pdl_chain_h200.json").read_text())["rows"]
    by_key = {(r["mode"], str(r["elements"]), r["trigger"] or ""): r for r in rows}
    shown = doc_rows("launched")
    assert {tuple(cells[:3]) for cells in shown} == set(by_key)
    for mode, elements, trigger, *figures in shown:
        row = by_key[mode, elements, trigger]
        expected = [
            f"{row['span_us']:.1f}",
            f"{row['per_kernel_us']:.2f}",
            f"{row['stamped']['gap_us']:.2f}",
            f"{row['stamped']['body_us']:.2f}",
            f"{row['back_to_back_us']:.0f}",
        ]
        assert figures == expected, (mode, elements, trigger)


def test_the_documented_model_is_what_it_computes():
    slow = replace(H200, link=50e9)
    for model, tokens, *figures in doc_rows("layer | tokens per rank"):
        spec = replace(MODELS[model], num_shared=0)
        times = [predict(spec, r, int(tokens)).total_us for r in (2, 4, 8, 16, 32, 64)]
        times.append(predict(spec, 8, int(tokens), slow).total_us)
        assert figures == [f"{us:.0f}" for us in times], (model, tokens)


def test_the_documented_savings_are_what_it_computes():
    for model, tokens, *cells in doc_rows("layer | at most, tokens per rank"):
        spec = replace(MODELS[model], num_shared=0)
        once = [
            once_per_rank(spec, r, int(tokens) if tokens.isdigit() else 8)
            for r in (2, 4, 8, 16, 32, 64)
        ]
        expected = {
            "ranks per token": [f"{o.distinct:.2f}" for o in once],
            "link bytes": [o.bytes_saved() for o in once],
        }.get(tokens, [o.time_saved() for o in once])
        assert cells == expected, (model, tokens)


def test_the_documented_memory_is_what_plan_prints():
    for model, *cells in doc_rows("layer | EP2: ours / scaled"):
        found = CliRunner().invoke(
            app, ["plan", "moe", "--model", model, "--ranks", "2,4,8", "--json"]
        )
        plans = json.loads(found.stdout)["plans"]
        shown = [
            f"{p['window_bytes'] / 2**20:.0f} / {p['peer_ring_bytes'] / 2**20:.0f}" for p in plans
        ]
        assert cells == shown, model
