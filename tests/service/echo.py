"""An engine without ranks whose answers are a function of the request, and a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import ml_dtypes
import msgspec
import numpy as np

from service.app import create_app
from service.config import ServiceConfig
from service.engine import (
    AttentionInfo,
    AttentionRequest,
    AttentionResult,
    EngineBusy,
    EngineUnavailable,
    LayerInfo,
    MoERequest,
    MoEResult,
    RequestExpired,
)
from service.reports import EngineFault, EngineStatus, Observers, Span, StepRecord, TelemetrySample
from service.server import bind_tcp, make_server

LAYER = LayerInfo(
    name="test layer",
    hidden=256,
    inter=128,
    num_experts=8,
    topk=2,
    num_shared=0,
    num_ranks=2,
    max_tokens=64,
    weight_dtype="fp8",
    has_router=True,
    backend="cpu",
    ring_blocks=(16, 8),
)

ATTENTION = AttentionInfo(
    name="test attention",
    hidden=256,
    num_heads=2,
    head_dim=128,
    kv_lora=128,
    index_heads=8,
    latent_row_bytes=260,
    num_pages=8,
    max_tokens=16,
    backend="cpu",
)
BOTH = msgspec.structs.replace(LAYER, attention=ATTENTION)


def echo(hidden: np.ndarray, scales, ids, weights) -> np.ndarray:
    """BF16 bits [n,H] that depend on every bit of the request: XOR with its route's fingerprint."""
    if scales is not None:
        wide = hidden.astype(np.uint16) * 257
        wide ^= np.repeat((scales.view(np.uint32) >> 7).astype(np.uint16), 128, axis=1)
    else:
        wide = hidden.copy()
    salt = (ids.astype(np.int64) * 40503 + weights.view(np.uint32) * 2654435761).sum(axis=1)
    return wide ^ (salt & 0xFFFF).astype(np.uint16)[:, None]


