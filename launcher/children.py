"""What Python processes that a command starts with ``-m`` import."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["keep_folder_out"]


def keep_folder_out() -> None:
    """Keeps the current folder out of the imports of processes started with ``-m`` from now on.

    ``-m`` looks into it first: a user's ``service/`` or ``random.py`` would run in a module's
    place. In a checkout that nobody has installed the folder is where the modules are.
    """
    if not os.path.samefile(os.curdir, Path(__file__).resolve().parents[1]):
        os.environ.setdefault("PYTHONSAFEPATH", "1")
