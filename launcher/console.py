"""How commands talk: tables and bars, one JSON object with ``--json``, one red line for an error.

Exit codes: 0 all well, 1 a result is wrong, 2 the command could not be carried out.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from megamoe.errors import (
    BackendUnavailable,
    CapacityError,
    CheckpointError,
    GroupBroken,
    MegaMoeError,
    PeerTimeout,
    SymmetricMemoryError,
)
from megamoe.spec import MODELS

__all__ = [
    "EXIT_ERROR",
    "EXIT_WRONG",
    "BackendOption",
    "BlockRowsOption",
    "DebugFlag",
    "ExpertsOption",
    "JsonFlag",
    "ModelOption",
    "RanksOption",
    "RingBlocksOption",
    "SeedOption",
    "SizeOption",
    "StoredDtypeOption",
    "WeightDtypeOption",
    "WorkersOption",
    "counted",
    "errors_to_exit",
    "explained",
    "human_bytes",
    "make_folder_for",
    "print_json",
    "progress",
    "report",
    "stderr",
    "stdout",
    "table",
]

EXIT_WRONG: Final = 1
EXIT_ERROR: Final = 2

# Width of tables in files and pipes, where the default is 80.
_FILE_WIDTH: Final = 200


def _stdout() -> Console:
    """Standard output: as wide as its terminal; COLUMNS decides wherever it is set."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return console


stdout = _stdout()
stderr = Console(stderr=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
RanksOption = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=1,
        help="Rank processes to start on this machine; under torchrun, leave it out.",
        show_default=False,
    ),
]
BackendOption = Annotated[
    str,
    typer.Option("--backend", help="auto, cpu or cuda; auto takes Hopper GPUs if there are any."),
]

RingBlocksOption = Annotated[
    int, typer.Option(min=0, help="Blocks of each ring; 0 takes the recommendation.")
]
BlockRowsOption = Annotated[
    int, typer.Option(help="Rows of a ring block; 0 takes the backend's choice.")
]
WorkersOption = Annotated[
    int, typer.Option(min=0, help="CPU worker threads per rank; 0 shares out the cores.")
]
SeedOption = Annotated[int, typer.Option(help="Of weights, activations and routes.")]
StoredDtypeOption = Annotated[
    str | None, typer.Option(help="fp8 or bf16; converts at load. Default: what is stored.")
]
# A published layer, or a part of one: what `launcher.models.published_layer` takes.
ModelOption = Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")]
ExpertsOption = Annotated[int | None, typer.Option(min=1, help="Fewer experts than the model has.")]
SizeOption = Annotated[int | None, typer.Option(min=1, help="Instead of the model's.")]
WeightDtypeOption = Annotated[str, typer.Option(help="fp8 or bf16.")]

_HINTS: Final[dict[type[MegaMoeError], str]] = {
    CapacityError: "`megamoe plan moe` shows what rings and token counts need.",
    SymmetricMemoryError: "`megamoe doctor` shows the size of /dev/shm.",
    BackendUnavailable: "`megamoe doctor` shows what this machine can run.",
    CheckpointError: "docs/troubleshooting.md lists the checkpoints that are read.",
    PeerTimeout: "A rank died, hangs or came late; --timeout sets the limit. See "
    "docs/troubleshooting.md.",
    GroupBroken: "See docs/troubleshooting.md.",
}


@contextmanager
def errors_to_exit(*, debug: bool, rank: int | None = None) -> Iterator[None]:
    """Turns an expected error into one red line on stderr and exit code 2.

    Args:
        debug: print the traceback too.
        rank: named in the message; None outside a group.

    Raises:
        typer.Exit: after a ``MegaMoeError``, an ``OSError`` or a lack of memory. Others pass: they
            are bugs.
    """
    try:
        yield
    except Exception as error:
        told = explained(error)
        if told is None:
            raise
        if debug:
            stderr.print_exception()
        # An error that ranks have exchanged names them itself, and one of them prints it.
        printed_elsewhere: bool | None = getattr(error, "printed_elsewhere", None)
        if not printed_elsewhere:
            where = f"rank {rank}: " if rank is not None and printed_elsewhere is None else ""
            line, hint = told
            stderr.print(f"error: {where}{line}", style="bold red", markup=False, soft_wrap=True)
            if hint:
                stderr.print(f"hint: {hint}", style="dim", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_ERROR) from None


def explained(error: Exception) -> tuple[str, str | None] | None:
    """An expected error in one line, and what to do about it where that is known.

    Returns:
        None where it is a bug: it is neither a ``MegaMoeError`` nor an ``OSError`` nor a lack of
        memory.
    """
    short = _out_of_memory(error) or _about_a_file(error)
    if short is None and not isinstance(error, MegaMoeError | OSError):
        return None
    hint: str | None = getattr(error, "hint", None)
    hint = hint or next((h for kind, h in _HINTS.items() if isinstance(error, kind)), None)
    return " ".join((short or str(error)).split()), hint


def _about_a_file(error: Exception) -> str | None:
    """An error of the system that names a file, without its number; None for any other error."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return None
    return f"{error.filename}: {error.strerror}"


_ASKED: Final = re.compile(r"ried to allocate ([\d.]+ \w+)")
_FREE: Final = re.compile(r"of which ([\d.]+ \w+) is free")


def _out_of_memory(error: Exception) -> str | None:
    """What torch or Python could not allocate, and what to do; None for any other error."""
    text = str(error)
    of_torch = isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    )
    if not of_torch and not isinstance(error, MemoryError):
        return None
    asked, free = _ASKED.search(text), _FREE.search(text)
    wanted = asked[1] if asked else "more memory"
    if asked and asked[1].endswith(" bytes"):
        wanted = human_bytes(int(asked[1].split()[0]))
    left = free[1] if free else _available()
    return (
        f"out of memory: {wanted} wanted at once, {left} free: take fewer tokens or experts, or "
        "more ranks; `megamoe plan moe` shows what a layer takes"
    )


def _available() -> str:
    """What the system could still give to processes."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(x for x in lines if x.startswith("MemAvailable"))
        return human_bytes(int(line.split()[1]) * 1024)
    return "an unknown amount"


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout, never wrapped or coloured; null for infinities and NaN."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    """JSON has neither infinities nor NaN."""
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def report(message: str, *, style: str = "") -> None:
    """A line on stdout for people, unwrapped."""
    stdout.print(message, style=style, markup=False, soft_wrap=True)


def make_folder_for(path: Path) -> None:
    """Makes the folder of a file that is to be written, and says so if it was not there."""
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        stderr.print(f"made folder {path.parent}", style="dim", markup=False, soft_wrap=True)


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers.

    Cells that do not fit are folded: a number cut short would look like another one.
    """
    made = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return made


class _Lines(Progress):
    """A line per task instead of a bar, where stderr is a file or a pipe."""

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        """Says that the task begins, and of how many steps it is."""
        total = kwargs.get("total")
        sys.stderr.write(f"{description} ({total:g})\n" if total else f"{description}\n")
        sys.stderr.flush()
        return super().add_task(description, *args, **kwargs)


@contextmanager
def progress(*, shown: bool) -> Iterator[Progress]:
    """A progress bar on stderr, gone when done; a line per task where stderr is no terminal."""
    kind = Progress if stderr.is_terminal or not shown else _Lines
    bar = kind(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=not (shown and stderr.is_terminal),
    )
    with bar:
        yield bar


def counted(value: int | None) -> str:
    """A counter; a dash where the backend does not count."""
    return "–" if value is None else str(value)


def human_bytes(nbytes: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
