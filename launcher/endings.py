"""How a rank process ends: at Ctrl-C, and with the torchrun that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final, NoReturn

__all__ = ["end_as_rank", "leave"]

_PR_SET_PDEATHSIG: Final = 1
"""Of ``linux/prctl.h``: the signal that a process gets when its parent ends."""


def leave(code: int) -> NoReturn:
    """Ends a rank whose work is done, but not the interpreter's way.

    There, about once in a thousand ranks, a thread of a library that no Python code runs in aborts
    the process ("terminate called without an active exception"), and work that is done has failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_as_rank() -> None:
    """For the main thread of a rank whose imports are done and whose work begins.

    Ctrl-C is an exception again (``launcher/__init__.py``), so that files are tidied up. Where
    torchrun is killed and can end nothing, this process ends, too: a soak would go on for hours.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
