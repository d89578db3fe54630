"""How a rank process ends: at Ctrl-C, and with the torchrun that started it."""

from __future__ import annotations

import ctypes
import signal
from typing import Final

__all__ = ["end_as_rank"]

_PR_SET_PDEATHSIG: Final = 1
"""Of ``linux/prctl.h``: the signal that a process gets when its parent ends."""


def end_as_rank() -> None:
    """For the main thread of a rank whose imports are done and whose work begins.

    Ctrl-C is an exception again (``launcher/__init__.py``), so that files are tidied up. Where
    torchrun is killed and can end nothing, this process ends, too: a soak would go on for hours.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
