"""Compiles the kernels of the tests and benchmarks into the cache, several at once."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor

from launcher.script import run_script
from megamoe.backends.cuda import compile_moe
from megamoe.spec import MODELS, MoESpec, WeightDtype

Shape = tuple[int, int, WeightDtype, bool, int]
"""Hidden, inter, weights, traced, tail rows."""
SHAPES: list[tuple[int, int, WeightDtype]] = [
    (256, 128, "fp8"),
    (512, 384, "fp8"),
    (128, 128, "fp8"),
    (384, 128, "fp8"),
    (256, 256, "fp8"),  # stress
    (2176, 128, "fp8"),
    (256, 128, "bf16"),
    (512, 384, "bf16"),
]


def compile_one(shape: Shape) -> str:
    hidden, inter, dtype, trace, tail_rows = shape
    start = time.monotonic()
    spec = MoESpec(hidden=hidden, inter=inter, num_experts=8, topk=1, weight_dtype=dtype)
    cubin = compile_moe(spec, tail_rows=tail_rows, trace=trace)
    kernel = cubin.resources()["megamoe_moe"]
    return (
        f"{shape}: {time.monotonic() - start:.0f} s, {kernel.registers} registers, spills "
        f"{kernel.spill_stores}+{kernel.spill_loads}, {len(cubin.warnings())} warnings"
    )


def main() -> None:
    shapes: list[Shape] = [(*shape, False, 0) for shape in SHAPES]
    shapes += [(512, 384, "fp8", False, 16), (512, 384, "bf16", False, 16)]
    for name in ("deepseek-v3", "v4-flash", "v4-pro"):
        model = MODELS[name]
        shapes.append((model.hidden, model.inter, "fp8", False, 0))
        if name != "v4-flash":
            shapes.append((model.hidden, model.inter, "fp8", False, 16))
        if "--trace" in sys.argv and name != "v4-pro":
            shapes.append((model.hidden, model.inter, "fp8", True, 0))
    with ProcessPoolExecutor(len(shapes)) as pool:
        for line in pool.map(compile_one, shapes):
            print(line, flush=True)


if __name__ == "__main__":
    run_script(main)
