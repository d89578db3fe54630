"""Result files: reading JSON that a user names, and writing so that no file is ever half there.

What is wrong with a file that is read is said, whatever it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe.errors import SpecError

__all__ = ["kind_of", "read_json", "read_results", "rows_of_gpus", "write_whole"]


def read_json(path: Path) -> Any:
    """The file's value.

    Raises:
        OSError: it cannot be read.
        SpecError: it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise SpecError(f"{path} is no JSON file that can be read: nested too deeply") from None
    except ValueError as error:  # neither UTF-8 nor JSON
        raise SpecError(f"{path} is no JSON file: {error}") from None


def read_results(path: Path) -> dict[str, Any]:
    """A result file: an object with ``meta``, an object, and ``rows``, a list of objects.

    Raises:
        OSError: it cannot be read.
        SpecError: it is something else.
    """
    found = read_json(path)
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("meta"), dict)
        or not isinstance(found.get("rows"), list)
        or not all(isinstance(row, dict) for row in found["rows"])
    ):
        raise SpecError(
            f"{path} holds no meta and rows: give a result file, as `megamoe bench … --output FILE`"
            " writes them"
        )
    return found


_KINDS = {
    "moe": ("model", "tokens", "routing", "total_us"),
    "attention-pre": ("variant", "m", "kv"),
}


def kind_of(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Whose rows these are: ``"moe"`` or ``"attention-pre"`` of ``megamoe bench``, or None."""
    for kind, names in _KINDS.items():
        if rows and all(name in row for row in rows for name in names):
            return kind
    return None


def rows_of_gpus(path: Path) -> list[dict[str, Any]]:
    """Rows of ``bench moe`` on GPUs, for a model of GPUs to be compared with.

    Raises:
        OSError: the file cannot be read.
        SpecError: it holds something else, or what CPU ranks did.
    """
    found = read_results(path)
    rows: list[dict[str, Any]] = found["rows"]
    wanted = "give a file that `megamoe bench moe` has written on GPUs"
    if kind_of(rows) != "moe":
        raise SpecError(f"--against {path} holds no rows of `megamoe bench moe`: {wanted}")
    meta = found["meta"]
    if meta.get("backend") == "cpu" or ("gpu" in meta and meta["gpu"] is None):
        raise SpecError(f"--against {path} was measured on CPU ranks: {wanted}")
    return rows


def write_whole(path: Path, text: str) -> None:
    """Writes a file in one step: a reader, or a run that is killed, never leaves half of it.

    A link stays one, and what it points to is written. Devices, pipes, and files in a folder that
    takes no new ones are written in their place.

    Args:
        path: of the file; its folder is there.
        text: all that it shall hold.

    Raises:
        OSError: it cannot be written.
    """
    whole = path.resolve()  # of a pipe's link in /proc, no path at all
    in_place = path.exists() and not path.is_file()
    if in_place or not os.access(whole.parent, os.W_OK):
        path.write_text(text, encoding="utf-8")
        return
    partial = whole.with_suffix(whole.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(whole)
