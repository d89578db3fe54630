"""``--report DIR`` of the benchmarks: five ledgers, a reproducibility header, plots, a trace.

A report is made from a result file alone (``{"meta", "rows"}``), and from traces and a power run
where there are some. It says of every figure what it is, or why it is absent. The ledgers and the
header's list are those of a survey of megakernels; ``launcher/report_html.py`` draws them.

A figure is ``{"name", "value", "unit", "reason"}``: ``value`` is null exactly if ``reason`` is not
empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.estimates import H200, overlap
from megamoe.errors import MegaMoeError
from megamoe.spec import MODELS, MoESpec
from megamoe.telemetry import CLOCKS_EVENTS

__all__ = ["LEDGERS", "build_report", "kernel_resources", "write_report"]

LEDGERS: Final = ("scheduling", "registers and SMEM", "HBM", "interconnect", "power")

Figure = dict[str, Any]
Row = Mapping[str, Any]

_NO_TRACE: Final = "no trace was taken: bench moe --report takes one, of the first case"
_NO_COUNTERS: Final = "needs the hardware counters of a profiler, which this program does not open"
_CPU: Final = "CPU ranks"
_NO_RATES: Final = "no sustained run with counters of the GPU (NVML's GPM)"
_SUSTAINED: Final = "under sustained load, counters of the GPU"


def _figure(name: str, value: Any, unit: str = "", reason: str = "") -> Figure:
    if value is None:
        return {
            "name": name,
            "value": None,
            "unit": unit,
            "reason": reason or "not measured in this run",
        }
    return {"name": name, "value": value, "unit": unit, "reason": ""}


def _of(row: Row, key: str, name: str, unit: str = "", scale: float = 1.0) -> Figure:
    """A field of a row, with the row's own reason if it is null."""
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and scale != 1.0:
        value *= scale
    return _figure(name, value, unit, row.get("reasons", {}).get(key, ""))


def _rate(row: Row, key: str, name: str, unit: str, scale: float = 1.0) -> Figure:
    """One of the GPU's own counters (``launcher/gpm.py``)."""
    value = (row.get("gpm") or {}).get(key)
    scaled = None if value is None else round(value * scale, 4)
    why = row.get("reasons", {}).get("gpm") or _NO_RATES
    return _figure(name, scaled, f"{unit}, {_SUSTAINED}", why)


def _on_cpu(row: Row, meta: Row) -> bool:
    return meta.get("backend") == "cpu" or not meta.get("gpu")


# ---------------------------------------------------------------- the ledgers


def _scheduling(row: Row, meta: Row, trace: Row | None) -> list[Figure]:
    cpu = _on_cpu(row, meta)
    number = None if cpu else row.get("launches", 2)  # older files: staging was a launch
    launches = _figure("launches per call", number, "staging included", _CPU)
    if "variant" in row:  # of attention-pre
        one = 1 if str(row["variant"]).startswith("megakernel") else None
        launches = _figure("launches per call", one, "the kernel", "see docs/cmp.md")
    found = [
        launches,
        _of(row, "host_us", "host time per call", "µs"),
        _rate(row, "sm_active", "SMs active", "of the time"),
        _rate(row, "tensor_active", "tensor cores active", "of the time"),
    ]
    if trace is None:
        names = ("waits of the roles", "math busy", "additions to words in L2")
        return [*found, *(_figure(name, None, "", _NO_TRACE) for name in names)]
    call, units = trace["call_us"], trace.get("units", 1)
    for wait, us in sorted(trace.get("wait_us", {}).items(), key=lambda item: -item[1]):
        found.append(
            _figure(f"wait, {wait}", round(us / (call * units), 4), "of all units' time, traced")
        )
    found.append(_figure("math busy", trace.get("math_busy"), "of all units' time, traced"))
    found.append(
        _figure("additions to words in L2", trace.get("additions"), "per rank and call, traced")
    )
    return found


