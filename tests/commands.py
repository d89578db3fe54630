"""Commands of the console script, in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from launcher import console
from launcher.cli import app

__all__ = ["refused"]


def refused(*options, what):
    """The command ends with code 2 and says ``what``."""
    found = CliRunner().invoke(app, [str(option) for option in options])
    assert isinstance(found.exception, SystemExit), repr(found.exception)
    assert found.exit_code == console.EXIT_ERROR, found.output
    text = " ".join(found.stderr.replace("│", " ").split())
    assert what in text, text
    assert found.stdout == ""
    return text
