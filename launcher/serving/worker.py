"""The thread of a rank that owns the layer and its sockets, and loops over steps.

A step: rank 0 broadcasts a plan (offsets into the shared arena, nothing else), every rank runs its
share of the rows and writes its rows of the output into the arena, rank 0 collects the reports and
says done. When nothing waits, a heartbeat step of one fixed token per rank goes the same way, and
must give the same bits every time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import zmq

from launcher.ranks import device_of
from launcher.serving.attention import AttentionExecutor, AttentionOptions
from launcher.serving.executor import Executor
from launcher.serving.rendezvous import find_ranks
from megamoe.errors import BackendUnavailable, MegaMoeError, PeerTimeout, SpecError
from megamoe.layer import MoELayer, open_layer
from service import ipc
from service.arena import Arena
from service.batching import AttentionQueue, StepQueue
from service.engine import LayerInfo
from service.reports import EngineFault, Span, StepRecord

if TYPE_CHECKING:
    from megamoe.attention_layer import AttentionPre
    from megamoe.layer import Backend
    from megamoe.router import Router
    from megamoe.spec import EpConfig, MoESpec
    from megamoe.weights import ExpertWeights

__all__ = ["RankOptions", "Shared", "Worker"]

_log = logging.getLogger("megamoe.rank")
WELCOME_LIMIT_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What a rank serves.

    Attributes:
        name: of the layer, for people.
        spec: makes the layer's spec; it may read a checkpoint.
        config: how the group runs it.
        backend: see ``open_layer``.
        experts: this rank's experts, given (rank, num_ranks, device).
        router: makes the layer's router, or None.
        run_dir: where the sockets lie.
        heartbeat_s: idle time between heartbeat steps.
        attention: the attention-pre layer that rank 0 holds too, if any.
        telemetry_s: time between two readings of a rank's sensors; 0 reads none.
    """

    name: str
    spec: Callable[[], MoESpec]
    config: EpConfig
    backend: Backend
    experts: Callable[[int, int, str], Iterable[ExpertWeights]]
    router: Callable[[], Router | None]
    run_dir: Path
    heartbeat_s: float
    attention: AttentionOptions | None = None
    telemetry_s: float = 1.0


@dataclass
class Shared:
    """What the main thread may know of the worker."""

    group: str = ""
    pids: list[int] = field(default_factory=list)
    serving: bool = False
    stopping: bool = False
    code: int = 1