def _registers(
    row: Row, meta: Row, resources: Row | None, trace: Row | None = None
) -> list[Figure]:
    known = resources or {"reason": "the kernel's resources were not asked for"}
    why = _CPU if _on_cpu(row, meta) else known.get("reason", "")
    get = known.get
    return [
        _figure("registers per thread at launch", get("registers"), "", why),
        _figure("spilled bytes, stores + loads", get("spills"), "B", why),
        _figure("shared memory per CTA", get("shared_bytes"), "B", why),
        _figure("threads per CTA", get("threads"), "", why),
        _figure("CTAs per SM", get("ctas_per_sm"), "", why),
        _rate(row, "sm_occupancy", "warps resident", "of the most that an SM holds"),
        _of(row, "ring_tokens", "ring capacity", "rows"),
        *_counted(row, trace),
    ]


def _counted(row: Row, trace: Row | None) -> list[Figure]:
    """What CPU ranks count, in rows of ``bench moe``; of GPUs a trace knows it."""
    ranks = row.get("counters") or []
    window = row.get("window_bytes") or max((c["window_bytes"] for c in ranks), default=None)
    found = [_figure("symmetric window of a rank", window, "B")]
    for ring in ("high_water_l1", "high_water_l2"):
        marks = [c[ring] for c in ranks if c.get(ring) is not None]
        traced = None if trace is None else trace.get("high_water", {}).get(ring[-2:])
        name = f"most blocks at once in the {ring[-2:].upper()} ring"
        unit = "of any rank" if marks else "of rank 0, traced"
        why = f"the GPU kernel does not count; {_NO_TRACE}"
        found.append(_figure(name, max(marks, default=traced), unit, why))
    return found


def _hbm(row: Row, meta: Row) -> list[Figure]:
    rate, us, tokens = row.get("hbm_gbs"), row.get("total_us"), row.get("tokens")
    total = sum(tokens) / len(tokens) if isinstance(tokens, list) else tokens
    known = rate is not None and us is not None and total
    per_token = round(rate * us * 1e3 / total, 1) if known and rate and us and total else None
    reasons = row.get("reasons", {})
    why = reasons.get("hbm_gbs") or reasons.get("total_us") or ""
    share = None if rate is None or _on_cpu(row, meta) else round(rate * 1e9 / H200.read, 4)
    return [
        _of(row, "hbm_gbs", "weights read", "GB/s, active experts' bytes over the call"),
        _figure("share of the read ceiling", share, f"of {H200.read / 1e12:g} TB/s", why or _CPU),
        _figure("weight bytes per token of a rank", per_token, "B", why),
        _rate(row, "memory_active", "memory traffic", "of the peak bandwidth"),
        _figure("L2 hit rate", None, "", _NO_COUNTERS),
    ]


def _interconnect(row: Row, meta: Row, trace: Row | None) -> list[Figure]:
    rate = row.get("nvlink_gbs")
    why = row.get("reasons", {}).get("nvlink_gbs", "")
    share = None if rate is None else round(rate * 1e9 / H200.link, 4)
    tail = None if trace is None else trace.get("wave_tail_us")
    remote = None if trace is None else trace.get("rows_remote")
    return [
        _of(row, "nvlink_gbs", "NVLink, busier direction", "GB/s, remote rows over the call"),
        _figure("share of the link ceiling", share, f"of {H200.link / 1e9:g} GB/s", why),
        _rate(row, "nvlink_receive_bytes_per_second", "NVLink in, with protocol", "GB/s", 1e-9),
        _rate(row, "nvlink_transmit_bytes_per_second", "NVLink out, with protocol", "GB/s", 1e-9),
        _figure("remote rows pulled", remote, "by rank 0, traced", _NO_TRACE),
        _figure(
            "wave tail", tail, "µs between first and last unit out of tiles, traced", _NO_TRACE
        ),
        _figure(
            "remote load latency",
            None,
            "µs",
            "not measured in this run; a flag's round trip between two H200s is "
            f"{H200.flag_us:g} µs",
        ),
    ]


def _power(row: Row) -> list[Figure]:
    throttle = row.get("throttle")
    if isinstance(throttle, str) and throttle.startswith("0x"):  # NVML's bits
        throttle = [name for bit, name in CLOCKS_EVENTS.items() if int(throttle, 16) & bit]
    if isinstance(throttle, list):
        throttle = ", ".join(throttle) or "none"
    return [
        _of(row, "sm_mhz", "SM clock under sustained load", "MHz"),
        _of(row, "watts", "board power, all ranks", "W"),
        _of(row, "joules_per_token", "energy per token", "J"),
        _figure("clocks held back by", throttle, "", row.get("reasons", {}).get("throttle", "")),
        _of(row, "sustained_us", "call under sustained load", "µs"),
    ]


