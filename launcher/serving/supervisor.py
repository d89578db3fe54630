"""The parent of a service that was started without torchrun: HTTP process and ranks, and their end.

A terminal's Ctrl-C and every other signal come to it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from launcher.children import keep_folder_out
from launcher.console import EXIT_ERROR
from launcher.ranks import cores_per_rank

__all__ = ["HTTP_START_S", "RUN_DIR", "Supervisor", "http_command", "runtime_dir"]

RUN_DIR: Final = "MEGAMOE_RUN_DIR"
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
HTTP_START_S: Final = 60.0
RANKS_END_S: Final = 4.0
KILL_AFTER_S: Final = 20.0


def http_command(fields: dict[str, Any], run_dir: Path, follow_pid: int) -> list[str]:
    """How the HTTP process is started: with these settings, ending when a process ends."""
    return [
        sys.executable,
        "-m",
        "service",
        "--config",
        json.dumps(fields),
        "--run-dir",
        str(run_dir),
        "--follow-pid",
        str(follow_pid),
    ]


def runtime_dir() -> Path:
    """Where run directories are made."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


class Supervisor:
    """Starts the HTTP process, then torchrun; ends both when either ends, or when told to."""

    def __init__(
        self,
        run_dir: Path | None,
        fields: dict[str, Any],
        num_ranks: int,
        max_restarts: int,
        argv: list[str],
    ) -> None:
        self.keep = run_dir is not None
        self.run_dir = run_dir or Path(tempfile.mkdtemp(prefix="megamoe-", dir=runtime_dir()))
        self.fields = fields
        self.num_ranks = num_ranks
        self.came: deque[int] = deque()
        numbers = [str(num_ranks), str(max_restarts)]
        self.agent_argv = [sys.executable, "-m", "launcher.serving.agent", *numbers, *argv]

    def run(self) -> int:
        """Returns the exit status."""
        keep_folder_out()
        # Not ``sigtimedwait``: interrupted by SIGCONT at its end, CPython's returns stale bytes.
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self.came.append(number))
        try:
            return self._run()
        finally:
            if not self.keep:
                shutil.rmtree(self.run_dir, ignore_errors=True)

    def _spawn(self, argv: list[str], **env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C comes to the supervisor alone
        )

    def _run(self) -> int:
        http = self._spawn(http_command(self.fields, self.run_dir, os.getpid()))
        threads = os.environ.get("OMP_NUM_THREADS") or str(cores_per_rank(self.num_ranks))
        # At the same time: it takes longer to begin than the HTTP process, for which ranks wait.
        agent = self._spawn(
            self.agent_argv, OMP_NUM_THREADS=threads, **{RUN_DIR: str(self.run_dir)}
        )
        try:
            deadline = time.monotonic() + HTTP_START_S
            while not (self.run_dir / "http.pid").exists():
                if http.poll() is not None:
                    return http.returncode or EXIT_ERROR
                time.sleep(0.02)
                if self.came or time.monotonic() > deadline:
                    return EXIT_ERROR
            return self._watch(http, agent)
        finally:
            for process in (http, agent):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _watch(self, http: subprocess.Popen[bytes], agent: subprocess.Popen[bytes]) -> int:
        told = 0
        ending: float | None = None
        agent_told = False

        def end_agent() -> None:
            nonlocal agent_told
            if not agent_told:  # a second signal would keep it from ending its ranks
                agent_told = True
                agent.terminate()

        while http.poll() is None or agent.poll() is None:
            time.sleep(0.1)
            while self.came:
                self.came.popleft()
                told += 1
                if http.poll() is None:
                    http.send_signal(signal.SIGTERM)
                if told > 1:
                    end_agent()
            if ending is None and (http.poll() is not None or agent.poll() is not None):
                ending = time.monotonic()
                if agent.poll() is not None:
                    http.terminate()
            waited = 0.0 if ending is None else time.monotonic() - ending
            # After a drain the ranks end by themselves; those that were still loading do not.
            if http.returncode or (http.returncode == 0 and waited > RANKS_END_S):
                end_agent()
            if waited > KILL_AFTER_S:
                return 1
        if told == 1 and http.returncode == 0:
            return 0
        return http.returncode or agent.returncode or 1
