"""What every command checks before it begins: numbers are finite, and what it shall write, it can.

A search or a benchmark takes minutes; a folder that cannot be written must be known before them.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

from launcher.console import errors_to_exit
from megamoe.errors import SpecError

__all__ = ["WRITTEN", "Command", "add", "given", "need_writable", "refuse_void"]

WRITTEN: Final = frozenset({"output", "svg", "trace", "report", "folder", "workdir"})
"""Parameters that name files or folders to be written; other paths are read."""

_FOLDERS: Final = frozenset({"report", "folder", "workdir"})


class Command(TyperCommand):
    """A command whose options are checked for what no option's type says."""

    def invoke(self, ctx: Any) -> Any:
        """Checks, then runs.

        Raises:
            typer.Exit: code 2 after an error's line.
        """
        with errors_to_exit(debug=bool(ctx.params.get("debug"))):
            for parameter in self.params:
                name, value = parameter.name or "", ctx.params.get(parameter.name or "")
                for one in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(one, float) and not math.isfinite(one):
                        raise SpecError(f"{parameter.opts[0]} {one}: must be a finite number")
                    if name in WRITTEN and isinstance(one, Path):
                        need_writable(parameter.opts[0], one, folder=name in _FOLDERS)
        return super().invoke(ctx)


def need_writable(option: str, path: Path, *, folder: bool = False) -> None:
    """Tries whether a file, or a folder with files, could be written; leaves nothing behind.

    Args:
        option: what messages call it.
        path: of the file or folder.
        folder: it is a folder.

    Raises:
        SpecError: it could not; says why.
    """
    try:
        if folder and path.exists() and not path.is_dir():
            raise NotADirectoryError("it is a file, and a folder is wanted")
        if path.is_file():
            with path.open("ab"):
                return
        if path.exists() and not path.is_dir():
            return  # /dev/stdout and the like
        if path.is_dir() and not folder:
            raise IsADirectoryError("it is a folder, and a file is to be written")
        there = path
        while not there.exists():
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise SpecError(
            f"{option} {path} cannot be written ({reason}): give a place that can"
        ) from None


def given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was typed. Rank processes get all of them."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE" and "RANK" not in os.environ


def refuse_void(context: typer.Context, names: Iterable[str], where: str) -> None:
    """Refuses options that would be ignored.

    Args:
        context: of the command.
        names: of parameters.
        where: they are used, to be said.

    Raises:
        SpecError: one was typed.
    """
    options = {p.name: p.opts[0] for p in context.command.params}
    typed = [options[name] for name in names if given(context, name)]
    if typed:
        raise SpecError(f"{', '.join(typed)}: used {where}; leave out what would be ignored")


def add(to: typer.Typer, name: str, command: Any) -> None:
    """Registers a checked command."""
    to.command(name, cls=Command)(command)
