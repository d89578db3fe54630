"""Programs that are no commands of ``megamoe``, and run where typer is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from megamoe.errors import BackendUnavailable, MegaMoeError

__all__ = ["need_hopper", "run_script"]

_EXIT_ERROR: Final = 2  # as of commands


def run_script(main: Callable[[], object]) -> None:
    """Runs a program; an expected error is one line on stderr and exit code 2, as of commands."""
    try:
        main()
    except MegaMoeError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(_EXIT_ERROR)


def need_hopper(what: str) -> None:
    """Refuses a machine that cannot run the kernels.

    Args:
        what: is to be run.

    Raises:
        BackendUnavailable: its current CUDA device is no Hopper GPU, or there is none.
    """
    from megamoe.backends.base import hopper_available

    if not hopper_available():
        raise BackendUnavailable(
            f"{what} needs a Hopper GPU (compute capability 9.0), and this machine has none"
        )
