"""``megamoe run``: a layer of a checkpoint on hidden states from a file, over rank processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from launcher.cli import app
from launcher.synthetic import write_checkpoint
from megamoe.checkpoint import Checkpoint
from megamoe.reference.moe import moe_forward
from megamoe.weights import iter_local_experts
from tests.compare import assert_bitwise, assert_matches_oracle

ROOT = Path(__file__).parents[2]
LAYER = 1
TOKENS = 29
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoint", "deepseek_v3", seed=5)
    x = torch.randn(TOKENS, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"hidden_states": x}, made.parent / "x.safetensors")
    return made.parent


def options(folder: Path, output: str, *more: str, x: str = "x.safetensors") -> list[str]:
    return [
        *("--checkpoint", str(folder / "checkpoint"), "--layer", str(LAYER)),
        *("--input", str(folder / x), "--output", str(folder / output), *more),
    ]


def in_process(folder: Path, output: str, *more: str, x: str = "x.safetensors"):
    return CliRunner().invoke(app, ["run", *options(folder, output, *more, x=x)])


def processes(*arguments: str):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(folder) -> torch.Tensor:
    """What one rank gives, which is compared with the oracle below."""
    found = in_process(folder, "alone.safetensors", "--json")
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert summary["tokens"] == TOKENS
    assert summary["ranks"][0]["routes"] == TOKENS * 2
    return load_file(folder / "alone.safetensors")["hidden_states"]


def test_a_link_is_written_through(folder, alone):
    """As into a device; a renamed temporary file would take its place."""
    (folder / "link.safetensors").symlink_to("behind.safetensors")
    found = in_process(folder, "link.safetensors")
    assert found.exit_code == 0, found.output
    assert (folder / "link.safetensors").is_symlink()
    assert torch.equal(load_file(folder / "behind.safetensors")["hidden_states"], alone)


@pytest.mark.parametrize("weight_dtype", ["bf16", "fp8"])
def test_one_rank_against_the_oracle(folder, weight_dtype):
    found = in_process(folder, f"{weight_dtype}.safetensors", "--weight-dtype", weight_dtype)
    assert found.exit_code == 0, found.output
    checkpoint = Checkpoint.open(folder / "checkpoint")
    spec = checkpoint.moe_spec(LAYER, weight_dtype)
    x = load_file(folder / "x.safetensors")["hidden_states"]
    idx, weight = checkpoint.router(LAYER)(x)
    experts = list(iter_local_experts(checkpoint, LAYER, 0, 1, weight_dtype))
    expected = moe_forward(
        spec, x, idx, weight, experts[: spec.num_experts], experts[spec.num_experts :]
    )
    y = load_file(folder / f"{weight_dtype}.safetensors")["hidden_states"]
    assert_matches_oracle(y, expected, spec, weight_dtype)


@pytest.mark.multirank
def test_two_ranks_unequal_and_in_several_calls(folder, alone):
    """A rank without tokens in later calls; the bits are those of one rank."""
    split = ["--split", "26,3", "--max-tokens", "10", "--ring-blocks", "1"]
    more = options(folder, "two.safetensors", *split, "--ranks", "2", "--json")
    done = processes("launcher.run", *more)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["calls"] == 3
    assert [r["tokens"] for r in summary["ranks"]] == [26, 3]
    assert_bitwise(load_file(folder / "two.safetensors")["hidden_states"], alone, "2 ranks")


@pytest.mark.multirank
def test_under_torchrun_an_error_of_one_rank_ends_all_with_one_line(folder):
    """torchrun starts the ranks; only rank 1's rows name an expert that does not exist."""
    x = load_file(folder / "x.safetensors")["hidden_states"]
    idx = torch.zeros(TOKENS, 2, dtype=torch.int64)
    idx[-1, 1] = 99
    weight = torch.ones(TOKENS, 2)
    tensors = {"hidden_states": x, "topk_idx": idx, "topk_weight": weight}
    save_file(tensors, folder / "bad.safetensors")
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    more = options(folder, "none.safetensors", x="bad.safetensors")
    done = processes(*start, "launcher.run", *more)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    where = f"topk_idx[{TOKENS - 1}, 1] in {folder / 'bad.safetensors'}"
    assert said == [f"error: rank 1: {where} is 99: must be an expert 0..7, or -1 for none"]
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]
    assert not (folder / "none.safetensors").exists()


