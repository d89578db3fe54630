"""The process that starts and restarts a service's ranks: torchrun, without its tracebacks.

Arguments: RANKS, MAX_RESTARTS, then the options of ``launcher.serve`` that the ranks get.
"""

from __future__ import annotations

import sys

from launcher.ranks import torchrun

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Returns the exit status: that of the first rank that failed once restarts ran out."""
    num_ranks, max_restarts, *options = argv
    return torchrun(
        "launcher.serve",
        options,
        int(num_ranks),
        debug="--debug" in options,
        max_restarts=int(max_restarts),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
