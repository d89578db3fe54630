"""Runs tests of the attention-pre megakernel with line numbers in it, for compute-sanitizer.

    compute-sanitizer --tool racecheck … python scripts/gpu_sanitize_attention.py [PYTEST ARGUMENTS]

By default each stage alone, prefixes and long queues of a small layer: the tools run instrumented
code a hundred times slower.
"""

from __future__ import annotations

import sys

import pytest

from megamoe import jit
from tests.gpu import test_attention_pre as tests

DEFAULT = ("-k", "stage_alone or prefixes or few_workers")


def main() -> int:
    """The exit code of pytest."""
    jit._FLAGS = (*jit._FLAGS, "--generate-line-info")
    tests.ROWS = ()  # no kernels but the small layer's
    arguments = sys.argv[1:] or DEFAULT
    return pytest.main(["tests/gpu/test_attention_pre.py", "-m", "gpu", "-q", "-x", *arguments])


if __name__ == "__main__":
    sys.exit(main())
