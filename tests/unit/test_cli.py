"""The command line: its surface, what it imports, how it reports errors, and plan and doctor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from launcher import console
from launcher.cli import app
from launcher.ranks import arguments
from megamoe.errors import CheckpointError, InputError
from tests.commands import refused

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).with_name("cli_surface.txt")


def commands(command=None, name: str = "") -> dict[str, object]:
    """Every command that does something, by its full name."""
    command = command or typer.main.get_command(app)
    inner = getattr(command, "commands", None)
    if inner is None:
        return {name.strip(): command}
    found: dict[str, object] = {}
    for word, child in inner.items():
        found |= commands(child, f"{name} {word}")
    return found


def surface() -> list[str]:
    lines = []
    for name, command in commands().items():
        for parameter in command.params:
            needed = " (required)" if parameter.required else ""
            lines.append(f"{name} {'/'.join(parameter.opts)}{needed}")
    return sorted(lines)


def test_the_surface_is_frozen():
    """A changed line breaks somebody's script: change the file on purpose, in the same commit."""
    now, frozen = surface(), SURFACE.read_text().splitlines()
    gone, new = sorted(set(frozen) - set(now)), sorted(set(now) - set(frozen))
    assert now == frozen, f"gone: {gone}; new: {new}"


def test_help_and_plain_errors_load_no_torch():
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from launcher.cli import app\n"
        "for args in (['--help'], ['bench', 'moe', '--help'], ['run']):\n"
        "    CliRunner().invoke(app, args)\n"
        "heavy = {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_says_what_it_is(name):
    command = commands()[name]
    assert command.help, name
    silent = [p.opts for p in command.params if not p.help and p.name != "help"]
    assert not silent, f"{name}: no help for {silent}"


# ---------------------------------------------------------------- options to rank processes


@pytest.mark.parametrize(
    "name", [n for n in sorted(commands()) if n.split()[0] not in ("plan", "estimate", "report")]
)
def test_rank_processes_get_the_options_that_were_given(name):
    """Options rendered for torchrun parse back to the same values, ``--ranks`` left out."""
    command = commands()[name]
    given = []
    for i, p in enumerate(q for q in command.params if q.name not in ("help", "ranks")):
        # Digits are a value of every type that options have here, up to 50 in every range.
        for n in range(2 if p.multiple else 1):
            given += [p.opts[0]] if p.is_flag else [p.opts[0], str((10 * i + n) % 50 + 1)]
    ranks = ["--ranks", "3"] if any(p.name == "ranks" for p in command.params) else []
    first = command.make_context(name, [*given, *ranks])
    again = command.make_context(name, arguments(first))
    expected = {k: v for k, v in first.params.items() if k != "ranks"}
    assert {k: v for k, v in again.params.items() if k != "ranks"} == expected
    assert again.params.get("ranks") is None


# ---------------------------------------------------------------- errors


def failing(debug: bool, error: Exception, rank: int | None = None):
    own = typer.Typer()

    @own.command()
    def fail() -> None:
        with console.errors_to_exit(debug=debug, rank=rank):
            raise error

    return CliRunner().invoke(own, [])


def test_an_expected_error_is_one_line_and_a_hint():
    found = failing(False, CheckpointError("no such\n  folder"))
    assert found.exit_code == console.EXIT_ERROR
    lines = found.stderr.splitlines()
    assert lines[0] == "error: no such folder"
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2


def test_a_missing_file_is_named_without_an_errno(tmp_path):
    with pytest.raises(OSError) as missing:
        (tmp_path / "none.json").read_text()
    found = failing(False, missing.value)
    assert found.exit_code == console.EXIT_ERROR
    assert found.stderr.split("error: ")[1].replace("\n", "") == (
        f"{tmp_path / 'none.json'}: No such file or directory"
    )


def test_debug_shows_the_traceback_and_rank_is_named():
    found = failing(True, InputError("x has shape [3]"), rank=2)
    assert "Traceback" in found.stderr
    assert "error: rank 2: x has shape [3]" in found.stderr


def test_a_bug_is_not_dressed_up():
    found = failing(False, ZeroDivisionError("bug"))
    assert isinstance(found.exception, ZeroDivisionError)


class OutOfMemoryError(RuntimeError):
    """Of torch on GPUs, by its name and text."""


ON_GPU = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 3.25 GiB is free. Process 1 has 136.55 GiB memory in use."
)