def _overlap(row: Row, meta: Row, trace: Row | None) -> list[Figure]:
    """The bound C/B <= V_comp/V_comm beside what the trace measured."""
    spec, ranks = _spec_of(row), row.get("ranks") or 1
    found: list[Figure] = []
    if not meta.get("gpu"):
        found.append(_figure("overlap bound", None, "", _CPU))
    elif spec is None or not isinstance(ranks, int):
        found.append(_figure("overlap bound", None, "", "the row names no published model"))
    else:
        for figure in overlap(spec, ranks, H200):
            finite = figure.value if figure.value != float("inf") else None
            why = "one rank: nothing travels"
            found.append(_figure(figure.name, finite, f"{figure.unit}: {figure.formula}", why))
    measured = None if trace is None else trace.get("overlap")
    why = _NO_TRACE if trace is None else "the call moved no rows"
    found.append(
        _figure("overlap, measured", measured, "of the time in which rows travel, traced", why)
    )
    exposed = None if trace is None else trace.get("exposed_us")
    found.append(_figure("no unit computes", exposed, "µs, traced", _NO_TRACE))
    return found


def _spec_of(row: Row) -> MoESpec | None:
    return MODELS.get(str(row.get("model")))


def _times(row: Row) -> list[Figure]:
    names = (
        ("total_us", "call, staging included", "µs, median"),
        ("us", "run", "µs, median"),
        ("p99_us", "slowest or 99th percentile", "µs"),
        ("stage_us", "staging alone", "µs"),
        ("floor_us", "floor", "µs"),
        ("fraction_of_floor", "fraction of floor", ""),
        ("peer_us", f"peer, {row['peer']}" if row.get("peer") else "peer", "µs"),
        ("unfused_us", "unfused pipeline", "µs"),
        ("gemms_us", "grouped GEMMs alone", "µs"),
        ("speedup", "peer over ours", "×"),
        ("tflops", "routed arithmetic", "TFLOPS"),
        ("max_rel_err", "largest error, relative", ""),
    )
    return [_of(row, key, name, unit) for key, name, unit in names if key in row]


# ---------------------------------------------------------------- the header


def _header(found: Row, rows: Sequence[Row], resources: Row | None) -> dict[str, list[Figure]]:
    """The reproducibility list: environment, semantics, split timing, resources, stress."""
    meta: Row = found.get("meta", {})
    spec = _spec_of(rows[0]) if rows else None
    why = meta.get("reason", "")
    keys = (
        ("gpu", "GPU"), ("num_gpus", "number of GPUs"), ("cpu", "processor"), ("cores", "cores"),
        ("driver", "driver"), ("cuda", "CUDA"), ("torch", "PyTorch"), ("commit", "commit"),
        ("dirty", "uncommitted changes"), ("date", "date"), ("command", "command"),
        ("clocks", "clocks"), ("power", "power cap"), ("temperature", "temperature"),
        ("mig", "MIG or virtualisation"),
    )  # fmt: skip
    if not why and meta and not meta.get("gpu"):
        why = "CPU ranks: no GPU"
    environment = [_figure(name, meta.get(key), "", why) for key, name in keys]
    same_bits = "bitwise, whatever rings, ranks and batch"
    if rows and "variant" in rows[0]:
        same_bits = "bitwise, for equal batches"  # a plan depends on the rows of its batch
    semantics = [
        _figure("models", _all_of(rows, "model")),
        _figure(
            "weights",
            rows[0].get("weight_dtype", spec and spec.weight_dtype) if rows else None,
            "",
            "no published model",
        ),
        _figure(
            "E / K / H / I / ranks",
            None
            if spec is None
            else f"{rows[0].get('experts', spec.num_experts)} / {spec.topk} / {spec.hidden} / "
            f"{spec.inter} / {rows[0].get('ranks')}",
            "",
            "no published model",
        ),
        _figure("routing", _all_of(rows, "routing")),
        _figure(
            "largest error",
            max((r["max_rel_err"] for r in rows if r.get("max_rel_err") is not None), default=None),
            "relative; every contender is compared with the oracle before it is timed",
        ),
        _figure("determinism", same_bits, "tests and stress runs"),
    ]
    timing = [
        _figure("timed region", meta.get("notes") or meta.get("method"), "", why),
        _figure("warm-up", "calls before the timed ones, not counted"),
        _figure("prefill and decode", "a call's tokens stand for either: see the rows"),
    ]
    stress = _figure("stress", "benchmarks/results/stress_*.json", "made by megamoe stress")
    return {
        "environment": environment,
        "semantics": semantics,
        "timing": timing,
        "resources": _registers(rows[0] if rows else {}, meta, resources),
        "stress": [stress],
    }


