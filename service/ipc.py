"""Messages between the HTTP process and the ranks, and the sockets they travel on.

msgspec structs in MessagePack over Unix-socket ZeroMQ; nothing is pickled. Tensors never travel:
they lie in the arena (``arena.py``), messages carry their offsets. Times are ``time.monotonic()``,
one clock for all processes of a machine.

    HTTP process                      rank 0                        rank r
      <- Hello, SignOfLife, Fault -----+-----------------------------+
      -> Welcome ----------------------+-----------------------------+
      -> Submit…, Cancel, Stop --------+
      <- Done, Dropped, Stepped -------+
                                       -> Plan, Stop ----------------+
                                       <- Report --------------------+

A group of ranks has a random id that every message to the HTTP process carries: what a former
group says, or repeats, is refused and counted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec
import zmq

from service.arena import ArenaRef, Layout
from service.engine import LayerInfo
from service.reports import EngineFault, Span, StepRecord, TelemetrySample

__all__ = [
    "Cancel",
    "CannotStart",
    "Done",
    "DrainWanted",
    "Dropped",
    "Fault",
    "FromRank",
    "Hello",
    "Plan",
    "PlanItem",
    "RankReport",
    "SignOfLife",
    "Stepped",
    "Stop",
    "Submit",
    "SubmitAttention",
    "ToRank",
    "Welcome",
    "bind",
    "connect",
    "decode_from_rank",
    "decode_plan",
    "decode_report",
    "decode_to_rank",
    "encode",
    "engine_address",
    "private_directory",
    "ranks_address",
]

MAX_SOCKET_PATH: Final = 100
"""Unix sockets have room for 108 bytes of path."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message; the tag is the class's name."""


# ------------------------------------------------------------------ HTTP process -> ranks


class Welcome(Message, frozen=True):
    """To every rank, once all have said hello: where tensors lie, and who the others are."""

    group: str
    arena: ArenaRef
    pids: list[int]


class Submit(Message, frozen=True):
    """To rank 0: one request."""

    request: int
    num_tokens: int
    fp8: bool
    routed: bool  # whether the client sent routes; else the layer's router chooses
    layout: Layout
    submitted: float
    deadline: float


class SubmitAttention(Message, frozen=True):
    """To rank 0: one request of its attention-pre layer. ``parts``: see ``attention_parts``."""

    request: int
    num_tokens: int
    new_tokens: list[int]
    context_lens: list[int]
    block_table: list[list[int]]
    upload: list[int]
    parts: dict[str, tuple[int, int]]
    submitted: float
    deadline: float


class Cancel(Message, frozen=True):
    """To rank 0: nobody waits for this request any more."""

    request: int


class Stop(Message, frozen=True):
    """To rank 0, and from it to all: finish the queue, then exit with status 0."""


ToRank = Welcome | Submit | SubmitAttention | Cancel | Stop

# ------------------------------------------------------------------ ranks -> HTTP process


class Hello(Message, frozen=True):
    """First message of each rank; rank 0's carries the layer."""

    group: str
    rank: int
    num_ranks: int
    pid: int
    layer: LayerInfo | None


class SignOfLife(Message, frozen=True):
    """Once a second or more from each rank, from a thread that no step can hold up.

    ``sample`` is None where no sensor was read since the last one.
    """

    group: str
    rank: int
    sample: TelemetrySample | None


class Done(Message, frozen=True):
    """A request's answer lies in the arena."""

    group: str
    request: int
    step: int
    step_tokens: int
    started: float
    kernel_s: float
    high_water: list[tuple[int, int]]


class Dropped(Message, frozen=True):
    """A request left the queue without running: cancelled, or past its deadline."""

    group: str
    request: int
    expired: bool


class Stepped(Message, frozen=True):
    """A step ended, heartbeats included: proof of progress."""

    group: str
    record: StepRecord


class Fault(Message, frozen=True):
    """The group cannot go on."""

    group: str
    fault: EngineFault


class CannotStart(Message, frozen=True):
    """A rank cannot open the layer: a setting, the checkpoint or the memory; no restart helps."""

    rank: int
    message: str


class DrainWanted(Message, frozen=True):
    """A rank was told to end (SIGTERM under torchrun): drain first."""

    group: str


FromRank = CannotStart | Hello | SignOfLife | Done | Dropped | Stepped | Fault | DrainWanted

# ------------------------------------------------------------------ rank 0 <-> ranks


class PlanItem(Message, frozen=True):
    """One request of a step; its rows follow those of the items before it."""

    request: int
    num_tokens: int
    routed: bool
    layout: Layout


class Plan(Message, frozen=True):
    """What all ranks do next. ``step`` grows by one; anything else is refused as a replay."""

    step: int
    fp8: bool
    items: list[PlanItem]


class RankReport(Message, frozen=True):
    """How a rank's part of a step went."""

    rank: int
    step: int
    kernel_s: float
    num_tokens: int
    checksum: int
    expert_counts: list[int]
    high_water: tuple[int, int] | None
    backpressure: tuple[int, int] | None
    spans: list[Span]


FromCoordinator = Plan | Stop

_ENCODER: Final = msgspec.msgpack.Encoder()
encode = _ENCODER.encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_plan = msgspec.msgpack.Decoder(FromCoordinator).decode
decode_report = msgspec.msgpack.Decoder(RankReport).decode


def private_directory(path: Path) -> Path:
    """Makes a directory that only this user can enter, or checks that it is one.

    Raises:
        PermissionError: it exists and belongs to somebody else, or others may enter it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a directory that only this user can enter: remove it")
    if len(str(path)) > MAX_SOCKET_PATH - len("/engine.sock"):
        raise PermissionError(f"{path} is too long for Unix sockets: set a shorter --run-dir")
    return path


def engine_address(run_dir: Path) -> str:
    """Where the HTTP process listens for ranks."""
    return f"ipc://{run_dir}/engine.sock"


def ranks_address(run_dir: Path) -> str:
    """Where rank 0 listens for the other ranks."""
    return f"ipc://{run_dir}/ranks.sock"


def bind(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A ROUTER on a Unix socket of mode 0600."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        socket.bind(address)
    finally:
        os.umask(mask)
    path.chmod(0o600)
    return socket


def connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str
) -> zmq.Socket[bytes]:
    """A DEALER connected to a ROUTER."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(address)
    return socket
