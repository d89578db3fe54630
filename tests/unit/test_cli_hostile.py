"""Commands given what they cannot use: a reason, exit code 2, no traceback, and nothing lost."""

from __future__ import annotations

import errno
import inspect
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from launcher import bench_moe, console
from launcher.checked import WRITTEN
from launcher.cli import app
from launcher.serving.source import AttentionSource
from megamoe.errors import CapacityError, SpecError
from megamoe.spec import MODELS, MoESpec
from tests.commands import refused

GROUPS = [
    ["tune"],
    ["stress"],
    ["demo"],
    ["run"],
    ["bench", "moe"],
    ["bench", "power"],
    ["trace", "moe"],
    ["serve", "--random", "qwen3-30b"],
]


@pytest.mark.parametrize("command", GROUPS, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_command_takes_cpus_in_the_place_of_gpus(command, ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    more = [
        "--input",
        tmp_path,
        "--output",
        tmp_path / "y",
        "--checkpoint",
        tmp_path,
        "--layer",
        "0",
    ]
    options = [*command, *(more if command == ["run"] else []), "--ranks", ranks, "--backend"]
    text = refused(*options, "cuda", what="--backend cuda needs a Hopper GPU")
    assert text.count("needs a Hopper GPU") == 1
    refused(*options, "tpu", what="--backend tpu: must be auto, cpu or cuda")


# ---------------------------------------------------------------- places that cannot be written

READ = {
    "checkpoint",
    "input_file",
    "results",
    "power",
    "kernels",
    "against",
    "api_key_file",
    "replay",
}
FOLDERS = {"run_dir"}
"""Made at the start, before any work."""


def functions(of=app, words=()):
    """(words, function) of every command."""
    for command in of.registered_commands:
        yield (*words, command.name), command.callback
    for group in of.registered_groups:
        yield from functions(group.typer_instance, (*words, group.name))


def paths():
    """(words, option or argument, parameter's name) of all that are paths."""
    found = []
    for words, function in functions():
        command = typer.main.get_command(app)
        for word in words:
            command = command.commands[word]
        hints = inspect.get_annotations(function)
        for parameter in command.params:
            if "Path" in str(hints.get(parameter.name)):
                found.append((words, parameter.opts[0], parameter.name))
    return found


def test_every_path_is_known_as_read_or_written():
    assert {name for _, _, name in paths()} >= {"output", "report", "kernels"}
    for words, option, name in paths():
        assert name in WRITTEN | READ | FOLDERS, (words, option)


@pytest.mark.parametrize(
    ("words", "option", "name"),
    [found for found in paths() if found[2] in WRITTEN],
    ids=str,
)
def test_a_place_that_cannot_be_written_is_known_before_the_work(words, option, name, tmp_path):
    there = tmp_path / "file"
    there.write_text("{}")
    below = there / "x.json"
    if not option.startswith("--"):
        refused(*words, there, below, what="Not a directory")
        return
    more = {
        "run": ["--checkpoint", tmp_path, "--layer", "0", "--input", there],
        "report": [there],
    }.get(words[0], [])
    text = refused(*words, *more, option, below, what="cannot be written")
    assert f"{option} {below}" in text
    assert "Not a directory" in text
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    other = there if name in ("report", "workdir") else tmp_path
    refused(*words, *more, option, other, what="cannot be written")


def test_folders_that_are_missing_are_made(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", MoESpec(hidden=128, inter=128, num_experts=4, topk=2))
    monkeypatch.setenv("MEGAMOE_TRACE", "1")  # the command sets it: undone after the test
    files = [tmp_path / name / "x" for name in ("output", "svg")]
    options = ["--model", "tiny", "--tokens", "4", "--ranks", "1", "--backend", "cpu"]
    options += ["--output", str(files[0]), "--svg", str(files[1])]
    found = CliRunner().invoke(app, ["trace", "moe", *options])
    assert found.exit_code == 0, found.output
    assert all(path.stat().st_size for path in files)


def test_a_damaged_file_is_not_found_out_after_the_measuring(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"meta": {}, "rows": [')
    refused("bench", "cmp", "--output", path, what="is no JSON file")
    refused("stress", "--ranks", 1, "--output", path, what="is no JSON file")
    assert path.read_text() == '{"meta": {}, "rows": ['


def test_a_search_whose_result_could_not_be_kept_does_not_begin(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("launcher.tuner.tune", lambda *a: pytest.fail("the search began"))
    refused("tune", "--ranks", "1", "--backend", "cpu", what="MEGAMOE_CACHE")


def test_what_a_search_found_is_shown_even_if_it_cannot_be_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    spec = MoESpec(hidden=128, inter=128, num_experts=4, topk=2)
    monkeypatch.setitem(MODELS, "tiny", spec)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megamoe.tuning.save", full)
    options = ["--model", "tiny", "--max-tokens", "16", "--rounds", "1", "--calls", "1", "--json"]
    found = CliRunner().invoke(app, ["tune", *options, "--ranks", "1", "--backend", "cpu"])
    assert found.exit_code == console.EXIT_ERROR, found.output
    assert "No space left on device" in found.stderr
    assert json.loads(found.stdout)["trials"]


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "options",
    [
        ["estimate", "gaps", "--bandwidth", "nan"],
        ["estimate", "gaps", "--gap", "nan"],
        ["estimate", "moe", "--link-gbs", "inf"],
        ["estimate", "roofline", "--read-tbs", "nan"],
        ["bench", "power", "--seconds", "inf"],
        ["tune", "--margin", "inf"],
        ["serve", "--random", "qwen3-30b", "--timeout", "nan"],
        ["stress", "--timeout", "inf"],
    ],
    ids=" ".join,
)
def test_numbers_are_finite(options):
    text = refused(*options, what=f"{options[-2]}")
    assert "must be a finite number" in text or "Invalid value" in text


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["estimate", "gaps", "--batch", "9" * 400], "--batch"),
        (["estimate", "gaps", "--gap", "-1"], "--gap"),
        (["estimate", "moe", "--tokens", "\N{SUPERSCRIPT TWO}"], "--tokens"),
        (["estimate", "moe", "--experts", "9" * 20], "num_experts"),
        (["estimate", "moe", "--tflops", "1e-320"], "at most 1e24"),
        (["plan", "moe", "--model", "qwen3-30b", "--tokens", "9" * 20], "tokens"),
        (["tune", "--ranks", "1", "--workers", "9" * 20, "--backend", "cpu"], "num_workers"),
        (["stress", "--ranks", "1", "--hidden", "12800000000", "--backend", "cpu"], "hidden"),
    ],
    ids=str,
)
def test_numbers_beyond_any_machine(options, what, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    refused(*options, what=what)


@pytest.mark.parametrize("command", ["bench moe", "bench power", "trace moe", "tune"])
def test_no_command_takes_more_experts_than_the_model_has(command, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    more = ["--output", tmp_path / "t.json.gz"] if command == "trace moe" else []
    options = ["--model", "qwen3-30b", "--ranks", "1", "--backend", "cpu", *more]
    refused(*command.split(), *options, "--experts", "129", what="--experts 129: qwen3-30b has 128")
    assert not list(tmp_path.iterdir())


def test_a_share_of_fewer_ranks_than_there_are():
    refused("bench", "moe", "--ranks", "1", "--share-of", "3", what="must divide the 128 experts")
    with pytest.raises(SpecError, match="--share-of 2: this group has 4 ranks"):
        bench_moe._share("qwen3-30b", 2, 4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "void", [["--tokens", "8"], ["--routing", "zipf"], ["--model", "v4-pro"]], ids=str
)
def test_a_suite_has_cases_of_its_own(void, ranks):
    options = ["--ranks", ranks, "--backend", "cpu", "--suite", "required", *void]
    what = f"--suite required has cases of its own: leave {void[0]} out"
    refused("bench", "moe", *options, what=what)


def test_plan_of_more_workers_than_any_gpu_has():
    refused("plan", "attention-pre", "--workers", "100000", what="--workers")


def test_json_has_no_infinities(capsys):
    console.print_json({"a": [1.5, float("nan")], "b": {"c": (float("-inf"), 2)}})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None], "b": {"c": [None, 2]}}


# ---------------------------------------------------------------- files

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROW = {"total_us": 5.0, "routing": "uniform", "tokens": 8, "model": "v4-pro", "ranks": 2}
FILES = {
    "empty": b"",
    "bytes": b"\xff\xfe\0",
    "cut": b'{"meta": {}, "rows": [',
    "deep": b"[" * 100_000,
    "null": b"null",
    "rows": b'{"meta": {}, "rows": 5}',
    "row": b'{"meta": {}, "rows": [5]}',
    "meta": b'{"meta": null, "rows": []}',
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_results(name, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(FILES[name])
    refused("estimate", "moe", "--against", path, what=str(path))
    refused("estimate", "gaps", "--kernels", path, what=str(path))
    refused("report", path, tmp_path / "report", what=str(path))


@pytest.mark.parametrize("name", ["service_cpu", "stress_cpu", "power_h200x1", "pdl_chain_h200"])
def test_results_that_no_report_shows(name, tmp_path):
    path = RESULTS / f"{name}.json"
    refused("report", path, tmp_path / "report", what="holds no rows that a report shows")
    assert not (tmp_path / "report").exists()


def test_a_report_of_cpu_ranks_names_their_contender(tmp_path):
    found = CliRunner().invoke(app, ["report", str(RESULTS / "moe_cpu.json"), str(tmp_path)])
    assert found.exit_code == 0, found.output
    page = (tmp_path / "report.html").read_text()
    assert ">hf_eager_fp32</text>" in page
    assert ">peer</text>" not in page
    assert "TFLOPS, active experts" not in page


def test_power_of_a_report_is_a_power_experiments(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"meta": {}, "rows": [ROW]}))
    refused("report", path, tmp_path / "report", "--power", path, what="megamoe bench power")


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_us": "5"},
        {"total_us": float("nan")},
        {"total_us": -1},
        {"ranks": None},
        {"ranks": "2"},
        {"model": ["v4-pro"]},
        {"model": None},
        {"experts": 0},
        {"experts": 383},
        {"tokens": 0},
    ],
    ids=str,
)
def test_rows_that_no_model_fits_are_named(wrong, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"meta": {}, "rows": [ROW, ROW | wrong]}))
    refused(
        "estimate",
        "moe",
        "--against",
        path,
        what=str(*wrong) if wrong != {"experts": 383} else "383",
    )


