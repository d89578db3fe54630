"""What ranks would refuse is said once, by the first process, before it starts them."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from launcher import bench_moe, ranks
from launcher.beforehand import need_layer, need_own_gpus
from launcher.cli import app
from megamoe.errors import SpecError
from megamoe.spec import MODELS, EpConfig
from tests.commands import refused

BEFORE = [
    ("bench moe --model none", "--model none: must be one of"),
    ("bench moe --tokens 3,4,5", "'3,4,5': 3 counts for 2 ranks"),
    ("bench moe --tokens half:4", "the pattern must be one of"),
    ("bench moe --tokens 99999999", "max_tokens = 99999999"),
    ("bench moe --routing zipf:11", "the parameter of 'zipf:11' must be in 0..10"),
    ("bench moe --routing replay:none.pt", "replay: no file none.pt"),
    ("bench moe --against peer", "--against peer: on CPU ranks it must be one of"),
    ("bench moe --experts 9", "num_experts = 9 is not divisible by num_ranks = 2"),
    ("bench moe --block-m 7", "block_m = 7"),
    ("bench moe --share-of 1", "--share-of 1: this group has 2 ranks already"),
    ("bench moe --suite all", "--suite all: must be one of required"),
    ("bench moe --suite nope --tokens 2", "--suite nope: must be one of required"),
    ("bench moe --suite required --tokens 2", "--suite required has cases of its own: leave"),
    ("bench moe --experts 4", "--experts 4: qwen3-30b routes a token to 8; give at least as many"),
    ("bench moe --share-of 64", "--share-of 64: leaves 4 experts of qwen3-30b, which routes a"),
    ("bench moe --weight-dtype fp4", "weight_dtype = 'fp4'"),
    ("bench moe --turn-seconds -1", "Invalid value for '--turn-seconds'"),
    ("bench moe --report /dev/null", "--report /dev/null cannot be written (it is a file"),
    ("bench power", "power is measured on GPUs"),
    ("bench power --tokens 4 --variant phased", "--variant phased: must be one of"),
    ("bench power --tokens 4 --experts 9", "num_experts = 9 is not divisible"),
    ("trace moe --routing none", "routing 'none'"),
    ("trace moe --experts 4", "--experts 4: qwen3-30b routes a token to 8; give at least as many"),
    ("trace moe --hidden 100", "hidden = 100"),
    ("trace moe --workers 5000", "num_workers = 5000"),
    ("tune --tokens 65 --max-tokens 64", "--tokens 65 exceeds --max-tokens 64"),
    ("tune --routing hot_rank:2", "the parameter of 'hot_rank:2' must be in 0..1"),
    ("tune --experts 9", "num_experts = 9 is not divisible"),
    ("demo --tokens many", "tokens 'many'"),
    ("demo --ranks 3", "num_experts = 16 is not divisible by num_ranks = 3"),
    ("stress --hidden 100", "hidden = 100"),
    ("stress --sizes 4", "all are above the 2 ranks of this group"),
    ("stress --block-m 7", "block_m = 7"),
    ("stress --block-m 8,x", "--block-m '8,x': write numbers like 1,2,4"),
    ("stress --experts 9 --topk 1", "--experts 9 cannot be shared by 2 ranks"),
    ("stress --replay none.pt", "replay: no file none.pt"),
    ("stress --replay /dev/null", "replay: no file /dev/null"),
    ("stress --timeout 0", "timeout_s = 0"),
    ("stress --calls 2 --soak 1", "--calls 2 and --soak 1 both say how long a soak is"),
    ("stress --calls 9 --sizes 1 --replay x", "--sizes, --replay: used for cases, without --calls"),
    ("stress --soak 1 --layers 100000", "Invalid value for '--layers'"),
    ("stress --soak 1 --rounds 100000", "Invalid value for '--rounds'"),
    ("stress --calls 2 --rounds 3", "--rounds 3: a part has a call at least; give 2 or less"),
    ("stress --misses 1", "--misses: used in soaks, with --calls"),
    ("run --checkpoint none", "config.json"),
]


@pytest.mark.parametrize(("command", "what"), BEFORE, ids=[command for command, _ in BEFORE])
def test_wrong_options_are_refused_before_ranks_are_started(command, what, monkeypatch, tmp_path):
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("launcher.ranks.torchrun", lambda *a, **k: pytest.fail("ranks started"))
    more = ["--ranks", "2", "--backend", "cpu"] if "--ranks" not in command else []
    more += ["--layer", "0", "--input", "x", "--output", "y"] if command[:3] == "run" else []
    text = refused(*command.split(), *more, what=what)
    assert text.count(what) == 1
    assert "rank 0" not in text
    assert not list(tmp_path.iterdir())


def test_right_options_start_ranks(monkeypatch, tmp_path):
    """Or the tests above would pass with a check that refuses everything."""
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    started = []
    monkeypatch.setattr("launcher.ranks.torchrun", lambda module, *a, **k: started.append(module))
    commands = ("tune", "stress", "demo", "bench moe", "bench power --tokens 4", "trace moe")
    for command in commands:
        more = ["--ranks", "2", "--backend", "cpu"]
        found = CliRunner().invoke(app, [*command.split(), *more])
        assert found.exit_code == 0, found.output
    modules = ("tune", "stress", "demo", "bench_moe", "bench_power", "trace_moe")
    assert started == [f"launcher.{module}" for module in modules]


@pytest.mark.parametrize(
    ("backend", "gpus", "device"),
    [("cpu", True, "cpu"), ("auto", False, "cpu"), ("auto", True, None), ("cuda", True, "cuda")],
)
def test_what_the_first_process_knows_of_the_ranks_device(backend, gpus, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert ranks._foreseen_device(backend) == device
    # Where it knows nothing, contenders of either kind may be right.
    if device is None:
        assert bench_moe._against(["peer", "hf_eager"], device) == ["peer", "hf_eager"]
        with pytest.raises(SpecError, match="--against none_such: it must be one of hf_grouped_mm"):
            bench_moe._against(["none_such"], device)


def test_gpus_that_ranks_would_share_and_blocks_that_no_gpu_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SpecError, match=r"2 ranks on 1 GPU\(s\): .* lower --ranks"):
        need_own_gpus(2)
    need_own_gpus(1)
    config = EpConfig(num_ranks=1, max_tokens=8, block_m=256)
    need_layer(MODELS["qwen3-30b"], config, "cpu")
    need_layer(MODELS["qwen3-30b"], config, None)
    with pytest.raises(SpecError, match="block_m = 256: the GPU takes at most 128, or 144"):
        need_layer(MODELS["qwen3-30b"], config, "cuda")