class _Silent(MegaMoeError):
    """A rank does not answer."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class _OtherBits(MegaMoeError):
    """A heartbeat step did not compute what the first did."""


class Worker:
    """The thread that owns the layer."""

    def __init__(self, options: RankOptions, rank: int, num_ranks: int, shared: Shared) -> None:
        self.options = options
        self.rank = rank
        self.num_ranks = num_ranks
        self.shared = shared
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.checksum: int | None = None
        self.attention: AttentionExecutor | None = None

    def work(self) -> None:
        """Runs until told to stop; ``shared.code`` is the exit status."""
        try:
            self._serve()
            self.shared.code = 0
        except PeerTimeout as error:
            self._fault("timeout", error.record.peer, str(error), error.record.to_dict())
        except _Silent as error:
            self._fault("stuck", error.rank, str(error), None)
        except _OtherBits as error:
            self._fault("mismatch", self.rank, f"rank {self.rank}: {error}", None)
        except (SpecError, BackendUnavailable) as error:  # what every rank says, of no rank
            self._fault("error", self.rank, str(error), None)
        except MegaMoeError as error:
            self._fault("error", self.rank, f"rank {self.rank}: {error}", None)
        except Exception as error:  # noqa: BLE001 - the HTTP process must hear of it
            _log.exception("rank %d failed", self.rank)
            kind = type(error).__name__
            self._fault("error", self.rank, f"rank {self.rank}: {kind}: {error}", None)
        finally:
            self.context.destroy(linger=500)

    def _fault(self, kind: Any, rank: int, message: str, record: dict[str, Any] | None) -> None:
        """Tells the HTTP process, which logs it."""
        name = f"{self.shared.group}:{self.rank}:fault"
        link = ipc.connect(self.context, ipc.engine_address(self.options.run_dir), name)
        if self.shared.group:
            fault = EngineFault(kind=kind, rank=rank, message=message, record=record)
            link.send(ipc.encode(ipc.Fault(self.shared.group, fault)))
        else:
            link.send(ipc.encode(ipc.CannotStart(self.rank, message)))
        link.close(linger=500)

    def _serve(self) -> None:
        options = self.options
        device = device_of(int(os.environ.get("LOCAL_RANK", "0")), options.backend)
        groups = None if device == "cpu" else "cpu:gloo,cuda:nccl"
        rendezvous = find_ranks(self.rank, self.num_ranks, groups)
        group = rendezvous.all_gather({"group": os.urandom(8).hex()})[0]["group"]
        spec = options.spec()
        with open_layer(
            spec, options.config, backend=options.backend, rendezvous=rendezvous
        ) as layer:
            layer.load_weights(options.experts(self.rank, self.num_ranks, device))
            attention = None
            if self.rank == 0 and options.attention is not None:
                attention = options.attention.open(device)
            router = options.router()
            # Rank 0 binds before the others connect, and all meet before anybody says hello.
            peers: zmq.Socket[bytes] | None = None
            address = ipc.ranks_address(options.run_dir)
            if self.rank == 0:
                peers = ipc.bind(self.context, address)
            rendezvous.all_gather({"loaded": True})
            self.shared.group = group
            engine = ipc.connect(
                self.context, ipc.engine_address(options.run_dir), f"{group}:{self.rank}"
            )
            info = self._info(layer, router, attention) if self.rank == 0 else None
            hello = ipc.Hello(group, self.rank, self.num_ranks, os.getpid(), info)
            engine.send(ipc.encode(hello))
            if not engine.poll(int(WELCOME_LIMIT_S * 1000)):
                raise MegaMoeError(f"no welcome from the HTTP process in {WELCOME_LIMIT_S:g} s")
            welcome = ipc.decode_to_rank(engine.recv())
            assert isinstance(welcome, ipc.Welcome)
            self.shared.pids = welcome.pids
            arena = Arena.attach(welcome.arena)
            executor = Executor(layer, arena, router, device)
            if peers is not None:
                if attention is not None:
                    self.attention = AttentionExecutor(attention, arena)
                self._coordinate(group, engine, peers, executor)
            else:
                self._follow(ipc.connect(self.context, address, str(self.rank)), executor)

    def _info(
        self, layer: MoELayer, router: Router | None, attention: AttentionPre | None
    ) -> LayerInfo:
        spec, config = layer.spec, layer.config
        options = self.options.attention
        return LayerInfo(
            name=self.options.name,
            hidden=spec.hidden,
            inter=spec.inter,
            num_experts=spec.num_experts,
            topk=spec.topk,
            num_shared=spec.num_shared,
            num_ranks=self.num_ranks,
            max_tokens=config.max_tokens,
            weight_dtype=spec.weight_dtype,
            has_router=router is not None,
            backend=layer.backend,
            ring_blocks=(config.ring_l1_blocks, config.ring_l2_blocks),
            attention=options.info(attention) if options and attention is not None else None,
        )

    # -------------------------------------------------------------- ranks 1..R-1

    def _follow(self, link: zmq.Socket[bytes], executor: Executor) -> None:
        ready = ipc.RankReport(self.rank, 0, 0.0, 0, 0, [], (0, 0), (0, 0), [])
        link.send(ipc.encode(ready))
        self.shared.serving = True
        step = 0
        while True:
            message = ipc.decode_plan(link.recv())
            if isinstance(message, ipc.Stop):
                self.shared.stopping = True
                return
            if message.step != step + 1:
                raise MegaMoeError(
                    f"plan of step {message.step} after step {step}: stale or replayed"
                )
            step = message.step
            link.send(ipc.encode(self._checked(executor.run(message))))

    # -------------------------------------------------------------- rank 0

    def _coordinate(
        self,
        group: str,
        engine: zmq.Socket[bytes],
        peers: zmq.Socket[bytes],
        executor: Executor,
    ) -> None:
        queue = StepQueue(self.num_ranks * executor.layer.config.max_tokens)
        singles = AttentionQueue()
        self._collect(peers, 0, WELCOME_LIMIT_S)
        self.shared.serving = True
        # Peers count the plans that they get; attention steps are rank 0's own.
        step, plan, next_beat, stopping = 0, 0, 0.0, False
        while True:
            busy = len(queue) or len(singles) or stopping
            wait_s = 0.0 if busy else max(0.0, next_beat - time.monotonic())
            stopping |= self._receive(group, engine, queue, singles, wait_s)
            single, late = singles.take(time.monotonic())
            batch, expired = queue.take(time.monotonic())
            for request in [s.request for s in expired] + [s.request for s in late]:
                engine.send(ipc.encode(ipc.Dropped(group, request, True)))
            if single is not None:
                step += 1
                self._attend(group, engine, step, single)
            if stopping and not batch and not len(singles):
                self.shared.stopping = True
                self._broadcast(peers, ipc.Stop())
                return
            if not batch and time.monotonic() < next_beat:
                continue
            step += 1
            plan += 1
            self._step(group, engine, peers, executor, (step, plan), batch)
            next_beat = time.monotonic() + self.options.heartbeat_s

    @staticmethod
    def _receive(
        group: str,
        engine: zmq.Socket[bytes],
        queue: StepQueue,
        singles: AttentionQueue,
        wait_s: float,
    ) -> bool:
        """Takes in what has come, after waiting for something to come; whether to stop."""
        stopping = False
        if wait_s and not engine.poll(int(wait_s * 1000) + 1):
            return False
        while engine.poll(0):
            message = ipc.decode_to_rank(engine.recv())
            if isinstance(message, ipc.Submit):
                queue.put(message)
            elif isinstance(message, ipc.SubmitAttention):
                singles.put(message)
            elif isinstance(message, ipc.Cancel):
                if queue.cancel(message.request) or singles.cancel(message.request):
                    engine.send(ipc.encode(ipc.Dropped(group, message.request, False)))
            elif isinstance(message, ipc.Stop):
                stopping = True
        return stopping

    def _attend(
        self, group: str, engine: zmq.Socket[bytes], step: int, submit: ipc.SubmitAttention
    ) -> None:
        """A step of the attention-pre layer: one request, on this rank."""
        assert self.attention is not None
        started = time.monotonic()
        kernel_s = self.attention.run(submit)
        done = ipc.Done(group, submit.request, step, submit.num_tokens, started, kernel_s, [])
        engine.send(ipc.encode(done))
        ran = time.monotonic() - started
        record = StepRecord(
            step=step,
            num_requests=1,
            num_tokens=submit.num_tokens,
            queue_s=started - submit.submitted,
            host_s=max(0.0, ran - kernel_s),
            kernel_s=kernel_s,
            rank_tokens=(submit.num_tokens,),
            spans=(Span(self.rank, -1, "attention_pre", 0.0, ran * 1e6),),
            started=started,
            model="attention_pre",
        )
        engine.send(ipc.encode(ipc.Stepped(group, record)))

    def _step(
        self,
        group: str,
        engine: zmq.Socket[bytes],
        peers: zmq.Socket[bytes],
        executor: Executor,
        numbers: tuple[int, int],
        batch: list[ipc.Submit],
    ) -> None:
        """A step of the MoE layer; ``numbers``: of the step, and of its plan."""
        step, number = numbers
        started = time.monotonic()
        items = [ipc.PlanItem(s.request, s.num_tokens, s.routed, s.layout) for s in batch]
        plan = ipc.Plan(number, bool(batch) and batch[0].fp8, items)
        self._broadcast(peers, plan)
        own = self._checked(executor.run(plan))
        limit_s = 2 * self.options.config.timeout_s
        reports = [own, *self._collect(peers, number, limit_s)]
        reports.sort(key=lambda report: report.rank)
        kernel_s = max(report.kernel_s for report in reports)
        total = sum(report.num_tokens for report in reports)
        # Empty where the backend does not count: absent is not 0.
        water = [r.high_water for r in reports if r.high_water is not None]
        pressure = [r.backpressure for r in reports if r.backpressure is not None]
        for submit in batch:
            done = ipc.Done(group, submit.request, step, total, started, kernel_s, water)
            engine.send(ipc.encode(done))
        counts = [sum(column) for column in zip(*(r.expert_counts for r in reports), strict=True)]
        record = StepRecord(
            step=step,
            num_requests=len(batch),
            num_tokens=total,
            queue_s=max((started - submit.submitted for submit in batch), default=0.0),
            host_s=max(0.0, time.monotonic() - started - kernel_s),
            kernel_s=kernel_s,
            rank_tokens=tuple(report.num_tokens for report in reports),
            expert_counts=tuple(counts),
            high_water=tuple(water),
            backpressure=tuple(pressure),
            spans=tuple(span for report in reports for span in report.spans),
            started=started,
        )
        engine.send(ipc.encode(ipc.Stepped(group, record)))

    def _broadcast(self, peers: zmq.Socket[bytes], message: ipc.Plan | ipc.Stop) -> None:
        payload = ipc.encode(message)
        for rank in range(1, self.num_ranks):
            try:
                peers.send_multipart([str(rank).encode(), payload])
            except zmq.ZMQError:
                raise _Silent(f"rank {rank} is gone", rank) from None

    def _collect(self, peers: zmq.Socket[bytes], step: int, limit_s: float) -> list[ipc.RankReport]:
        reports: dict[int, ipc.RankReport] = {}
        deadline = time.monotonic() + limit_s
        while len(reports) < self.num_ranks - 1:
            left = deadline - time.monotonic()
            if left <= 0 or not peers.poll(int(left * 1000) + 1):
                missing = min(set(range(1, self.num_ranks)) - set(reports))
                message = f"rank {missing} did not report step {step} within {limit_s:g} s"
                raise _Silent(message, missing)
            report = ipc.decode_report(peers.recv_multipart()[1])
            if report.step == step:
                reports[report.rank] = report
        return list(reports.values())

    def _checked(self, report: ipc.RankReport) -> ipc.RankReport:
        """A heartbeat must give the same bits every time."""
        if report.checksum:
            if self.checksum is None:
                self.checksum = report.checksum
            elif report.checksum != self.checksum:
                raise _OtherBits(
                    f"heartbeat of step {report.step} gave other bits than the first "
                    f"({report.checksum:08x}, not {self.checksum:08x})"
                )
        return report
