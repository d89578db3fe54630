"""The last step of ``bench moe --report``: a traced call of the first case, then the report."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.ranks import Group
from megamoe.spec import EpConfig

if TYPE_CHECKING:
    from launcher.moe_rows import BenchOptions

__all__ = ["write_moe_report"]


def write_moe_report(
    group: Group, options: BenchOptions, found: dict[str, Any], folder: Path
) -> list[Path]:
    """Collective: traces one call and writes the report on rank 0.

    Args:
        group: of the ranks that have made the rows.
        options: of the first model; its first case is traced.
        found: the result file.
        folder: where to.

    Returns:
        What was written; on other ranks nothing.
    """
    from launcher.moe_perfetto import chrome_trace
    from launcher.moe_timeline import timeline_svg
    from launcher.moe_trace import trace_figures
    from launcher.report import build_report, kernel_resources, write_report
    from launcher.trace_moe import trace_call

    tokens, routing = options.cases[0]
    config = EpConfig(
        num_ranks=group.num_ranks,
        max_tokens=1,
        block_m=options.block_m,
        ring_l1_blocks=options.ring_blocks,
        ring_l2_blocks=options.ring_blocks,
        num_workers=options.workers,
    )
    before = os.environ.get("MEGAMOE_TRACE", "")
    os.environ["MEGAMOE_TRACE"] = "1"
    try:
        traces, samples = trace_call(
            group, options.spec, config, tokens, routing, 3, 0.0, options.seed, options.backend
        )
    finally:
        os.environ["MEGAMOE_TRACE"] = before
    if not group.first:
        return []
    on_gpu = group.device != "cpu"
    report = build_report(
        found,
        traces=[trace_figures(trace) for trace in traces],
        resources=kernel_resources(options.spec) if on_gpu else None,
    )
    title = f"{options.model}, {tokens} tokens per rank, {routing}, rank 0 of {group.num_ranks}"
    return write_report(
        folder,
        report,
        chrome=chrome_trace(traces, samples),
        timeline=timeline_svg(traces[0], title=title),
    )
