"""``megamoe serve``: a layer over HTTP, executed by a group of ranks.

megamoe serve --checkpoint DIR --layer 3 --ranks 2
torchrun --nproc-per-node 2 -m launcher.serve --checkpoint DIR --layer 3

Three kinds of process: the ranks under torchrun, the HTTP process, and, for the first form, the
supervisor that starts both. They watch each other by pidfd, so that none outlives the others:

- a rank that dies or stands still: the HTTP process answers 503 and ends the group, torchrun
  starts it anew, at most ``--max-restarts`` times, then ends with a failure;
- the HTTP process dies: ranks end, and with them torchrun and the supervisor, with a failure;
- the supervisor (or torchrun) dies: the HTTP process ends, and with it the ranks.

SIGTERM to the supervisor or to torchrun drains. Without torchrun's own restarts being needed, the
exit status is 0 after a drain only.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from launcher.console import (
    EXIT_ERROR,
    BackendOption,
    DebugFlag,
    RanksOption,
    RingBlocksOption,
    StoredDtypeOption,
    WorkersOption,
    errors_to_exit,
)
from launcher.ranks import arguments, need_backend
from launcher.serving.source import AttentionSource, LayerSource
from launcher.serving.supervisor import (
    HTTP_START_S,
    RUN_DIR,
    Supervisor,
    http_command,
    runtime_dir,
)
from megamoe.errors import BackendUnavailable, SpecError
from megamoe.spec import EpConfig
from service.config import ConfigError, ServiceConfig

if TYPE_CHECKING:
    from megamoe.layer import Backend
    from megamoe.spec import WeightDtype

__all__ = ["command"]

LEAST_INTERVAL_S: Final = 0.05
HTTP_SOON_S: Final = 10.0
OPTIONS: Final = {
    "host": "--host",
    "port": "--port",
    "queue_requests": "--queue-requests",
    "queue_tokens": "--queue-tokens",
    "max_body_bytes": "--max-body-mib",
    "request_timeout_s": "--request-timeout",
    "progress_timeout_s": "--progress-timeout",
    "drain_s": "--drain",
}
"""What sets a field of ``ServiceConfig``."""


def command(
    context: typer.Context,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder with config.json and safetensors.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Number of the layer; it must be an MoE layer.")
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(
            help="Serve random weights instead: the name of a published shape, or "
            "hidden=256,inter=128,experts=8,topk=2[,shared=1][,dtype=bf16]."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    attention_pre: Annotated[
        str | None,
        typer.Option(
            help="Serve an attention_pre layer too, of random weights: glm-5, glm-5.2, or hidden=…,"
            "heads=…,q_lora=…,kv_lora=…,nope=…,rope=…,index_heads=…."
        ),
    ] = None,
    cache_pages: Annotated[
        int,
        typer.Option(min=1, max=1 << 20, help="Pages of 64 keys in each cache of attention_pre."),
    ] = 1024,
    ranks: RanksOption = None,
    weight_dtype: StoredDtypeOption = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a rank in one step.")] = 512,
    ring_blocks: RingBlocksOption = 0,
    workers: WorkersOption = 0,
    backend: BackendOption = "auto",
    timeout: Annotated[
        float, typer.Option(help="Limit of each wait inside a step, seconds.")
    ] = 10.0,
    heartbeat: Annotated[
        float, typer.Option(min=0.01, help="Idle seconds between steps that prove progress.")
    ] = 1.0,
    telemetry_interval: Annotated[
        float,
        typer.Option(min=0.0, max=60.0, help="Seconds between readings of sensors; 0 reads none."),
    ] = 1.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of the group before giving up.")
    ] = 3,
    host: Annotated[
        str, typer.Option(help="Bind address; anything but loopback needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 lets the system choose.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API key; else MEGAMOE_API_KEY in the environment."),
    ] = None,
    queue_requests: Annotated[int, typer.Option(help="Requests in flight before 429.")] = 256,
    queue_tokens: Annotated[
        int, typer.Option(help="Tokens in flight before 429; 0 is four steps' worth.")
    ] = 0,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body, MiB.")] = 256,
    request_timeout: Annotated[float, typer.Option(help="Limit of one request, seconds.")] = 60.0,
    progress_timeout: Annotated[
        float, typer.Option(help="Without a step for so long, the service is not ready.")
    ] = 30.0,
    drain: Annotated[float, typer.Option(help="Limit of the drain after SIGTERM.")] = 20.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Private folder for sockets. Default: a new one.")
    ] = None,
    fault_injection: Annotated[
        bool, typer.Option("--fault-injection", help="Offer POST /debug/fault. For tests.")
    ] = False,
    debug: DebugFlag = False,
) -> None:
    """Serve an MoE layer over HTTP (Open Inference Protocol v2)."""
    source = LayerSource(checkpoint, layer, random, seed, cast("WeightDtype | None", weight_dtype))
    in_group = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if api_key_file is not None:
        os.environ["MEGAMOE_API_KEY_FILE"] = str(api_key_file.absolute())
    fields: dict[str, Any] = {
        "host": host,
        "port": port,
        "fault_injection": fault_injection,
        "queue_requests": queue_requests,
        "queue_tokens": queue_tokens,
        "max_body_bytes": max_body_mib << 20,
        "body_budget_bytes": max(1 << 30, 4 * (max_body_mib << 20)),
        "request_timeout_s": request_timeout,
        "progress_timeout_s": progress_timeout,
        "drain_s": drain,
    }
    attention: AttentionSource | None = None
    with errors_to_exit(debug=debug):
        need_backend(backend)
        source.check()
        size = int(os.environ["WORLD_SIZE"]) if in_group else ranks or _default_ranks(backend)
        config = EpConfig(
            num_ranks=size,
            max_tokens=max_tokens,
            ring_l1_blocks=ring_blocks,
            ring_l2_blocks=ring_blocks,
            num_workers=workers,
            timeout_s=timeout,
        )
        if random is not None or not in_group:  # else the ranks say it, of a checkpoint
            config.resolved(source.spec())
        if attention_pre is not None:
            attention = AttentionSource(attention_pre, cache_pages, seed)
            attention.spec()
        _check_settings(fields)
        if 0 < telemetry_interval < LEAST_INTERVAL_S:
            raise SpecError(
                f"--telemetry-interval {telemetry_interval:g}: must be 0, for none, or at least "
                f"{LEAST_INTERVAL_S:g} s: reading takes milliseconds"
            )
    if in_group:
        raise typer.Exit(
            _rank(
                source,
                backend=cast("Backend", backend),
                heartbeat_s=heartbeat,
                telemetry_s=telemetry_interval,
                config=config,
                fields=fields,
                attention=attention,
            )
        )
    supervisor = Supervisor(run_dir, fields, size, max_restarts, arguments(context))
    raise typer.Exit(supervisor.run())


def _check_settings(fields: dict[str, Any]) -> None:
    try:
        from service.__main__ import read_key
    except ImportError as error:
        raise BackendUnavailable(
            f"megamoe serve needs the extra service ({error.name} is not installed): "
            "pip install 'megamoe[service]'"
        ) from None

    try:
        ServiceConfig(**fields, api_key=read_key())
    except ConfigError as error:
        option = OPTIONS.get(str(error).partition(" = ")[0])
        raise SpecError(f"{option}: {error}" if option else str(error)) from None


def _default_ranks(backend: str) -> int:
    """One rank per GPU; on a CPU two ranks where there are two cores."""
    gpus = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    if backend != "cpu" and gpus:
        return gpus
    return min(2, len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------------- rank


def _rank(
    source: LayerSource,
    *,
    config: EpConfig,
    backend: Backend,
    heartbeat_s: float,
    telemetry_s: float,
    fields: dict[str, Any],
    attention: AttentionSource | None,
) -> int:
    """This process is a rank of torchrun's group."""
    run_dir = Path(os.environ.get(RUN_DIR) or _agents_run_dir())
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    if RUN_DIR not in os.environ and first_here and not _http_pid(run_dir, 0.0):
        from service.ipc import private_directory

        private_directory(run_dir)
        # A session of its own: torchrun ends ranks by process group, and this one outlives them.
        subprocess.Popen(
            http_command(fields, run_dir, os.getppid()),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
    # The supervisor starts it before torchrun: if it is not there soon, it is gone for good.
    http_pid = _http_pid(run_dir, HTTP_START_S if RUN_DIR not in os.environ else HTTP_SOON_S)
    if http_pid is None:
        sys.stderr.write("megamoe serve: the HTTP process does not run\n")
        return EXIT_ERROR

    from launcher.serving.rank import run_rank
    from launcher.serving.worker import RankOptions

    with errors_to_exit(debug=False, rank=int(os.environ["RANK"])):
        return run_rank(
            RankOptions(
                name=source.name,
                spec=source.spec,
                config=config,
                backend=backend,
                experts=source.experts,
                router=source.router,
                run_dir=run_dir,
                heartbeat_s=heartbeat_s,
                telemetry_s=telemetry_s,
                attention=attention.options() if attention is not None else None,
            ),
            http_pid,
        )
    raise AssertionError  # errors_to_exit does not swallow


def _agents_run_dir() -> str:
    """The run directory of ranks that torchrun started by itself: one per agent process."""
    agent = os.getppid()
    # Field 22 of stat is the start time: a process id alone comes back some day.
    started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    return str(runtime_dir() / f"megamoe-{os.getuid()}-{agent}-{started}")


def _http_pid(run_dir: Path, limit_s: float) -> int | None:
    """The running HTTP process of a run directory; waits for it to listen."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError, ValueError):
            pid = int((run_dir / "http.pid").read_text())
            os.kill(pid, 0)
            return pid
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


if __name__ == "__main__":
    typer.run(command)
