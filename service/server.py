"""The HTTP process: one event loop with uvicorn, the remote engine, signals and the drain.

Exit status: 0 after a drain, 1 when serving became impossible or was cut short, 2 for a bad
setting or a port in use.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import uvicorn
from fastapi import FastAPI

from service.app import create_app
from service.config import ServiceConfig
from service.ipc import private_directory
from service.limits import make_protocol
from service.remote import RemoteEngine

__all__ = ["EXIT_CUT_SHORT", "EXIT_SETTING", "HttpProcess", "bind_tcp", "make_server", "run"]

_log = logging.getLogger("megamoe.service")
EXIT_CUT_SHORT: Final = 1
EXIT_SETTING: Final = 2
STOP_RANKS_S: Final = 5.0
ADVICE: Final = {
    errno.EADDRINUSE: ": choose another --port, or 0 for any that is free",
    errno.EADDRNOTAVAIL: ": --host must be an address of this machine, or 0.0.0.0 for all of them",
    errno.EACCES: ": ports below 1024 are root's, choose a larger --port",
}


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the drain comes first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to ``HttpProcess``."""
        yield


def bind_tcp(config: ServiceConfig) -> socket.socket:
    """The listening socket.

    Raises:
        OSError: the address is in use or not of this machine; the message names it.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on connections; else a small answer, which
    # goes out in two writes, waits 40 ms for the client's delayed acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host, config.port))
        sock.listen(512)
    except OSError as error:
        sock.close()
        where = f"cannot listen on {config.host}:{config.port}"
        advice = ADVICE.get(error.errno or 0, "")
        raise OSError(error.errno, f"{where}: {error.strerror}{advice}") from None
    return sock


def make_server(app: FastAPI, config: ServiceConfig) -> uvicorn.Server:
    """Uvicorn with this service's limits and without its access log."""
    return _Server(
        uvicorn.Config(
            app,
            http=make_protocol(config),
            ws="none",
            loop="asyncio",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=int(config.keep_alive_s),
            timeout_graceful_shutdown=3,
            h11_max_incomplete_event_size=config.max_header_bytes,
        )
    )


class HttpProcess:
    """Runs the service until it is told to end.

    Args:
        config: settings.
        run_dir: private directory for the engine's socket.
        follow_pid: a process (torchrun's agent) whose end ends this one.
    """

    def __init__(self, config: ServiceConfig, run_dir: Path, follow_pid: int | None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.follow_pid = follow_pid
        self.exit_code = 0
        self.draining: asyncio.Task[None] | None = None

    async def main(self, sock: socket.socket) -> int:
        """Serves on a bound socket; returns the exit status."""
        loop = asyncio.get_running_loop()
        self.engine = engine = RemoteEngine(
            self.config, self.run_dir, on_drain=self.begin_drain, on_fatal=self.give_up
        )
        app = create_app(self.config, engine)
        self.dashboard = app.state.dashboard
        self.server = make_server(app, self.config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)
        if self.follow_pid is not None:
            self.agent = os.pidfd_open(self.follow_pid)
            loop.add_reader(self.agent, self.on_agent_exit)
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        (self.run_dir / "address").write_text(f"{host} {port}\n")
        (self.run_dir / "http.pid").write_text(f"{os.getpid()}\n")
        _log.info("serving on http://%s:%d (dashboard at /)", shown, port)
        await self.server.serve(sockets=[sock])
        await engine.close(0.0 if self.exit_code else STOP_RANKS_S)
        return self.exit_code

    def on_signal(self) -> None:
        """First signal: drain. Second: end now."""
        if self.draining is None:
            self.begin_drain()
        else:
            _log.warning("second signal: ending now")
            self.cut_short()

    def begin_drain(self) -> None:
        """Refuses new requests, finishes those in flight, then ends."""
        if self.draining is None:
            _log.info("draining, at most %g s", self.config.drain_s)
            self.engine.begin_drain()
            self.draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        while self.engine.num_waiting and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self.engine.num_waiting:
            _log.error("%d requests did not finish in time", self.engine.num_waiting)
            self.exit_code = EXIT_CUT_SHORT
        self.dashboard.closing.set()
        self.server.should_exit = True

    def give_up(self, reason: str) -> None:
        """Ends with a failure: no restart of the ranks can help."""
        if self.exit_code:
            return  # every rank says so
        _log.error("giving up: %s", reason)
        self.exit_code = EXIT_CUT_SHORT
        self.dashboard.closing.set()
        self.server.should_exit = True

    def cut_short(self) -> None:
        """Ends now, with a failure."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # tasks are cut off
        self.exit_code = EXIT_CUT_SHORT
        self.dashboard.closing.set()
        self.server.should_exit = self.server.force_exit = True

    def on_agent_exit(self) -> None:
        """Torchrun is gone: no ranks will come any more."""
        asyncio.get_running_loop().remove_reader(self.agent)
        if self.draining is None:
            self.give_up("torchrun ended")
        else:
            self.dashboard.closing.set()
            self.server.should_exit = True


def _take_lock(run_dir: Path) -> IO[str]:
    """Holds the run directory for this process.

    Raises:
        BlockingIOError: another HTTP process holds it.
    """
    lock = (run_dir / "http.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def run(config: ServiceConfig, run_dir: Path, follow_pid: int | None = None) -> int:
    """Runs the HTTP process; returns its exit status."""
    # The process may have been started by one that had blocked them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s http %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        private_directory(run_dir)
        with _take_lock(run_dir):
            sock = bind_tcp(config)
            try:
                return asyncio.run(HttpProcess(config, run_dir, follow_pid).main(sock))
            finally:
                for name in ("engine.sock", "ranks.sock", "address", "http.pid", "http.lock"):
                    (run_dir / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    run_dir.rmdir()
    except BlockingIOError:
        _log.error("another service uses %s: choose another --run-dir", run_dir)
        return EXIT_SETTING
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _log.error("%s%s", place, error.strerror or error)
        return EXIT_SETTING
