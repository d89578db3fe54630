"""Checkpoints written by hand: every name and file is under the test's control."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megamoe.checkpoint import Checkpoint
from megamoe.errors import CheckpointError, SpecError
from megamoe.families import FAMILIES
from megamoe.reference.quant import quantize_128x128
from megamoe.weights import iter_local_experts

H, INTER, E = 256, 128, 4
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "moe_intermediate_size": INTER,
    "n_routed_experts": E,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
PREFIX = "model.layers.2.mlp"


def _tensors(prefix=PREFIX, names=("gate_proj", "up_proj", "down_proj"), experts=E, shared=2):
    generator = torch.Generator().manual_seed(0)

    def w(rows, cols):
        return (torch.randn(rows, cols, generator=generator) / cols**0.5).bfloat16()

    gate, up, down = names
    out = {f"{prefix}.gate.weight": w(experts, H)}
    out[f"{prefix}.gate.e_score_correction_bias"] = torch.linspace(-0.1, 0.1, experts)
    for e in range(experts):
        out[f"{prefix}.experts.{e}.{gate}.weight"] = w(INTER, H)
        out[f"{prefix}.experts.{e}.{up}.weight"] = w(INTER, H)
        out[f"{prefix}.experts.{e}.{down}.weight"] = w(H, INTER)
    out[f"{prefix}.shared_experts.{gate}.weight"] = w(shared * INTER, H)
    out[f"{prefix}.shared_experts.{up}.weight"] = w(shared * INTER, H)
    out[f"{prefix}.shared_experts.{down}.weight"] = w(H, shared * INTER)
    return out


def _fp8(tensors):
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor
        if "experts." in name:
            out[name], out[f"{name}_scale_inv"] = quantize_128x128(tensor)
    return out


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _write(folder, tensors, config=CONFIG, file_of=None):
    """One file, or several with an index where ``file_of`` maps a name to its file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file_of is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: file_of(name) for name in tensors}
    for file in set(weight_map.values()):
        part = {n: t for n, t in tensors.items() if weight_map[n] == file}
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _by_expert(name):
    parts = name.split(".experts.")
    return f"expert-{parts[1].split('.')[0]}.safetensors" if len(parts) == 2 else "rest.safetensors"


def _check_experts(folder, tensors, names=("gate_proj", "up_proj", "down_proj"), prefix=PREFIX):
    """Every rank's experts equal the tensors that were written, bit for bit."""
    checkpoint = Checkpoint.open(folder)
    for num_ranks in (1, 2):
        for rank in range(num_ranks):
            experts = list(iter_local_experts(checkpoint, 2, rank, num_ranks))
            local = E // num_ranks
            assert [e.index for e in experts] == list(range(local + 2))
            for e in experts[:local]:
                stem = f"{prefix}.experts.{rank * local + e.index}"
                gate, up, down = (tensors[f"{stem}.{n}.weight"] for n in names)
                assert torch.equal(_bytes(e.w1), _bytes(torch.cat([gate, up])))
                assert torch.equal(_bytes(e.w2), _bytes(down))
                if e.w1_scale is not None:
                    scales = [tensors[f"{stem}.{n}.weight_scale_inv"] for n in names]
                    assert torch.equal(e.w1_scale, torch.cat(scales[:2]))
                    assert torch.equal(e.w2_scale, scales[2])
            for s, e in enumerate(experts[local:]):
                stem = f"{prefix}.shared_experts"
                gate, up, down = (tensors[f"{stem}.{n}.weight"] for n in names)
                rows = slice(s * INTER, s * INTER + INTER)
                assert torch.equal(_bytes(e.w1), _bytes(torch.cat([gate[rows], up[rows]])))
                assert torch.equal(_bytes(e.w2), _bytes(down[:, rows]))


def _bytes(t):
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("file_of", [None, _by_expert], ids=["single", "sharded"])
def test_bf16_and_fp8(tmp_path, file_of):
    for tensors, config in [
        (_tensors(), CONFIG),
        (_fp8(_tensors()), CONFIG | {"quantization_config": FP8}),
    ]:
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        _check_experts(_write(tmp_path / "c", tensors, config, file_of), tensors)


def test_what_a_layer_is(tmp_path):
    checkpoint = Checkpoint.open(_write(tmp_path / "c", _tensors()))
    assert checkpoint.moe_layers == (1, 2, 3)
    spec = checkpoint.moe_spec(2)
    assert (spec.hidden, spec.inter, spec.num_experts, spec.topk, spec.num_shared) == (
        H,
        INTER,
        E,
        2,
        2,
    )
    assert spec.weight_dtype == "bf16"
    assert checkpoint.moe_spec(2, "fp8").weight_dtype == "fp8"
    router = checkpoint.router(2)
    assert (router.num_groups, router.groups_kept, router.scaling) == (2, 1, 2.5)
    assert torch.equal(router.bias, torch.linspace(-0.1, 0.1, E))


