"""Reading JSON that a user names: what is wrong with a file is said, whatever it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megamoe.errors import SpecError

__all__ = ["read_json", "read_results"]


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
