"""Small calls of the MoE kernels, for compute-sanitizer (``scripts/gpu_sanitize``).

Every case is compared with the oracle, so that a tool cannot call a wrong result clean. Few CTAs,
because the tools run instrumented code a hundred times slower. Kernels are compiled with line
numbers; ``--compile`` does only that.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import torch

from launcher.script import need_hopper, run_script
from megamoe import jit
from megamoe.backends import cuda, cuda_halves
from megamoe.backends.cuda import compile_moe
from megamoe.spec import EpConfig, MoESpec
from tests.cases import Case
from tests.compare import assert_matches_oracle
from tests.gpu.moe_runs import bits, gpu, opened
from tests.groups import run_group

SPEC = MoESpec(hidden=256, inter=128, num_experts=8, topk=2, num_shared=1)
BF16 = replace(SPEC, weight_dtype="bf16")
STREAMS = MoESpec(hidden=1024, inter=768, num_experts=2, topk=2)
CASES = {
    "small": (Case("small", SPEC, (5,)), 16),  # the warps of a CTA share the columns of a token
    "few": (Case("few", SPEC, (13,), "uniform+masked:0.2"), 32),
    "many": (Case("many", replace(SPEC, num_experts=2, num_shared=0), (110,)), 128),
    "tail": (Case("tail", replace(SPEC, num_experts=2, num_shared=0), (137,)), 144),
    "minimum": (Case("minimum", SPEC, (9,), "zipf:1.2"), 8),
    "bf16": (Case("bf16", BF16, (9,)), 32),
    "streams": (Case("streams", STREAMS, (37,)), 16),
    "two": (Case("two", SPEC, (5, 9)), 16),
}
"""By name: the case and rows of a block. "streams" has all SMs, two streams of tickets and placed
weights; "two" is two ranks as threads that share the GPU.
"""


def config_of(case: Case, block_m: int) -> EpConfig:
    rings = 1 if block_m == 8 else 0
    return EpConfig(
        num_ranks=case.num_ranks,
        max_tokens=144,
        block_m=block_m,
        ring_l1_blocks=rings,
        ring_l2_blocks=rings,
        wave_blocks=3 if case.name == "streams" else 0,
        num_workers=0 if case.name == "streams" else 4,
        timeout_s=60,
    )


def tell_halves() -> None:
    """Instrumented probes show nothing: any halves, and any half of each window, will do."""
    cuda_halves._measured = lambda device: [sm % 2 == 1 for sm in range(num_sms(device))]
    cuda.find_swapped = lambda tiles, near_half: [
        torch.rand(t.shape[0], t.shape[1] // 2, t.shape[2], device=t.device) < 0.5 for t in tiles
    ]


def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(case: Case, block_m: int) -> None:
    config = config_of(case, block_m)

    def body(rendezvous):
        with opened(case.spec, config, rendezvous) as layer:
            assert layer._session.placed == (case.name == "streams")
            layer.load_weights(case.experts(rendezvous.rank))
            inputs = [gpu(v) for v in case.inputs(rendezvous.rank)]
            for _ in range(2):
                y = layer.run(*inputs)
            return y.cpu()

    for rank, (y, want) in enumerate(
        zip(run_group(case.num_ranks, body), case.expected(), strict=True)
    ):
        assert_matches_oracle(y, want, case.spec, f"{case.name} rank {rank}", bits(case.spec))


def main() -> None:
    jit._FLAGS = (*jit._FLAGS, "--generate-line-info")
    if sys.argv[1:] == ["--compile"]:
        for case, block_m in CASES.values():
            compile_moe(case.spec, tail_rows=config_of(case, block_m).tail_rows)
        return
    need_hopper("gpu_sanitize")
    torch.zeros(1, device="cuda")
    tell_halves()
    for name in sys.argv[1:] or ["small", "few", "many", "tail", "minimum", "bf16", "streams"]:
        start = time.monotonic()
        run(*CASES[name])
        print(f"{name}: right, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    run_script(main)
