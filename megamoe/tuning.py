"""Configurations that ``megamoe tune`` found on this machine, kept beside the compiled kernels.

One JSON file per key in ``jit.cache_dir()``. The key is all that a search depended on: version,
device, layer, ranks, tokens and workers. What is found there replaces the recommendation only where
a user left every tunable field open, and never changes results: those are the same to the bit for
any configuration. ``MEGAMOE_TUNED=0`` looks nothing up.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import megamoe
from megamoe.errors import MegaMoeError
from megamoe.jit import cache_dir
from megamoe.spec import EpConfig, MoESpec

__all__ = ["TUNABLE", "key_of", "path_of", "save", "tuned"]

TUNABLE: Final = (
    "block_m",
    "ring_l1_blocks",
    "ring_l2_blocks",
    "wave_blocks",
    "l2_lag_blocks",
)
"""Fields of ``EpConfig`` that a search sets."""


def key_of(spec: MoESpec, config: EpConfig, device: str) -> dict[str, Any]:
    """What a search depends on; JSON types.

    Args:
        spec: the layer.
        config: the group; its tunable fields and its timeout do not matter.
        device: GPU name, or instruction set and cores.
    """
    return {
        "version": megamoe.__version__,
        "device": device,
        "spec": asdict(spec),
        "num_ranks": config.num_ranks,
        "max_tokens": config.max_tokens,
        "num_workers": config.num_workers,
        "reserved_sms": config.reserved_sms,
    }


def path_of(key: dict[str, Any]) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir() / f"tuned-{digest[:24]}.json"


def tuned(spec: MoESpec, config: EpConfig, device: str) -> EpConfig:
    """``config`` with what a search found for it, or as it is.

    It stays as it is where any tunable field is set, where nothing was searched, and where what was
    found cannot work (a file from elsewhere).
    """
    if os.environ.get("MEGAMOE_TUNED") == "0" or any(getattr(config, f) for f in TUNABLE):
        return config
    key = key_of(spec, config, device)
    try:
        found = json.loads(path_of(key).read_text())
        chosen = {field: found["chosen"][field] for field in TUNABLE}
        if found["key"] != key or not all(type(value) is int for value in chosen.values()):
            return config
        candidate = replace(config, **chosen)
        candidate.resolved(spec)
        rings = candidate.ring_l1_blocks, candidate.ring_l2_blocks
        most = replace(config, block_m=8).max_blocks(spec)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MegaMoeError):
        return config
    # No search tries rings longer than any call; such a window may not even fit into memory.
    return candidate if max(rings) <= most else config


def save(
    spec: MoESpec, config: EpConfig, device: str, chosen: EpConfig, evidence: dict[str, Any]
) -> Path:
    """Keeps a search's result; a reader sees all of it or nothing.

    Args:
        spec: the layer.
        config: what was asked for, tunable fields open.
        device: as in ``key_of``.
        chosen: the fastest configuration.
        evidence: JSON types: what was tried.

    Raises:
        OSError: the cache folder cannot be written.
    """
    key = key_of(spec, config, device)
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"key": key, "chosen": {f: getattr(chosen, f) for f in TUNABLE}, **evidence}
    with tempfile.TemporaryDirectory(prefix="tuned-", dir=path.parent) as folder:
        whole = Path(folder) / path.name
        whole.write_text(json.dumps(found, indent=1))
        os.replace(whole, path)
    return path