@pytest.mark.parametrize(
    "entry",
    [
        '{"us": NaN}',
        '{"us": 1, "count": 1e400}',
        '{"us": 1, "count": 1.7}',
        '{"bytes": 1e999}',
        '{"us": 1, "bytes": 1}',
        "5",
    ],
)
def test_kernels_without_a_time_are_named(entry, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(f"[{entry}]")
    refused("estimate", "gaps", "--kernels", path, what="kernel 0 is")
    (tmp_path / "x.csv").write_bytes(b"name,us\na,5,6")
    refused("estimate", "gaps", "--kernels", tmp_path / "x.csv", what="kernel 0 is")
    (tmp_path / "x.csv").write_bytes(b"\xff,us\na,5")
    refused("estimate", "gaps", "--kernels", tmp_path / "x.csv", what="is no CSV file")


# ---------------------------------------------------------------- serve

TINY = "hidden=128,inter=128,experts=4,topk=2"
ATTENTION = "hidden=256,heads=2,q_lora=128,kv_lora=128,nope=64,rope=64,index_heads=4"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--random", TINY, "--timeout", "0"], "timeout_s = 0.0"),
        (["--random", TINY, "--max-tokens", "99999999"], "max_tokens = 99999999"),
        (["--random", TINY, "--ranks", "3"], "num_experts = 4 is not divisible by num_ranks = 3"),
        (["--random", TINY, "--heartbeat", "-1"], "--heartbeat"),
        (["--random", f"{TINY},experts=5"], "experts is given twice"),
        (["--random", f"{TINY},dtype=fp8,dtype=bf16"], "dtype is given twice"),
        (["--random", TINY, "--weight-dtype", "bf16"], "write dtype=fp8 or dtype=bf16 in --random"),
        (["--random", TINY, "--layer", "3"], "--layer and --weight-dtype go with --checkpoint"),
        (["--checkpoint", ".", "--weight-dtype", "fp4"], "--weight-dtype fp4: must be fp8 or bf16"),
        (["--random", TINY, "--attention-pre", f"{ATTENTION},heads=4"], "heads is given twice"),
        (
            ["--random", TINY, "--attention-pre", ATTENTION.replace("nope=", "nope=1")],
            "nope + rope =",
        ),
        (
            ["--random", TINY, "--attention-pre", ATTENTION, "--cache-pages", "99999999"],
            "--cache-pages",
        ),
    ],
    ids=str,
)
def test_serve_refuses_before_it_starts_processes(options, what, monkeypatch):
    monkeypatch.setattr("launcher.serve.Supervisor", lambda *a: pytest.fail("it began"))
    refused("serve", "--backend", "cpu", *options, what=what)


def test_caches_that_do_not_fit_are_told_by_their_option(monkeypatch):
    source = AttentionSource(ATTENTION, 1000, 0)

    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("megamoe.attention_pre.data.random_weights", full)
    with pytest.raises(
        CapacityError, match=r"--cache-pages 1000: caches of 0\.0 GiB .* do not fit"
    ):
        source.options().open("cpu")
