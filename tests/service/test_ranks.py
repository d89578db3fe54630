"""How rank processes find each other, attempt after attempt, through a store that outlives them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from torch import distributed as dist

from tests.service.served import ROOT

pytestmark = [pytest.mark.multirank]

RANK = """
import sys, time
from launcher.serving.rendezvous import find_ranks
rank, attempt = map(int, sys.argv[1:])
time.sleep(rank)  # rank 0 would find what the former rank 1 left
found = find_ranks(rank, 2, None)
print([(said["rank"], said["attempt"]) for said in
       found.all_gather({"rank": rank, "attempt": attempt})], flush=True)
sys.stdin.read()  # killed here, as a lost rank is: it leaves its addresses in the store
"""


def test_a_later_attempt_does_not_find_the_words_of_a_former():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        env = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(attempt)],
                cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            want = f"{[(0, attempt), (1, attempt)]}\n"
            assert [rank.stdout.readline() for rank in ranks] == [want] * 2
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
