"""What is refused, before any rank is touched, and with which words."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from megamoe.backends import cuda_weights
from megamoe.backends.cuda_build import compile_moe
from megamoe.backends.cuda_weights import allocate_weights
from megamoe.errors import (
    CapacityError,
    InputError,
    MegaMoeError,
    SpecError,
    SymmetricMemoryError,
)
from megamoe.layer import open_layer
from megamoe.spec import MODELS, EpConfig, MoESpec
from megamoe.weights import random_expert, random_experts
from tests.groups import run_group

SPEC = MoESpec(hidden=128, inter=128, num_experts=4, topk=2)
ONE = EpConfig(num_ranks=1, max_tokens=8, block_m=8, timeout_s=5)


@pytest.fixture(scope="module")
def layer():
    with open_layer(SPEC, ONE, backend="cpu") as layer:
        layer.load_weights(random_experts(SPEC, 0, 1, seed=0))
        yield layer


def inputs(tokens=3, hidden=128, topk=2):
    return (
        torch.ones(tokens, hidden, dtype=torch.bfloat16),
        torch.zeros(tokens, topk, dtype=torch.int64),
        torch.full((tokens, topk), 0.5),
    )


def with_id(value):
    x, ids, weight = inputs()
    ids[1, 1] = value
    return x, ids, weight


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (inputs(tokens=9), CapacityError, ["9 tokens", "at most 8"]),
        (inputs(hidden=256), InputError, ["(3, 256)", "[T, 128]"]),
        (inputs(topk=3), InputError, ["topk_idx", "(3, 3)", "[3, 2]"]),
        (with_id(4), InputError, ["topk_idx[1, 1] = 4", "0..3"]),
        (with_id(-2), InputError, ["topk_idx[1, 1] = -2", "-1 for none"]),
        ((inputs()[0].float(), *inputs()[1:]), InputError, ["float32", "bfloat16"]),
        ((None, *inputs()[1:]), InputError, ["x is a NoneType", "torch.Tensor"]),
        ((inputs()[0].float().numpy(), *inputs()[1:]), InputError, ["x is a numpy.ndarray"]),
        ((inputs()[0].tolist(), *inputs()[1:]), InputError, ["x is a list", "a pair"]),
        ((inputs()[0], inputs()[1].numpy(), inputs()[2]), InputError, ["topk_idx is a numpy"]),
        ((*inputs()[:2], inputs()[2].tolist()), InputError, ["topk_weight is a list"]),
        ((inputs()[0], inputs()[1].short(), inputs()[2]), InputError, ["int16", "int64"]),
        ((inputs()[0], inputs()[1], inputs()[2].half()), InputError, ["float16", "float32"]),
        ((inputs()[0], inputs()[1][:2], inputs()[2]), InputError, ["(2, 2)", "[3, 2]"]),
        (((inputs()[0], torch.ones(3, 1)), *inputs()[1:]), InputError, ["float8_e4m3fn"]),
        (
            ((inputs()[0].to(torch.float8_e4m3fn), torch.ones(3, 2)), *inputs()[1:]),
            InputError,
            ["scales", "(3, 2)", "[3, 1]"],
        ),
        ((inputs()[0].to("meta"), *inputs()[1:]), InputError, ["cpu, meta", "one cpu device"]),
        ([t.to("meta") for t in inputs()], InputError, ["on meta", "one cpu device"]),
        ((inputs()[0].to_sparse(), *inputs()[1:]), InputError, ["x is torch.sparse", "to_dense"]),
        ((*inputs()[:2], torch._neg_view(inputs()[2])), InputError, ["topk_weight", "negated"]),
        (
            (
                (inputs()[0].to(torch.float8_e4m3fn), torch.ones(3, 1, device="meta")),
                *inputs()[1:],
            ),
            InputError,
            ["cpu, meta"],
        ),
    ],
)
def test_bad_call(layer, call, error, words):
    with pytest.raises(error) as caught:
        layer.run(*call)
    for word in words:
        assert word in str(caught.value)
    # Nothing was sent: the next good call works.
    assert layer.run(*inputs()).isfinite().all()


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (None, ["a NoneType", "an iterable of ExpertWeights"]),
        (random_expert(SPEC, 0, 0, seed=0), ["ExpertWeights: must be an iterable"]),
        ([(0, None)], ["a tuple", "ExpertWeights"]),
        (
            [replace(random_expert(SPEC, 0, 0, seed=0), w2_scale=torch.ones(1, 1, device="meta"))],
            ["expert 0: w2_scale is on meta"],
        ),
    ],
)
def test_bad_experts(layer, experts, words):
    with pytest.raises(InputError) as caught:
        layer.load_weights(experts)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1, "30", None])
def test_a_reset_has_a_limit(layer, limit):
    with pytest.raises(InputError, match=r"limit_s = .*: must be a number of seconds"):
        layer.reset(limit)
    layer.reset(5)
    assert layer.run(*inputs()).isfinite().all()


def test_open_layer_takes_a_spec_and_a_config():
    with pytest.raises(SpecError, match=r"EpConfig and a .*MoESpec: must be a MoESpec and an EpC"):
        open_layer(ONE, SPEC, backend="cpu")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden": 200}, SpecError, ["hidden = 200", "multiple of 128"]),
        ({"inter": 0}, SpecError, ["inter = 0"]),
        ({"topk": 33, "num_experts": 64}, SpecError, ["topk = 33", "1..32"]),
        ({"weight_dtype": "int4"}, SpecError, ["weight_dtype = 'int4'"]),
        ({"swiglu_clamp": -1.0}, SpecError, ["swiglu_clamp"]),
        ({"swiglu_clamp": "10"}, SpecError, ["swiglu_clamp = '10'"]),
        ({"hidden": "512"}, SpecError, ["hidden = '512'", "an int"]),
        ({"hidden": 512.0}, SpecError, ["hidden = 512.0", "an int"]),
        ({"num_shared": None}, SpecError, ["num_shared = None"]),
    ],
)
def test_bad_spec(change, error, words):
    fields = {"hidden": 128, "inter": 128, "num_experts": 4, "topk": 2} | change
    with pytest.raises(error) as caught:
        MoESpec(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_ranks": 3}, SpecError, ["not divisible", "num_ranks = 3"]),
        ({"num_ranks": 0}, SpecError, ["num_ranks = 0"]),
        ({"max_tokens": 0}, SpecError, ["max_tokens = 0"]),
        ({"ring_l1_blocks": -1}, CapacityError, ["ring_l1_blocks = -1", "1 block"]),
        ({"ring_l1_blocks": 1, "wave_blocks": 2}, CapacityError, ["wave_blocks = 2", "L1 1"]),
        ({"block_m": 24}, SpecError, ["block_m = 24"]),
        ({"timeout_s": 0}, SpecError, ["timeout_s"]),
    ],
)
def test_bad_config(change, error, words):
    fields = {"num_ranks": 1, "max_tokens": 8} | change
    with pytest.raises(error) as caught:
        open_layer(SPEC, EpConfig(**fields), backend="cpu")
    for word in words:
        assert word in str(caught.value)


def test_unknown_backend():
    with pytest.raises(SpecError, match=r"'tpu'.*'auto', 'cpu' or 'cuda'"):
        open_layer(SPEC, ONE, backend="tpu")


@pytest.mark.parametrize(
    ("spec", "config", "words"),
    [
        ({}, {"max_tokens": 9}, "max_tokens = 8, 9"),
        ({}, {"num_workers": 5}, "num_units = 1, 5"),
        ({"topk": 3}, {}, "topk = 2, 3"),
        ({"swiglu_clamp": 7.0}, {}, "swiglu_clamp = None, 7.0"),
    ],
)
def test_ranks_that_disagree(spec, config, words):
    """Every rank is told, and in what they differ."""
    told = []

    def body(rendezvous):
        mine, how = SPEC, replace(ONE, num_ranks=2, num_workers=1, ring_l1_blocks=1, wave_blocks=1)
        if rendezvous.rank == 1:
            mine, how = replace(mine, **spec), replace(how, **config)
        with pytest.raises(SpecError, match="ranks disagree") as caught:
            open_layer(mine, how, backend="cpu", rendezvous=rendezvous)
        told.append(str(caught.value))

    run_group(2, body)
    assert len(told) == 2
    assert all(words in text for text in told), told


def test_inputs_need_not_be_contiguous(layer):
    x = torch.randn(3, 256).bfloat16()
    ids = torch.tensor([[0, 3, 1], [1, 2, 0]])
    weight = torch.rand(2, 3)
    strided = layer.run(x[:, ::2], ids.T, weight.T)
    dense = layer.run(x[:, ::2].contiguous(), ids.T.contiguous(), weight.T.contiguous())
    assert torch.equal(strided, dense)


def test_missing_weights():
    with open_layer(SPEC, ONE, backend="cpu") as layer:
        with pytest.raises(MegaMoeError, match="load_weights first"):
            layer.run(*inputs())
        layer.load_weights(list(random_experts(SPEC, 0, 1, 0))[::3])
        with pytest.raises(MegaMoeError, match=r"2 of .* not loaded \(index 1, 2\)"):
            layer.run(*inputs())
        wider = MoESpec(hidden=256, inter=128, num_experts=4, topk=2)
        with pytest.raises(InputError, match="w1"):
            layer.load_weights(random_experts(wider, 0, 1, 0))


def test_closed_layer():
    layer = open_layer(SPEC, ONE, backend="cpu")
    layer.close()
    with pytest.raises(MegaMoeError, match="closed"):
        layer.run(*inputs())


def test_shared_memory_too_small():
    """A window larger than /dev/shm names the bytes it needs and the bytes there are."""
    free = shutil.disk_usage("/dev/shm").free
    spec = MODELS["deepseek-v3"]
    tokens = free // (spec.num_slots * spec.hidden * 2) + 1
    with pytest.raises(SymmetricMemoryError) as caught:
        open_layer(spec, EpConfig(num_ranks=1, max_tokens=tokens), backend="cpu")
    wanted = int(str(caught.value).split("a window of ")[1].split()[0])
    assert wanted > free
    assert f"({shutil.disk_usage('/dev/shm').free} bytes free)" in str(caught.value)


def test_wrong_group_size():
    with pytest.raises(SymmetricMemoryError, match=r"num_ranks = 2.*group of 1"):
        open_layer(SPEC, EpConfig(num_ranks=2, max_tokens=8), backend="cpu")


def test_a_gpu_rank_without_memory_for_its_experts_fails_all_ranks_at_once(monkeypatch):
    """Host logic of the CUDA session; memory and its lack are made up."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 140 << 30))

    def room(spec, num_ranks, device):
        """``device`` stands for the rank."""
        if device == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")
        return "room"

    monkeypatch.setattr(cuda_weights, "DeviceWeights", room)

    def body(rendezvous):
        with pytest.raises(SymmetricMemoryError) as caught:
            allocate_weights(MODELS["deepseek-v3"], 2, rendezvous.rank, rendezvous)
        return str(caught.value)

    for said in run_group(2, body):
        assert "rank 1: 129 experts take 5.3 GiB, and 5.0 GiB of the GPU are free" in said
        assert "rank 0" not in said


@pytest.mark.parametrize("given", ["MEGAMOE_PHASED", "MEGAMOE_PHASED=yes", "=1", "A=1,B"])
def test_overrides_of_the_sources_that_cannot_be_read(monkeypatch, given):
    monkeypatch.setenv("MEGAMOE_DEFINES", given)
    with pytest.raises(SpecError, match="NAME=INTEGER"):
        compile_moe(SPEC)
