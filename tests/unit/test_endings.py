"""How a rank process ends: ``launcher.endings``."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit
from launcher.endings import leave
atexit.register(print, "the interpreter's way")
print("what was said", end="")
leave(3)
"""


def test_a_rank_leaves_with_all_it_said_and_its_code():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "what was said", "")
