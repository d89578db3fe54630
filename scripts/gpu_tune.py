"""Searches that justify the selection of rings, waves and lags: ``benchmarks/results/tune_*.json``.

    python scripts/gpu_tune.py --output tune_h200.json
    torchrun --nproc-per-node 2 scripts/gpu_tune.py --output tune_h200x2.json

One process per rank runs all searches, so that imports and compilation are paid once. The file is
written after each search; at the time limit a search ends where it is, and its trials are kept.
What a whole search chose goes to the cache folder, as with ``megamoe tune``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.meta import run_meta
from launcher.models import published_layer
from launcher.ranks import Group, need_backend, process_group, sampler_of
from launcher.tuner import Trial, TuneOptions, tune
from megamoe.errors import MegaMoeError
from megamoe.spec import MoESpec
from megamoe.tuning import save

# Name, layer, experts on a rank, T_max, tokens that matter. With one rank, T tokens of E local
# experts are what a rank of R sees of T/R tokens per rank and R·E experts.
SEARCHES = [
    ("v4-flash", 64, 128, [8, 128]),
    ("v4-flash", 128, 8192, [8, 64, 512]),
    ("deepseek-v3", 64, 8192, [64, 1024, 8192]),
]
TINY = [("tiny", 8, 64, [1, 64])]


class OutOfTime(Exception):
    """Raised on all ranks after the same trial."""


def layer(name: str, experts: int) -> MoESpec:
    if name == "tiny":
        return MoESpec(hidden=256, inter=128, num_experts=experts, topk=2)
    return published_layer(name, experts=experts)


def one_search(
    group: Group, name: str, options: TuneOptions, started: float, limit_s: float
) -> dict[str, Any]:
    """A search as JSON types; ``chosen`` is None where time ran out."""
    trials: list[Trial] = []

    def after(trial: Trial) -> None:
        trials.append(trial)
        spent = time.monotonic() - started
        if group.first:
            print(f"| {name} {spent:.1f} s {trial.to_dict()}", flush=True)
        if any(group.gather(spent > limit_s)):
            raise OutOfTime

    found: dict[str, Any] = {}
    try:
        found = tune(group, options, after)
    except OutOfTime:
        if group.first:
            print(f"| {name}: out of time after {len(trials)} trials", flush=True)
    trials = found.get("trials", trials)
    reading = sampler_of(group.device).read()
    result = {
        "model": name,
        "experts": options.spec.num_experts,
        "ranks": group.num_ranks,
        "max_tokens": options.max_tokens,
        "tokens": options.tokens,
        "routing": options.routing,
        "recommended": asdict(found["start"]) if found else None,
        "chosen": asdict(found["chosen"]) if found else None,
        "trials": [t.to_dict() for t in trials],
        "sm_mhz": reading.values.get("sm_clock_hertz", 0) / 1e6 or None,
        "watts": reading.values.get("power_watts"),
    }
    if found and group.first and all(t.bitwise_equal for t in trials):
        evidence = {"trials": result["trials"]}
        path = save(options.spec, found["open"], found["device"], found["chosen"], evidence)
        print(f"| {name}: open_layer takes it from {path}", flush=True)
    return result


def run(group: Group, output: Path | None, backend: str, limit_s: float, tiny: bool) -> None:
    started, results = time.monotonic(), []
    for name, experts, most, tokens in TINY if tiny else SEARCHES:
        if any(group.gather(time.monotonic() - started > limit_s)):
            break
        options = TuneOptions(
            spec=layer(name, experts * group.num_ranks),
            max_tokens=most,
            tokens=tokens,
            routing="uniform",
            workers=0,
            backend=backend,
            margin=0.02,
            rounds=2,
            calls=4,
            seed=1,
        )
        results.append(one_search(group, name, options, started, limit_s))
        if group.first and output:
            meta = run_meta(margin=options.margin, rounds=options.rounds, calls=options.calls)
            output.write_text(json.dumps({"meta": meta, "searches": results}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--backend", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--limit", type=float, default=60, help="seconds; no new trial after it")
    parser.add_argument("--tiny", action="store_true", help="a small layer, to try the script")
    options = parser.parse_args()
    arguments = options.output, options.backend, options.limit, options.tiny
    try:
        need_backend(options.backend)
        if "WORLD_SIZE" not in os.environ:
            run(Group(0, 1, "cuda:0" if options.backend == "cuda" else "cpu"), *arguments)
            return
        with process_group(int(os.environ["WORLD_SIZE"]), options.backend) as group:
            run(group, *arguments)
    except MegaMoeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