def test_routes_of_the_file_are_used(folder, alone):
    x = load_file(folder / "x.safetensors")["hidden_states"]
    idx, weight = Checkpoint.open(folder / "checkpoint").router(LAYER)(x)
    tensors = {"hidden_states": x, "topk_idx": idx, "topk_weight": weight}
    save_file(tensors, folder / "routed.safetensors")
    found = in_process(folder, "routed_y.safetensors", x="routed.safetensors")
    assert found.exit_code == 0, found.output
    assert_bitwise(load_file(folder / "routed_y.safetensors")["hidden_states"], alone, "routed")
    tensors["topk_idx"] = torch.full_like(idx, -1)
    save_file(tensors, folder / "masked.safetensors")
    assert in_process(folder, "masked_y.safetensors", x="masked.safetensors").exit_code == 0
    masked = load_file(folder / "masked_y.safetensors")["hidden_states"]
    assert (masked != alone).any(1).all(), "only the shared expert is left, in every row"


def test_no_tokens_at_all(folder):
    save_file({"hidden_states": torch.zeros(0, 256).bfloat16()}, folder / "empty.safetensors")
    found = in_process(folder, "empty_y.safetensors", x="empty.safetensors")
    assert found.exit_code == 0, found.output
    assert load_file(folder / "empty_y.safetensors")["hidden_states"].shape == (0, 256)


X = torch.zeros(4, 256).bfloat16()


@pytest.mark.parametrize(
    ("tensors", "more", "message"),
    [
        ({"x": X}, [], "has no tensor hidden_states; it has x"),
        ({}, [], "has no tensor hidden_states; it has none"),
        ({"hidden_states": X.float()}, [], "is F32: must be BF16"),
        ({"hidden_states": X[:, :128].clone()}, [], "has 128 columns: layer 1 of"),
        ({"hidden_states": X[None]}, [], "must be [T, H]"),
        ({"hidden_states": X, "topk_weight": torch.ones(4, 2)}, [], "without topk_idx"),
        (
            {"hidden_states": X, "topk_weight": torch.ones(4, 2), "topk_idx": torch.ones(4, 3)},
            [],
            "topk_idx in",
        ),
        (
            {"hidden_states": X, "topk_weight": torch.ones(4, 2), "topk_idx": torch.ones(4, 2)},
            [],
            "is F32: must be I32 or I64",
        ),
        (
            {
                "hidden_states": X,
                "topk_weight": torch.ones(4, 2).int(),
                "topk_idx": torch.ones(4, 2).int(),
            },
            [],
            "is I32: must be F32 or F16 or BF16 or F64",
        ),
        (
            {
                "hidden_states": X,
                "topk_weight": torch.ones(4, 2),
                "topk_idx": torch.tensor([[0, 1], [-1, 8], [0, 1], [0, 1]]),
            },
            [],
            "wrong.safetensors is 8: must be an expert 0..7",
        ),
        ({"hidden_states": X}, ["--split", "3"], "is 3 tokens, but"),
        ({"hidden_states": X}, ["--layer", "0"], "is a dense layer; MoE layers are 1"),
        ({"hidden_states": X}, ["--weight-dtype", "int4"], "weight_dtype = 'int4'"),
        ({"hidden_states": X}, ["--backend", "tpu"], "--backend tpu: must be"),
        ({"hidden_states": X}, ["--timeout", "0"], "timeout_s = 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, tensors, more, message):
    save_file(tensors, folder / "wrong.safetensors")
    found = in_process(folder, "wrong_y.safetensors", *more, x="wrong.safetensors")
    assert found.exit_code == 2, found.output
    assert message in found.stderr
    assert found.stderr.startswith("error: ")
    assert "Traceback" not in found.stderr
    assert not (folder / "wrong_y.safetensors").exists()


def test_missing_files(folder, tmp_path):
    found = in_process(folder, "none.safetensors", x="absent.safetensors")
    assert found.exit_code == 2
    assert "no file" in found.stderr
    (tmp_path / "checkpoint").mkdir()
    found = in_process(tmp_path, "none.safetensors", x=str(folder / "x.safetensors"))
    assert found.exit_code == 2
    assert "config.json is missing" in found.stderr


def test_files_of_the_folder_are_not_run_in_place_of_modules(folder):
    """``python -m`` looks into the current folder first, where a user may have anything."""
    place = folder / "shadows"
    (place / "launcher").mkdir(parents=True)
    for name in ("launcher/__init__.py", "random.py"):
        (place / name).write_text("raise SystemExit('not the module')")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-P", "-c", "from launcher.cli import app; app()", "run"]
    told = subprocess.run(
        [*command, *options(folder, "shadowed.safetensors", "--ranks", "2")],
        cwd=place,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert load_file(folder / "shadowed.safetensors")["hidden_states"].shape == (TOKENS, 256)
