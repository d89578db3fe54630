"""Command line, rank entry points and benchmarks; the composition root of the project."""

import os
import signal
import threading

if (
    "RANK" in os.environ
    and threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    # A rank that Ctrl-C finds among its imports would print which, and has nothing to tidy up yet:
    # it ends as other programs do. ``launcher.endings`` takes this back.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
