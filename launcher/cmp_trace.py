"""A run of the standalone kernels as a Perfetto trace and a picture, drawn as the megakernel is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from launcher.attention_rows import Copies
from launcher.attention_trace import STAMPS, chrome_trace, timeline_svg
from launcher.cmp_rows import bind_all, plan_for
from launcher.console import make_folder_for
from megamoe.attention_pre.data import random_caches, random_inputs
from megamoe.attention_pre.encode import encode
from megamoe.attention_pre.graphs import attention_pre_graph
from megamoe.attention_pre.stages import partition
from megamoe.attention_pre.tiling import Batch
from megamoe.cmp.graphs import CmpGraph
from megamoe.cmp.modes import Mode
from megamoe.cmp.tuning import tuning_of

__all__ = ["records", "save_trace"]


def records(
    stamps: Mapping[str, NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.uint32], dict[int, str]]:
    """CTAs as the megakernel's instructions: entered, producers done, ended.

    Args:
        stamps: ns by kernel, [CTAs, 7] (``BoundCmp.stamps``).

    Returns:
        Stamps [1, CTAs, 7], the kernel of each [1, CTAs], and the kernels' names.
    """
    total = sum(len(s) for s in stamps.values())
    made = np.zeros((1, total, len(STAMPS)), np.int64)
    which = np.zeros((1, total), np.uint32)
    at = 0
    for number, found in enumerate(stamps.values()):
        place = slice(at, at + len(found))
        at += len(found)
        ready = np.where(found[:, 1] > 0, found[:, 1], found[:, 0])
        for name, value in (
            ("visible", found[:, 0]),
            ("inputs ready", ready),
            ("begun", ready),
            ("loaded", found[:, 3]),
            ("summed", found[:, 4]),
            ("stored", found[:, 5]),
            ("published", found[:, 5]),
        ):
            made[0, place, STAMPS.index(name)] = value
        which[0, place] = number
    return made, which, dict(enumerate(stamps))


def save_trace(path: Path, copies: Copies, batch: Batch, mode: Mode) -> float:
    """The last of several cold runs in a row, for ui.perfetto.dev, and a picture beside it.

    Returns:
        The run's span in microseconds.
    """
    plan = plan_for(partition(attention_pre_graph(copies.spec)), batch)
    host = random_inputs(copies.spec, batch, 1) | random_caches(copies.spec, batch, 2)
    tensors = copies.tensors(encode(plan).buffers, host)
    bounds = bind_all(plan, tensors, tuning=tuning_of(mode), trace=True)
    graph = CmpGraph(bounds * 2, mode)
    graph.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph.close()
    made = records(bounds[-1].stamps())
    make_folder_for(path)
    path.write_text(json.dumps(chrome_trace(*made)))
    path.with_suffix(".svg").write_text(timeline_svg(*made))
    return bounds[-1].span_us()
