"""Reads MoE layers out of Hugging Face checkpoints: ``config.json`` and safetensors.

What tensors are called is in ``megamoe/families.py``. Only the tensors that are asked for are read,
one at a time (safetensors maps files; pages that nobody reads stay on disk), so a rank touches its
own experts and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megamoe.errors import CheckpointError
from megamoe.families import Config, Names, family_of
from megamoe.router import Router
from megamoe.spec import GROUP, MoESpec, WeightDtype

__all__ = ["PROJECTIONS", "Checkpoint", "Projection", "StoredWeight", "number_ranges"]

Projection = Literal["gate", "up", "down"]
PROJECTIONS: Final[tuple[Projection, ...]] = ("gate", "up", "down")


@dataclass(frozen=True)
class StoredWeight:
    """A weight as a checkpoint holds it: [rows, columns], and FP32 block scales for e4m3."""

    weight: Tensor
    scale: Tensor | None


class Checkpoint:
    """A checkpoint folder, opened for reading. Holds names and configuration, no tensors.

    Attributes:
        path: the folder.
        config: ``config.json``.
        moe_layers: layers that are MoE, ascending.
        quantized: expert weights are e4m3 with 128x128 block scales.
    """

    def __init__(self, path: Path, config: Config, files: dict[str, str]) -> None:
        self.path = path
        self.config = config
        self._files = files
        self._family = family_of(config, path)
        try:
            self.moe_layers: tuple[int, ...] = tuple(self._family.layers(config))
        except KeyError as error:
            raise CheckpointError(f"{path}/config.json has no {error.args[0]}") from None
        self.quantized = _quantized(config, path)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens a folder with ``config.json`` and one or more safetensors files.

        Raises:
            CheckpointError: no such folder or file, an unreadable one, an unknown ``model_type``,
                or a quantisation that the layer cannot read.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder: give the folder of config.json")
        config = _read_json(folder / "config.json")
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.is_file():
            files = _read_json(index).get("weight_map")
            if not isinstance(files, dict):
                raise CheckpointError(f"{index} has no weight_map")
        elif single.is_file():
            with _safe_open(single) as opened:
                files = dict.fromkeys(opened.keys(), single.name)
        else:
            raise CheckpointError(
                f"{folder} holds neither {index.name} nor {single.name}: "
                "only safetensors checkpoints are read"
            )
        return cls(folder, config, files)

    # ------------------------------------------------------------------ what a layer is

    def moe_spec(self, layer: int, weight_dtype: WeightDtype | None = None) -> MoESpec:
        """The mathematics of a layer.

        Args:
            layer: a member of ``moe_layers``.
            weight_dtype: how the layer is to run; None keeps what the checkpoint stores.

        Raises:
            CheckpointError: not an MoE layer, or a configuration field is missing.
            SpecError: sizes that the layer does not support.
        """
        self._need_moe(layer)
        return MoESpec(
            hidden=self._field("hidden_size"),
            inter=self._field(self._family.inter),
            num_experts=self.num_experts,
            topk=self._field("num_experts_per_tok"),
            num_shared=self._field("n_shared_experts", None) or 0,
            weight_dtype=weight_dtype or ("fp8" if self.quantized else "bf16"),
            swiglu_clamp=self._field("swiglu_limit", None),
        )

    def router(self, layer: int) -> Router:
        """The router of a layer.

        Raises:
            CheckpointError: not an MoE layer, a tensor is missing, or the layer routes by token
                ids (DeepSeek-V4's hash layers), which hidden states do not determine.
        """
        names, prefix = self._names(layer)
        if f"{prefix}.gate.tid2eid" in self._files:
            raise CheckpointError(
                f"layer {layer} of {self.path} routes by token id (gate.tid2eid): bring your own "
                "topk_idx and topk_weight"
            )
        weight = self._read(f"{prefix}.gate.weight").clone()
        bias = None
        if self._family.bias:
            bias = self._read(f"{prefix}.{names.bias}").float().clone()
        self._field("num_experts_per_tok")
        return self._family.router(self.config, weight, bias)

    @property
    def num_experts(self) -> int:
        """E, under any of the names in use."""
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        for name in names:
            if self.config.get(name):
                return int(self.config[name])
        raise CheckpointError(f"{self.path}/config.json has none of {', '.join(names)}")

    # ------------------------------------------------------------------ tensors

    def expert(self, layer: int, expert: int, projection: Projection) -> StoredWeight:
        """One projection of a routed expert: gate or up [I, H], down [H, I].

        The tensors may be views of the mapped file: copy what is to be kept.

        Raises:
            CheckpointError: a tensor is missing or has another shape; tensor and file are named.
        """
        spec = self.moe_spec(layer)
        shape = _shape(spec, projection, 1)
        names, prefix = self._names(layer)
        fused = f"{prefix}.experts.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
        if fused not in self._files:
            return self._one(f"{prefix}.experts.{expert}.{getattr(names, projection)}", shape)

        def part(view: Any) -> Any:
            matrix = view[expert]
            return matrix if projection == "down" else matrix.chunk(2)[projection == "up"]

        whole = (spec.num_experts, shape[0] * (1 if projection == "down" else 2), shape[1])
        return self._stored(fused, (f"{fused}_scale_inv",), whole, part)

    def shared_experts(self, layer: int, projection: Projection) -> StoredWeight:
        """All S shared experts side by side: gate or up [S * I, H], down [H, S * I].

        Raises:
            CheckpointError: as ``expert``.
        """
        spec = self.moe_spec(layer)
        names, prefix = self._names(layer)
        shape = _shape(spec, projection, spec.num_shared)
        return self._one(f"{prefix}.shared_experts.{getattr(names, projection)}", shape)

    def _one(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        scales = (f"{name}.weight_scale_inv", f"{name}.scale")
        return self._stored(f"{name}.weight", scales, shape, lambda t: t)

    def _stored(
        self,
        name: str,
        scale_names: tuple[str, ...],
        shape: tuple[int, ...],
        part: Callable[[Any], Any],
    ) -> StoredWeight:
        weight = part(self._read(name, shape))
        if weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return StoredWeight(weight, None)
        if weight.dtype != torch.float8_e4m3fn:
            raise CheckpointError(
                f"{name} in {self._where(name)} is {weight.dtype}: BF16, FP16, FP32 and e4m3 are "
                "read (DeepSeek-V4's FP4 experts are not)"
            )
        found = [s for s in scale_names if s in self._files]
        if not found:
            raise CheckpointError(
                f"{name} in {self._where(name)} is e4m3, and its scale {scale_names[0]} is missing "
                f"from {self.path}"
            )
        blocks = (*shape[:-2], shape[-2] // GROUP, shape[-1] // GROUP)
        scale = part(self._read(found[0], blocks))
        # E8M0 scales are powers of two, which FP32 holds exactly.
        return StoredWeight(weight, scale.float())

    def _read(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        if name not in self._files:
            file = self._where_expected(name)
            raise CheckpointError(f"tensor {name} is missing from {file}")
        file = self._where(name)
        with _safe_open(file) as opened:
            if name not in opened.keys():  # noqa: SIM118 - not a dict
                raise CheckpointError(f"tensor {name} is missing from {file}, against its index")
            tensor: Tensor = opened.get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} in {file} has shape {tuple(tensor.shape)}; config.json says {shape}"
            )
        return tensor

    # ------------------------------------------------------------------ names

    def _names(self, layer: int) -> tuple[Names, str]:
        """The spelling that this layer uses, and its prefix."""
        self._need_moe(layer)
        for names in self._family.names:
            prefix = names.prefix.format(layer)
            if f"{prefix}.gate.weight" in self._files:
                return names, prefix
        names = self._family.names[0]
        return names, names.prefix.format(layer)

    def _need_moe(self, layer: int) -> None:
        if layer in self.moe_layers:
            return
        count = self._field("num_hidden_layers")
        kind = "a dense layer" if 0 <= layer < count else f"not among the {count} layers"
        layers = number_ranges(self.moe_layers)
        raise CheckpointError(f"layer {layer} of {self.path} is {kind}; MoE layers are {layers}")

    def _field(self, name: str, *default: Any) -> Any:
        if name not in self.config and not default:
            raise CheckpointError(f"{self.path}/config.json has no {name}")
        return self.config.get(name, *default)

    def _where(self, name: str) -> Path:
        return self.path / self._files[name]

    def _where_expected(self, name: str) -> Path:
        """The file that holds the nearest relative of a missing tensor, to look at first."""
        stem = name.rpartition(".")[0]
        while stem:
            for other, file in self._files.items():
                if other.startswith(stem + "."):
                    return self.path / file
            stem = stem.rpartition(".")[0]
        return self.path


def _shape(spec: MoESpec, projection: Projection, experts: int) -> tuple[int, int]:
    inter = spec.inter * experts
    return (spec.hidden, inter) if projection == "down" else (inter, spec.hidden)


def _quantized(config: Config, path: Path) -> bool:
    quantization = config.get("quantization_config")
    if not quantization:
        return False
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or list(block or ()) != [GROUP, GROUP]:
        raise CheckpointError(
            f"{path} is quantised with {method!r}, weight_block_size {block}: only fp8 with blocks "
            f"of {GROUP}x{GROUP} is read"
        )
    return True


def number_ranges(numbers: tuple[int, ...]) -> str:
    """``(3, 4, 5, 8)`` as ``3-5, 8``."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _read_json(path: Path) -> Config:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.resolve()} is missing: give the folder of a Hugging Face checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return found


def _safe_open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing, though the index names it") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
