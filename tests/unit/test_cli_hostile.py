"""Commands given what they cannot use: a reason, exit code 2, no traceback, and nothing lost."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from launcher import console
from launcher.cli import app


def refused(*options, what):
    """The command ends with code 2 and says ``what``."""
    found = CliRunner().invoke(app, [str(option) for option in options])
    assert isinstance(found.exception, SystemExit), repr(found.exception)
    assert found.exit_code == console.EXIT_ERROR, found.output
    text = " ".join(found.stderr.replace("│", " ").split())
    assert what in text, text
    assert found.stdout == ""
    return text


GROUPS = [
    ["tune"],
    ["stress"],
    ["demo"],
    ["run"],
    ["bench", "moe"],
    ["bench", "power"],
    ["trace", "moe"],
    ["serve", "--random", "qwen3-30b"],
]


@pytest.mark.parametrize("command", GROUPS, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_command_takes_cpus_in_the_place_of_gpus(command, ranks, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MEGAMOE_CACHE", str(tmp_path))
    more = ["--input", tmp_path, "--output", tmp_path, "--checkpoint", tmp_path, "--layer", "0"]
    options = [*command, *(more if command == ["run"] else []), "--ranks", ranks, "--backend"]
    text = refused(*options, "cuda", what="--backend cuda needs a Hopper GPU")
    assert text.count("needs a Hopper GPU") == 1
    refused(*options, "tpu", what="--backend tpu: must be auto, cpu or cuda")