def test_a_rank_needs_only_the_files_of_its_experts(tmp_path):
    folder = _write(tmp_path / "c", _tensors(), file_of=_by_expert)
    for e in (0, 1):
        (folder / f"expert-{e}.safetensors").unlink()
    checkpoint = Checkpoint.open(folder)
    assert len(list(iter_local_experts(checkpoint, 2, 1, 2))) == 4
    with pytest.raises(CheckpointError, match=r"expert-0\.safetensors is missing"):
        list(iter_local_experts(checkpoint, 2, 0, 2))


def test_fused_experts(tmp_path):
    plain = _tensors()
    for tensors, config in [
        (plain, CONFIG),
        (_fp8(plain), CONFIG | {"quantization_config": FP8}),
    ]:
        fused = {n: t for n, t in tensors.items() if ".mlp.experts." not in n}
        for suffix, end in ((".weight", ""), (".weight_scale_inv", "_scale_inv")):
            stems = [f"{PREFIX}.experts.{e}" for e in range(E)]
            if f"{stems[0]}.gate_proj{suffix}" not in tensors:
                continue
            fused[f"{PREFIX}.experts.gate_up_proj{end}"] = torch.stack(
                [
                    torch.cat([tensors[f"{s}.gate_proj{suffix}"], tensors[f"{s}.up_proj{suffix}"]])
                    for s in stems
                ]
            )
            fused[f"{PREFIX}.experts.down_proj{end}"] = torch.stack(
                [tensors[f"{s}.down_proj{suffix}"] for s in stems]
            )
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        _check_experts(_write(tmp_path / "c", fused, config), tensors)


def test_names_of_mixtral_and_deepseek_v4(tmp_path):
    names = ("w1", "w3", "w2")
    mixtral = "model.layers.2.block_sparse_moe"
    tensors = _tensors(mixtral, names)
    config = {
        "model_type": "mixtral",
        "hidden_size": H,
        "intermediate_size": INTER,
        "num_local_experts": E,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
    }
    checkpoint = Checkpoint.open(_write(tmp_path / "m", tensors, config))
    assert checkpoint.moe_layers == (0, 1, 2, 3)
    assert checkpoint.moe_spec(2).num_shared == 0
    expert = list(iter_local_experts(checkpoint, 2, 0, 1))[3]
    stem = f"{mixtral}.experts.3"
    want = torch.cat([tensors[f"{stem}.w1.weight"], tensors[f"{stem}.w3.weight"]])
    assert torch.equal(expert.w1, want)
    assert torch.equal(expert.w2, tensors[f"{stem}.w2.weight"])

    v4 = "layers.2.ffn"
    tensors = {
        n.replace("_scale_inv", "").replace(".weight", ".weight"): t
        for n, t in _tensors(v4, names, shared=1).items()
    }
    tensors[f"{v4}.gate.bias"] = tensors.pop(f"{v4}.gate.e_score_correction_bias")
    quantised = {}
    for name, tensor in tensors.items():
        quantised[name] = tensor
        if "experts." in name:
            q, scale = quantize_128x128(tensor)
            exponent = torch.exp2(scale.log2().ceil())
            quantised[name] = q
            quantised[name.replace(".weight", ".scale")] = exponent.to(torch.float8_e8m0fnu)
    config = CONFIG | {
        "model_type": "deepseek_v4",
        "n_shared_experts": 1,
        "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus",
        "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
    }
    checkpoint = Checkpoint.open(_write(tmp_path / "v4", quantised, config))
    spec = checkpoint.moe_spec(2)
    assert spec.swiglu_clamp == 10.0
    experts = list(iter_local_experts(checkpoint, 2, 0, 1))
    assert experts[1].w2_scale.dtype == torch.float32
    assert torch.equal(experts[1].w2_scale, quantised[f"{v4}.experts.1.w2.scale"].float())
    assert checkpoint.router(2).scoring == "sqrtsoftplus"


