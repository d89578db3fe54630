"""How rank processes find each other, attempt after attempt, through a store that outlives them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from torch import distributed as dist

from tests.service.served import ROOT

pytestmark = [pytest.mark.multirank]

RANKS = """
import os, sys, time
from launcher.serving.rendezvous import find_ranks

def rank(number, attempt):
    time.sleep(number)  # rank 0 would find what the former rank 1 left
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    found = find_ranks(number, 2, None)
    said = found.all_gather({"rank": number, "attempt": attempt})
    pairs = [(each["rank"], each["attempt"]) for each in said]
    os.write(1, f"{number} {pairs}\\n".encode())  # in one piece: the pipe is shared
    time.sleep(60)  # until it is killed, as a lost rank is: it leaves its addresses in the store
    os._exit(1)

for attempt in range(2):
    pids = []
    for number in range(2):
        if not (pid := os.fork()):
            rank(number, attempt)
        pids.append(pid)
    sys.stdin.readline()
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
"""


def test_a_later_attempt_does_not_find_the_words_of_a_former():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = subprocess.Popen(
        [sys.executable, "-c", RANKS],
        cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        for attempt in range(2):
            said = sorted(ranks.stdout.readline() for _ in range(2))
            assert said == [f"{rank} {[(0, attempt), (1, attempt)]}\n" for rank in range(2)]
            ranks.stdin.write("\n")
            ranks.stdin.flush()
        assert ranks.wait(20) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.communicate()
