"""Servers over the echo engine, and one service over two CPU ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from tests.service.echo import CONFIG, EchoEngine, Server
from tests.service.served import TIMEOUT_S, Served


@pytest.fixture(scope="module")
def server():
    """A server for tests that leave no trace in it."""
    with Server(CONFIG, EchoEngine()) as running:
        yield running


@pytest.fixture
def make_running(request):
    """Starts servers with settings of their own."""
    with contextlib.ExitStack() as stack:

        def make(engine: EchoEngine | None = None, **settings) -> Server:
            return stack.enter_context(Server(replace(CONFIG, **settings), engine or EchoEngine()))

        yield make


@pytest.fixture(scope="session")
def services():
    """Those of ``served``; the last one may have ended."""
    with contextlib.ExitStack() as stack:
        started: list[Served] = []

        def present() -> Served:
            if not started or started[-1].process.poll() is not None:
                options = ("--fault-injection", "--timeout", str(TIMEOUT_S), "--max-restarts", "4")
                options += ("--heartbeat", "0.2", "--progress-timeout", "8")
                started.append(stack.enter_context(Served(*options)))
            return started[-1]

        yield present


@pytest.fixture
def served(services):
    """The one service of ``test_serve_answers.py`` and ``test_serve_faults.py``, which ends it."""
    running = services()
    running.wait_ready()
    return running


@pytest.fixture
def client(served):
    """A client of that service, once it serves."""
    served.wait_ready()
    with served.client() as client:
        yield client