def test_a_lack_of_memory_says_what_was_asked_for_and_what_is_free():
    found = failing(False, OutOfMemoryError(ON_GPU), rank=1)
    assert found.exit_code == console.EXIT_ERROR
    (line,) = found.stderr.splitlines()
    assert line.startswith("error: rank 1: out of memory: 20.00 GiB wanted at once, 3.25 GiB free")
    assert "megamoe plan moe" in line

    def allocate():
        torch.empty(1 << 50)

    with pytest.raises(RuntimeError) as caught:
        allocate()
    found = failing(False, caught.value)
    assert found.exit_code == console.EXIT_ERROR
    assert "out of memory: 4194304.00 GiB wanted" in found.stderr
    assert re.search(r"at once, [\d.]+ [GM]iB free", found.stderr)
    assert failing(False, MemoryError()).exit_code == console.EXIT_ERROR
    assert isinstance(failing(False, RuntimeError("a bug")).exception, RuntimeError)


# ---------------------------------------------------------------- plan


def plan(*options: str):
    return CliRunner().invoke(app, ["plan", "moe", *options])


@pytest.mark.parametrize(("option", "given"), [("--kv", 10**12), ("--tokens", 10**6)])
def test_a_plan_without_end_is_refused(option, given):
    refused("plan", "attention-pre", option, given, what=f"Invalid value for '{option}'")


def test_plan_adds_up_and_orders_the_rings():
    found = plan("--model", "v4-flash", "--tokens", "512", "--ranks", "1,4", "--json")
    assert found.exit_code == 0, found.output
    plans = json.loads(found.stdout)["plans"]
    assert [p["ranks"] for p in plans] == [1, 4]
    for p in plans:
        assert sum(p["regions"].values()) == p["window_bytes"]
        smallest, full = p["window_bytes_min_rings"], p["window_bytes_full_rings"]
        assert smallest < p["window_bytes"] < full
        # 6 slots of 4096 BF16 columns per token.
        assert p["regions"]["combine"] == 512 * 6 * 4096 * 2
        assert p["regions"]["l1_ring"] == p["ring_l1_blocks"] * 128 * 4096
        # w1 and w2 of a rank's experts in e4m3, with an FP32 scale per 128x128.
        weights = 256 // p["ranks"] * 3 * 4096 * 2048
        assert p["weight_bytes"] == weights + weights // 128**2 * 4


def test_plan_takes_a_model_or_sizes():
    found = plan("--model", "v4-flash", "--hidden", "1024", "--topk", "2")
    assert found.exit_code == 2
    assert "--hidden 1024, --topk 2: --model v4-flash has sizes of its own" in found.stderr


def test_a_larger_ring_is_what_grows():
    small, large = (
        json.loads(plan("--model", "qwen3-30b", "--ranks", "2", "--ring-l1", n, "--json").stdout)
        for n in ("64", "96")
    )
    grown = {
        name: large["plans"][0]["regions"][name] - nbytes
        for name, nbytes in small["plans"][0]["regions"].items()
    }
    assert grown["l1_ring"] == 32 * 128 * 2048
    assert grown["l1_scale"] == 32 * 128 * (2048 // 128) * 4
    assert grown["combine"] == grown["l2_ring"] == grown["input"] == 0


def test_plan_compares_with_a_published_ring_kernel():
    """Flash: 8192 tokens and their 6 slots are 417 MiB at any EP size; the rest goes with R."""
    found = plan("--model", "v4-flash", "--ranks", "2,8", "--json")
    two, eight = json.loads(found.stdout)["plans"]
    fixed = 8192 * (4096 + 128 + 6 * 4096 * 2)
    assert eight["peer_ring_bytes"] == eight["peer_ring_bytes_ep8"] == 700 << 20
    assert two["peer_ring_bytes"] == fixed + ((700 << 20) - fixed) // 4
    assert eight["window_bytes"] <= eight["peer_ring_bytes"]
    assert "pull request 440" in plan("--model", "v4-pro").stdout
    for other in (["--model", "v4-flash", "--tokens", "512"], ["--model", "qwen3-30b"]):
        assert json.loads(plan(*other, "--json").stdout)["plans"][0]["peer_ring_bytes"] is None


@pytest.mark.parametrize("model", ["v4-flash", "v4-pro"])
def test_windows_of_8192_tokens_are_no_larger_than_the_published_ring_kernels(model):
    found = plan("--model", model, "--ranks", "4,8", "--json")
    for p in json.loads(found.stdout)["plans"]:
        assert p["window_bytes"] <= p["peer_ring_bytes"], p


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt-2"], "gpt-2"),
        (["--hidden", "256"], "--experts"),
        (["--model", "qwen3-30b", "--ranks", "3"], "not divisible by num_ranks = 3"),
        (["--model", "qwen3-30b", "--ranks", "two"], "--ranks two"),
        (["--model", "qwen3-30b", "--backend", "tpu"], "--backend tpu"),
        (["--model", "qwen3-30b", "--weight-dtype", "int4"], "int4"),
    ],
)
def test_plan_says_what_is_wrong(options, message):
    found = plan(*options)
    assert found.exit_code == console.EXIT_ERROR
    assert message in found.stderr


