"""Kinds of graph of a plan's kernels.

    single_stream       captured from one stream: each kernel after the one before it
    single_stream_pdl   the same, and each may begin while the one before it runs
    branches            nodes made one by one, edges where data flows
    branches_pdl        the same edges, programmatic
    graph_rewrite       captured from one stream, then its edges replaced by those of branches_pdl
    manual_streams      captured from several streams that wait for programmatic events

The first four differ in edges alone: branches or not, times programmatic or not. The last three are
three ways to the same graph.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

__all__ = ["MODES", "Mode"]

Mode = Literal[
    "single_stream",
    "single_stream_pdl",
    "branches",
    "branches_pdl",
    "graph_rewrite",
    "manual_streams",
]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