def test_layers_that_route_by_token_id(tmp_path):
    tensors = _tensors("layers.2.ffn", ("w1", "w3", "w2"), shared=1)
    tensors["layers.2.ffn.gate.tid2eid"] = torch.zeros(10, 2, dtype=torch.int64)
    config = CONFIG | {"model_type": "deepseek_v4", "n_shared_experts": 1}
    checkpoint = Checkpoint.open(_write(tmp_path / "c", tensors, config))
    assert checkpoint.moe_spec(2).topk == 2
    with pytest.raises(CheckpointError, match="routes by token id"):
        checkpoint.router(2)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "dense"]}, (1, 3, 4)),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [1], "decoder_sparse_step": 1},
            (0, 2, 3, 4, 5),
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [], "decoder_sparse_step": 2}, (1, 3, 5)),
    ],
)
def test_which_layers_are_moe(tmp_path, config, layers):
    base = {k: v for k, v in CONFIG.items() if k != "first_k_dense_replace"}
    folder = _write(tmp_path / "c", _tensors(), base | {"num_hidden_layers": 6} | config)
    assert Checkpoint.open(folder).moe_layers == layers


def test_layers_that_are_not_moe_are_named(tmp_path):
    checkpoint = Checkpoint.open(_write(tmp_path / "c", _tensors()))
    with pytest.raises(CheckpointError, match=r"layer 0 .* is a dense layer; MoE layers are 1-3"):
        checkpoint.moe_spec(0)
    with pytest.raises(CheckpointError, match=r"layer 9 .* not among the 4 layers"):
        checkpoint.router(9)


# ---------------------------------------------------------------- what can be wrong


def _open(tmp_path, tensors=None, config=CONFIG, file_of=None):
    folder = _write(tmp_path / "c", tensors or _tensors(), config, file_of)
    return Checkpoint.open(folder)


def test_missing_tensors_are_named_with_their_file(tmp_path):
    tensors = _tensors()
    name = f"{PREFIX}.experts.3.up_proj.weight"
    del tensors[name]
    checkpoint = _open(tmp_path, tensors, file_of=_by_expert)
    with pytest.raises(CheckpointError, match=rf"{name} is missing from .*expert-3.safetensors"):
        list(iter_local_experts(checkpoint, 2, 1, 2))


def test_an_index_that_lies(tmp_path):
    folder = _write(tmp_path / "c", _tensors(), file_of=_by_expert)
    path = folder / "expert-2.safetensors"
    held = load_file(path)
    name = f"{PREFIX}.experts.2.gate_proj.weight"
    held.pop(name)
    save_file(held, path)
    with pytest.raises(CheckpointError, match=rf"{name} is missing from .*expert-2.safetensors"):
        list(iter_local_experts(Checkpoint.open(folder), 2, 1, 2))


def test_wrong_shapes_are_named(tmp_path):
    tensors = _tensors()
    name = f"{PREFIX}.experts.1.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    with pytest.raises(
        CheckpointError, match=rf"{name} .*\(128, 256\); config.json says \(256, 128\)"
    ):
        list(iter_local_experts(_open(tmp_path, tensors), 2, 0, 1))


def test_e4m3_without_its_scale(tmp_path):
    tensors = _fp8(_tensors())
    name = f"{PREFIX}.experts.1.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    checkpoint = _open(tmp_path, tensors, CONFIG | {"quantization_config": FP8})
    with pytest.raises(CheckpointError, match=rf"{name} .* its scale {name}_scale_inv is missing"):
        list(iter_local_experts(checkpoint, 2, 0, 1))


def test_packed_fp4_is_refused(tmp_path):
    tensors = _tensors()
    name = f"{PREFIX}.experts.0.gate_proj.weight"
    tensors[name] = torch.zeros(INTER, H, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=rf"{name} .* is torch.int8"):
        list(iter_local_experts(_open(tmp_path, tensors), 2, 0, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'; known are deepseek_v3, deepseek_v32"),
        ({"model_type": "qwen2_moe"}, "qwen2_moe checkpoint: its shared expert is scaled by"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
        (
            {"quantization_config": FP8 | {"weight_block_size": [1, 128]}},
            r"weight_block_size \[1, 128\]",
        ),
    ],
)
def test_unsupported_configurations(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        _open(tmp_path, config=CONFIG | change)


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
    ],
)
def test_missing_fields_are_named(tmp_path, field):
    config = {k: v for k, v in CONFIG.items() if k != field}
    with pytest.raises(CheckpointError, match=field):
        _open(tmp_path, config=config).moe_spec(2)


def test_sizes_that_the_layer_does_not_support(tmp_path):
    checkpoint = _open(tmp_path, config=CONFIG | {"moe_intermediate_size": 100})
    with pytest.raises(SpecError, match="inter = 100"):
        checkpoint.moe_spec(2)


def test_broken_folders(tmp_path):
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config.json is missing"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="only safetensors checkpoints"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="does not hold a JSON object"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        Checkpoint.open(tmp_path)


def test_the_table_of_families_names_what_the_issue_asks_for():
    assert {"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "qwen3_moe", "mixtral"} <= set(FAMILIES)