def _all_of(rows: Sequence[Row], key: str) -> str | None:
    return ", ".join(sorted({str(row[key]) for row in rows if row.get(key)})) or None


# ---------------------------------------------------------------- the report


def build_report(
    found: Row,
    *,
    kind: str = "moe",
    traces: Sequence[Row] | None = None,
    traced_row: int = 0,
    resources: Row | None = None,
    power: Sequence[Row] = (),
) -> dict[str, Any]:
    """The report of a result file, plain JSON types.

    Args:
        found: ``{"meta", "rows"}`` as the benchmarks write it.
        kind: ``"moe"`` or ``"attention-pre"``: the title.
        traces: ``trace_figures`` by rank of one call.
        traced_row: which row's case was traced.
        resources: as ``kernel_resources`` gives them.
        power: rows of ``megamoe bench power``.

    Returns:
        ``header`` by part of the list, and ``rows`` with ``times``, ``overlap`` and ``ledgers``.
    """
    meta, rows = found.get("meta", {}), list(found.get("rows", []))
    made = []
    for i, row in enumerate(rows):
        trace = traces[0] if traces and i == traced_row else None
        ledgers = {
            "scheduling": _scheduling(row, meta, trace),
            "registers and SMEM": _registers(row, meta, resources, trace),
            "HBM": _hbm(row, meta),
            "interconnect": _interconnect(row, meta, trace),
            "power": _power(row),
        }
        names = ("model", "variant", "ranks", "tokens", "m", "kv", "l2", "routing")
        title = ", ".join(f"{name} {row[name]}" for name in names if row.get(name) is not None)
        made.append(
            {
                "title": title,
                "times": _times(row),
                "overlap": _overlap(row, meta, trace),
                "ledgers": ledgers,
            }
        )
    return {
        "title": f"megamoe bench {kind}",
        "header": _header(found, rows, resources),
        "rows": made,
        "traces": list(traces or []),
        "power": [dict(row) for row in power],
        "source": {"meta": dict(meta), "rows": rows},
    }


def kernel_resources(spec: MoESpec) -> dict[str, Any]:
    """What the compiler gave the layer's kernel, or ``{"reason"}``. Needs no GPU."""
    from megamoe.backends.cuda import compile_moe

    try:
        cubin = compile_moe(spec)
    except MegaMoeError as error:
        return {"reason": str(error).splitlines()[0]}
    kernel = cubin.resources()["megamoe_moe"]
    return {
        "registers": kernel.registers,
        "spills": kernel.spill_stores + kernel.spill_loads,
        "shared_bytes": cubin.constant("megamoe_moe_shared_bytes"),
        "threads": cubin.constant("megamoe_moe_threads"),
        "ctas_per_sm": 1,  # the launch bounds and shared memory leave room for no more
    }


def write_report(
    folder: Path,
    report: Mapping[str, Any],
    *,
    chrome: dict[str, Any] | None = None,
    timeline: str = "",
) -> list[Path]:
    """Writes ``report.json``, ``report.html`` (one file, no network) and ``trace.json.gz``.

    Args:
        folder: made if it is not there.
        report: of ``build_report``.
        chrome: a Chrome trace; without it no trace is written.
        timeline: an SVG to show, or empty.
    """
    from launcher.report_html import report_html

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.json", folder / "report.html"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n")
    paths[1].write_text(report_html(report, timeline))
    if chrome is not None:
        from launcher.trace_moe import write_trace

        paths.append(folder / "trace.json.gz")
        write_trace(paths[-1], chrome)
    return paths