class EchoEngine:
    """``service.engine.Engine`` in this process."""

    def __init__(self, layer: LayerInfo = LAYER, limit: int = 16) -> None:
        self.observers = Observers()
        self.layer_info = layer
        self.state = "ready"
        self.limit = limit
        self.running = 0
        self.withdrawn = 0
        self.steps = 0
        self.hold = threading.Event()  # while set, requests wait
        self.crash: Exception | None = None
        self.attended: list[AttentionRequest] = []
        self.generation = 1

    @property
    def layer(self):
        return self.layer_info

    def status(self) -> EngineStatus:
        reason = "" if self.state == "ready" else f"told to be {self.state}"
        return EngineStatus(
            state=self.state,
            reason=reason,
            num_requests=self.running,
            generation=self.generation,
        )

    async def run_moe(self, request: MoERequest) -> MoEResult:
        if self.state != "ready":
            raise EngineUnavailable(f"not ready ({self.state})")
        if self.running >= self.limit:
            raise EngineBusy(f"{self.running} requests wait already: retry later")
        self.running += 1
        begun = time.monotonic()
        try:
            while self.hold.is_set():
                await asyncio.sleep(0.005)
                if time.monotonic() > request.deadline:
                    raise RequestExpired("the request did not run: its deadline passed")
                if self.state == "failed":
                    raise EngineUnavailable("rank 1 died")
            if self.crash is not None:
                raise self.crash
            return self.answer(request, time.monotonic() - begun)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise
        finally:
            self.running -= 1

    def answer(self, request: MoERequest, queue_s: float) -> MoEResult:
        n, layer = request.num_tokens, self.layer_info
        chosen = request.topk_ids is None
        if chosen:
            ids = (np.arange(n)[:, None] + np.arange(layer.topk)).astype("<i4") % layer.num_experts
            weights = np.full((n, layer.topk), 0.5, "<f4")
        else:
            ids = np.frombuffer(request.topk_ids, "<i4").reshape(n, -1)
            weights = np.frombuffer(request.topk_weights, "<f4").reshape(n, -1)
        scales = None
        if request.scales is not None:
            scales = np.frombuffer(request.scales, "<f4").reshape(n, -1)
        hidden = np.frombuffer(request.hidden.join(), "<u2" if scales is None else "u1").reshape(
            n, -1
        )
        self.steps += 1
        counts = np.bincount(ids[ids >= 0].ravel(), minlength=layer.num_experts)
        water = ((7, 3), (5, 2))
        record = StepRecord(
            step=self.steps,
            num_requests=1,
            num_tokens=n,
            queue_s=queue_s,
            host_s=0.0002,
            kernel_s=0.001,
            rank_tokens=(n - n // 2, n // 2),
            expert_counts=tuple(int(c) for c in counts),
            high_water=water,
            backpressure=((1, 0), (0, 2)),
            started=time.monotonic(),
            spans=(
                Span(0, -1, "gather", 0.0, 80.0),
                Span(0, 0, "tiles", 300.0, 200.0),  # beside the longer one, as roles are
                Span(0, 0, "layer", 80.0, 900.0),
                Span(1, 0, "layer", 90.0, 950.0),
            ),
        )
        for observe in self.observers.step:
            observe(record)
        return MoEResult(
            output=memoryview(echo(hidden, scales, ids, weights).astype("<u2").tobytes()),
            topk_ids=ids.tobytes() if chosen and request.routes else None,
            topk_weights=weights.tobytes() if chosen and request.routes else None,
            queue_s=queue_s,
            host_s=0.0002,
            kernel_s=0.001,
            step=self.steps,
            step_tokens=n,
            high_water=water,
        )

    async def run_attention(self, request: AttentionRequest) -> AttentionResult:
        """Each output's words say where the request's keys lie."""
        self.attended.append(request)
        self.running += 1
        try:
            while self.hold.is_set():
                await asyncio.sleep(0.005)
            if self.crash is not None:
                raise self.crash
        finally:
            self.running -= 1
        info, n = self.layer_info.attention, request.num_tokens
        x = np.frombuffer(request.hidden.join(), "<u2").reshape(n, -1)
        residual = np.frombuffer(request.residual.join(), "<u2").reshape(n, -1)
        table = np.zeros((n, request.num_keys), "<f4")
        row = 0
        for new, keys, pages in zip(
            request.new_tokens, request.context_lens, request.block_table, strict=True
        ):
            slots = [pages[key // 64] * 64 + key % 64 for key in range(keys)]
            table[row : row + new, :keys] = slots
            table[row : row + new, keys:] = -np.inf
            row += new
        made = {
            "residual": x ^ residual,
            "queries": np.full((n, info.num_heads, info.head_dim), 0x3F80, "<u2"),
            "absorbed": np.full((n, info.num_heads, info.kv_lora), 0x4000, "<u2"),
            "index_weights": np.full((n, info.index_heads), 0.5, "<f4"),
            "logits": table,
        }
        if request.rows:
            made["latent_rows"] = np.full((n, info.latent_row_bytes), 7, "u1")
            made["index_rows"] = np.full((n, info.index_row_bytes), 9, "u1")
        self.steps += 1
        record = StepRecord(
            step=self.steps, num_requests=1, num_tokens=n, queue_s=0.0, host_s=0.0001,
            kernel_s=0.002, rank_tokens=(n,), started=time.monotonic(), model="attention_pre",
        )  # fmt: skip
        for observe in self.observers.step:
            observe(record)
        return AttentionResult(
            tensors={name: memoryview(value.tobytes()) for name, value in made.items()},
            kernel_s=0.002,
            step=self.steps,
            step_tokens=n,
        )

    def begin_drain(self) -> None:
        self.state = "draining"

    def inject_fault(self, rank: int, action: str) -> None:
        if not 0 <= rank < self.layer_info.num_ranks:
            raise ValueError(f"rank = {rank}")
        fault = EngineFault(kind="died", rank=rank, message=f"rank {rank} died")
        self.state = "failed"
        for observe in self.observers.fault:
            observe(fault)

    def telemetry(self, sample: TelemetrySample) -> None:
        for observe in self.observers.telemetry:
            observe(sample)


class Server:
    """uvicorn with the service's app in a thread of this process."""

    def __init__(self, config: ServiceConfig, engine: EchoEngine) -> None:
        self.engine = engine
        self.app = create_app(config, engine)
        self.sock = bind_tcp(config)
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.uvicorn = make_server(self.app, config)
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self.sock],))

    def __enter__(self):
        self.thread.start()
        until = time.monotonic() + 20
        while not self.uvicorn.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.engine.hold.clear()
        self.app.state.dashboard.closing.set()
        self.uvicorn.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def raw(self, data: bytes, timeout: float = 10.0) -> bytes:
        """Sends bytes as they are; all that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as conn:
            conn.sendall(data)
            answer = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := conn.recv(65536):
                    answer += chunk
            return answer


CONFIG = ServiceConfig(
    port=0,
    max_body_bytes=1 << 20,
    max_json_bytes=1 << 18,
    body_budget_bytes=4 << 20,
    header_timeout_s=0.6,
    body_timeout_s=0.8,
    stall_timeout_s=0.6,
    max_connections=24,
    request_timeout_s=5.0,
)


def tokens(n: int, seed: int = 0, layer: LayerInfo = LAYER):
    """(hidden BF16, ids, weights) with NaN, infinities, subnormals and -0 among the values."""
    rng = np.random.default_rng(seed)
    hidden = rng.integers(0, 1 << 16, (n, layer.hidden), np.uint16)
    hidden.flat[:6] = (0x7FC1, 0xFF80, 0x7F80, 0x0001, 0x8000, 0x7FFF)
    ids = rng.integers(-1, layer.num_experts, (n, layer.topk), np.int32)
    weights = rng.random((n, layer.topk), np.float32)
    return hidden.view(ml_dtypes.bfloat16), ids, weights
