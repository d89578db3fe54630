"""The README's code blocks, run as a reader would: in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = {"megamoe": "launcher.cli", "torchrun": "torch.distributed.run"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An empty folder whose ``bin`` holds what an activated environment would."""
    made = tmp_path_factory.mktemp("readme")
    (made / "bin").mkdir()
    for name, module in (*PROGRAMS.items(), ("python", None)):
        start = f"-m {module} " if module else ""
        script = made / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {start}"$@"\n')
        script.chmod(0o755)
    return made


@pytest.mark.multirank
@pytest.mark.timeout(400)
def test_the_blocks_run_in_order(folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    run = 0
    for language, text in BLOCKS:
        if language == "sh" and text.startswith("make "):
            assert [line.split("#")[0].split() for line in text.splitlines()] == [
                ["make", "demo"],
                ["make", "test"],
            ]
            continue
        command = {"sh": ["bash", "-euo", "pipefail", "-c", text], "python": ["python", "-c", text]}
        done = subprocess.run(
            command[language],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )
        said = f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == 0, said
        run += 1
    assert run >= 4, "the blocks are gone, or are in another form"
    assert (folder / "y.safetensors").stat().st_size > 100 * 512 * 2


def test_what_the_readme_links_to_exists():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_troubleshooting_quotes_messages_that_exist():
    """Each message in its table, up to the first placeholder, is in the source."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(quoted) >= 10
    folders = (ROOT / "megamoe", ROOT / "launcher")
    source = "".join(path.read_text() for root in folders for path in root.rglob("*.py"))
    # Without the seams of literals and the fields of f-strings, a message is one run of text.
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    source = re.sub(r"\{[^{}]*\}", "\0", source)
    for message in quoted:
        parts = re.split(r"…|torch\.\w+|\d+|/dev/shm|'[^']*'|\[|\]|;", message)
        long = [part.strip(" :,") for part in parts if len(part) >= 10]
        assert any(part in source for part in long), f"{message!r}: none of {long} in the source"