def test_plan_attention_pre_reproduces_the_published_plan():
    found = CliRunner().invoke(
        app,
        [
            "plan",
            "attention-pre",
            "--tiles",
            "seed",
            "--workers",
            "148",
            "--queue",
            "round_robin",
            "--json",
        ],
    )
    assert found.exit_code == 0, found.output
    values = json.loads(found.stdout)
    assert values["tasks"] == 732
    assert values["events"] == 70
    assert values["instruction_tensor"] == [148, 5, 32]


def test_plan_attention_pre_takes_tokens_and_requests():
    """The same option as the benchmarks': rows of the batch."""
    runner = CliRunner()
    for options, a0 in ((["--tokens", "4"], 4), (["--tokens", "24", "--requests", "2"], 24)):
        found = runner.invoke(app, ["plan", "attention-pre", "--json", *options])
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["tasks_per_stage"]["A0"] == a0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tokens", "500"],
            "--tokens 500: 63 requests, of at most 8 each, cannot have equally many: give a "
            "--requests that divides 500, like 100, or --tokens that 63 divides, like 504",
        ),
        (["--tokens", "17"], "like 17, or --tokens that 3 divides, like 18"),
        (
            ["--tokens", "10", "--requests", "20"],
            "--tokens 10: --requests 20 cannot have equally many: give a --requests that divides "
            "10, like 10, or --tokens that 20 divides, like 20",
        ),
        (["--kv", "4"], "--kv 4: the 8 new tokens of each request are among its keys: give at"),
    ],
    ids=str,
)
def test_requests_of_a_plan_are_alike_and_hold_their_tokens(options, message):
    found = CliRunner().invoke(app, ["plan", "attention-pre", *options])
    assert found.exit_code == console.EXIT_ERROR
    assert message in found.stderr
    # What it proposes is taken.
    for words in re.findall(r"like (\d+)", found.stderr)[:1]:
        more = [*options[:2], "--requests", words, "--workers", "8", "--json"]
        assert CliRunner().invoke(app, ["plan", "attention-pre", *more]).exit_code == 0


def test_version():
    from megamoe import __version__

    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.stdout) == (0, f"megamoe {__version__}\n")


def test_a_folder_that_is_made_for_an_output_is_told(tmp_path, capsys):
    console.make_folder_for(tmp_path / "a" / "b" / "file")
    assert (tmp_path / "a" / "b").is_dir()
    assert f"made folder {tmp_path / 'a' / 'b'}" in capsys.readouterr().err
    console.make_folder_for(tmp_path / "a" / "b" / "other")
    assert capsys.readouterr().err == ""


def test_a_narrow_table_loses_no_digit(monkeypatch, capsys):
    monkeypatch.setattr(console.stdout, "width", 24)
    shown = console.table("", "contender", "tokens", "median ms", "error")
    shown.add_row("hf_grouped_mm", "16", "501.72", "4.4e-02")
    console.stdout.print(shown)
    found = capsys.readouterr().out
    assert "…" not in found
    # Folded cells go on in the same columns of the lines below.
    assert sorted(filter(str.isdigit, found)) == sorted("165017244" + "02")


def test_plan_says_what_the_stages_are():
    found = CliRunner().invoke(app, ["plan", "attention-pre"])
    stages = {"A0": "RMSNorm", "E1": "index scores"}
    lines = found.stdout.splitlines()
    for stage, what in stages.items():
        assert any(f" {stage}  " in line and what in line for line in lines), found.stdout


# ---------------------------------------------------------------- doctor


def test_doctor_finds_that_cpu_ranks_run_here():
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    by_name = {f["name"]: f for f in report["findings"]}
    assert by_name["CPU ranks"]["status"] == "ok"
    assert "portable" in by_name["processor"]["detail"]
    assert by_name["megamoe serve"]["status"] == "ok"
    assert {"C++ compiler", "CMake", "Ninja", "nvcc"} <= set(by_name)
    assert {f["status"] for f in report["findings"]} <= {"ok", "absent", "problem"}


def test_doctor_fails_where_shared_memory_is_too_small(monkeypatch):
    from launcher import doctor

    usage = type("usage", (), {"free": 64 << 20, "total": 64 << 20})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == console.EXIT_WRONG
    assert "--shm-size" in found.stdout
