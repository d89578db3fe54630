"""Servers over the echo engine."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from tests.service.echo import CONFIG, EchoEngine, Server


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
