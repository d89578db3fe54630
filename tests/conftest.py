"""Settings of every test process."""

from __future__ import annotations

import os

# Two busy cores: torch's pools of several test processes cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What somebody tuned on this machine is no part of a test.
os.environ.setdefault("MEGAMOE_TUNED", "0")
