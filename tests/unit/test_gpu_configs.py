"""What ``scripts/gpu_configs.py`` makes of its options and of the kernel's time stamps."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("gpu_configs", ROOT / "scripts" / "gpu_configs.py")
assert _spec is not None
assert _spec.loader is not None
gpu_configs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_configs)


def test_every_slot_of_the_kernel_has_a_name():
    source = (ROOT / "csrc" / "device" / "trace.cuh").read_text()
    (slots,) = re.findall(r"enum TraceSlot : uint32_t \{(.*?)\};", source, re.DOTALL)
    names = re.findall(r"^    (kTrace\w+)", slots, re.MULTILINE)
    assert names[-1] == "kTraceTag"  # the first of a slot for each tag
    assert "kNumTraceSlots = kTraceTag + 8" in slots
    assert len(gpu_configs.STAMPS) == names.index("kTraceEnd") + 1
    assert len(gpu_configs.STAMPS) + len(gpu_configs.SUMS) == len(names) - 1 + 8
    at = len(gpu_configs.STAMPS) + gpu_configs.SUMS.index("cycles")
    assert names[at] == "kTraceCycles"


def test_stamps_are_shown_in_microseconds():
    """Two CTAs at 2000 MHz: the second starts 1 µs after the first, and both take 10 µs."""
    slots = torch.zeros(2, len(gpu_configs.STAMPS) + len(gpu_configs.SUMS), dtype=torch.int64)
    slots[:, 0] = torch.tensor([5_000, 6_000])  # ns
    slots[:, len(gpu_configs.STAMPS) - 1] = slots[:, 0] + 10_000
    sums = {name: len(gpu_configs.STAMPS) + i for i, name in enumerate(gpu_configs.SUMS)}
    slots[:, sums["cycles"]] = 20_000
    slots[:, sums["math"]] = torch.tensor([4_000, 8_000])
    slots[:, sums["tiles 1"]] = torch.tensor([3, 5])
    text = gpu_configs.stamps_text(slots)
    for words in ("2000 MHz", "start 0/0/1", "end 10/10/11", "math 2/2/4", "tiles 1 3/3/5"):
        assert words in text.split("; "), text
    with pytest.raises(SystemExit, match="names here"):
        gpu_configs.stamps_text(slots[:, 1:])


def test_a_configuration_from_its_text():
    config = gpu_configs.config_of("128:64:60:8:20", 2, 4096)
    rings = (config.ring_l1_blocks, config.ring_l2_blocks)
    assert (config.block_m, rings, config.wave_blocks) == (128, (64, 60), 8)
    assert (config.l2_lag_blocks, config.num_ranks, config.max_tokens) == (20, 2, 4096)
    assert gpu_configs.config_of("0:0:0:0:0", 1, 8).max_tokens == 128
