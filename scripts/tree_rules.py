"""Rules about the source tree that no linter knows: C++ includes, file sizes, foreign paths.

Each rule takes the root of a tree and returns the violations as `path:line: message` strings, so
that `scripts/check` and the tests use the same code. Only the standard library is used.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

CPP_SUFFIXES = {".hpp", ".cpp", ".cuh", ".cu", ".h"}
SOURCE_SUFFIXES = CPP_SUFFIXES | {".py", ".js", ".css", ".html", ".sh", ".toml"}

#: Lines of a source file: more than WARN_LINES is said, more than MAX_LINES is an error.
WARN_LINES = 400
MAX_LINES = 600
#: Files with a tighter limit: the kernel's entry is read as a table of contents.
MAX_LINES_OF = {"csrc/moe/kernel.cuh": 150}

#: A folder of csrc -> the folders of csrc that it may include from. `include` means
#: csrc/include/megamoe, the headers that host and device share.
MAY_INCLUDE = {
    "include": {"include"},
    "device": {"device", "include"},
    "moe": {"moe", "device", "include"},
    "attention_pre": {"attention_pre", "device", "include"},
    "cmp": {"cmp", "attention_pre", "device", "include"},
    "pdl_chain": {"pdl_chain", "device", "include"},
    "cpu": {"cpu", "include"},
    "bindings": {"bindings", "cpu", "include"},
}

#: The only shared header that may include the standard library, as std or as cuda::std.
CONFIG_HEADER = "csrc/include/megamoe/config.hpp"
_STANDARD_HEADER = re.compile(r"[a-z_]+")
_CUDA_STANDARD_HEADER = re.compile(r"cuda/std/[a-z_]+")
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
_FOREIGN_PATH = re.compile(r"(?<![\w.~-])/(?:root|work|mnt|home/\w+|Users/\w+)/")


def source_files(root: Path) -> list[Path]:
    """Lists the files that git tracks or would track, relative to `root`.

    A tree without git (an unpacked sdist) is walked instead.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        names = [Path(name) for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(root) for path in root.rglob("*")]
    return sorted(name for name in names if (root / name).is_file())


def check_includes(root: Path) -> list[str]:
    """Checks who includes whom inside csrc/.

    The shared headers include only each other; `config.hpp` alone also includes the standard
    library, as `<name>` or `<cuda/std/name>`. `moe/` and `attention_pre/` never include each other,
    the device code and the CPU code neither. Names inside csrc/ are written from csrc/ or
    csrc/include/, in quotes.
    """
    problems = []
    for path in source_files(root):
        if path.parts[0] != "csrc" or path.suffix not in CPP_SUFFIXES or len(path.parts) < 3:
            continue
        folder = path.parts[1]
        for number, bracket, name in _includes(root / path):
            where = f"{path}:{number}"
            if bracket == "<":
                if folder == "include" and not _may_include_system(path, name):
                    problems.append(
                        f"{where}: <{name}> in a shared header; only config.hpp includes the "
                        "standard library, as <name> or <cuda/std/name>"
                    )
                continue
            target = _owner_of(root, path, name)
            if target is None:
                problems.append(
                    f'{where}: "{name}" is not a file of csrc/; write the path from csrc/ or '
                    "csrc/include/, and others' headers in <>"
                )
            elif folder in MAY_INCLUDE and target not in MAY_INCLUDE[folder]:
                allowed = ", ".join(sorted(MAY_INCLUDE[folder]))
                problems.append(
                    f'{where}: csrc/{folder} includes "{name}" of csrc/{target}; it may include '
                    f"from: {allowed}"
                )
    return problems


def check_sizes(root: Path) -> tuple[list[str], list[str]]:
    """Checks the lines of each source file; returns (errors, warnings)."""
    errors, warnings = [], []
    for path in source_files(root):
        if path.suffix not in SOURCE_SUFFIXES:
            continue
        lines = (root / path).read_bytes().count(b"\n")
        limit = MAX_LINES_OF.get(path.as_posix(), MAX_LINES)
        if lines > limit:
            errors.append(f"{path}:{lines}: {lines} lines; the limit is {limit}: split it")
        elif lines > WARN_LINES:
            warnings.append(f"{path}:{lines}: {lines} lines; aim for {WARN_LINES}")
    return errors, warnings


def check_foreign_paths(root: Path) -> list[str]:
    """Looks for absolute paths that exist on one person's machine only."""
    problems = []
    for path in source_files(root):
        try:
            text = (root / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := _FOREIGN_PATH.search(line):
                problems.append(f"{path}:{number}: a path of one machine: {match.group()}")
    return problems


def _includes(path: Path) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := _INCLUDE.match(line):
            yield number, match.group(1), match.group(2)


def _may_include_system(path: Path, name: str) -> bool:
    if path.as_posix() != CONFIG_HEADER:
        return False
    return bool(_STANDARD_HEADER.fullmatch(name) or _CUDA_STANDARD_HEADER.fullmatch(name))


def _owner_of(root: Path, path: Path, name: str) -> str | None:
    """Returns the folder of csrc/ that holds the included file, or None."""
    csrc = root / "csrc"
    for base in ((root / path).parent, csrc, csrc / "include"):
        found = (base / name).resolve()
        if found.is_file() and found.is_relative_to(csrc.resolve()):
            return found.relative_to(csrc.resolve()).parts[0]
    return None
