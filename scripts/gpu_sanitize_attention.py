"""Runs tests of attention-pre's kernels with line numbers in them, for compute-sanitizer.

    compute-sanitizer --tool racecheck … python scripts/gpu_sanitize_attention.py [cmp]

Of a small layer, since the tools run instrumented code a hundred times slower. Of the megakernel:
each stage alone, prefixes and long queues; of the standalone kernels: every kind of graph.
"""

from __future__ import annotations

import sys

import pytest

from megamoe import jit
from tests.gpu import test_attention_pre as tests

MEGAKERNEL = ("tests/gpu/test_attention_pre.py", "-k", "stage_alone or prefixes or few_workers")
STANDALONE = ("tests/gpu/test_cmp.py", "-k", "agrees_with_the_oracle")


def main() -> int:
    """The exit code of pytest."""
    jit._FLAGS = (*jit._FLAGS, "--generate-line-info")
    tests.ROWS = ()  # no kernels but the small layer's
    chosen = STANDALONE if sys.argv[1:] == ["cmp"] else MEGAKERNEL
    return pytest.main([*chosen, "-m", "gpu", "-q", "-x", "-p", "no:cacheprovider"])


if __name__ == "__main__":
    sys.exit(main())
