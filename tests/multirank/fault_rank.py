"""One rank of a fault test, a process that the test itself starts.

It opens a layer, then obeys a script of steps, one answer (a dict) per step over its pipe: ``run``
a call, ``late`` sleep past the limit first, ``reset``, ``hold`` until the test says go, ``loop``
calls until one fails. A fault is an answer, not a crash.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from megamoe.errors import GroupBroken, PeerTimeout
from megamoe.layer import MoELayer, open_layer
from megamoe.spec import EpConfig, MoESpec
from megamoe.weights import random_experts

SPEC = MoESpec(hidden=256, inter=128, num_experts=6, topk=2)
LIMIT_S = 1.0
RESET_LIMIT_S = 2.0
TOKENS = 16
MAX_TOKENS = 65536
WINDOW_BYTES = MAX_TOKENS * SPEC.topk * SPEC.hidden * 2  # combine slots: most of a window


def send(pipe: Connection, **fields: object) -> None:
    pipe.send(fields)


def call(layer: MoELayer, rank: int, pipe: Connection) -> None:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, SPEC.hidden, generator=generator).bfloat16()
    ids = torch.randint(0, SPEC.num_experts, (TOKENS, SPEC.topk), generator=generator)
    start = time.monotonic()
    try:
        y = layer.run(x, ids, torch.full((TOKENS, SPEC.topk), 0.5))
        send(pipe, step="run", ok=True, digest=int(y.view(torch.int16).long().abs().sum()))
    except PeerTimeout as e:
        waited = time.monotonic() - start
        send(pipe, step="run", ok=False, waited=waited, message=str(e), **e.record.to_dict())


def main(rank: int, num_ranks: int, store: str, script: str, pipe: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    config = EpConfig(
        num_ranks=num_ranks, max_tokens=MAX_TOKENS, block_m=8, num_workers=1, timeout_s=LIMIT_S
    )
    layer = open_layer(SPEC, config, backend="cpu")
    layer.load_weights(random_experts(SPEC, rank, num_ranks, seed=0))
    send(pipe, step="open", window=layer.counters().window_bytes)
    for step in script.split(","):
        if step == "hold":
            pipe.recv()
        elif step == "late":
            time.sleep(2 * LIMIT_S)
        elif step == "run":
            call(layer, rank, pipe)
        elif step == "loop":
            x = torch.ones(TOKENS, SPEC.hidden, dtype=torch.bfloat16)
            ids = torch.arange(TOKENS * SPEC.topk).view(TOKENS, -1) % SPEC.num_experts
            send(pipe, step="loop")
            start = time.monotonic()
            try:
                while True:
                    start = time.monotonic()
                    layer.run(x, ids, torch.full((TOKENS, SPEC.topk), 0.5))
            except PeerTimeout as e:
                waited = time.monotonic() - start
                send(pipe, step="loop", waited=waited, message=str(e), **e.record.to_dict())
        elif step == "reset":
            try:
                layer.reset(RESET_LIMIT_S)
                send(pipe, step="reset", ok=True)
            except GroupBroken as e:
                send(pipe, step="reset", ok=False, missing=list(e.missing), message=str(e))
        else:
            raise SystemExit(f"unknown step {step!r}")
    layer.close()
