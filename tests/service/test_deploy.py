"""The files of ``deploy/`` fit the program: options that exist, times in order, names that meet."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from launcher.serve import command
from service.config import ServiceConfig

DEPLOY = Path("deploy")
UNIT = (DEPLOY / "megamoe.service").read_text()


def option_names() -> set[str]:
    app = typer.Typer()
    app.command()(command)
    found: set[str] = set()
    for parameter in typer.main.get_command(app).params:
        found |= {name for name in parameter.opts if name.startswith("--")}
    return found


def manifest() -> list[dict]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_units_options_exist_and_its_times_are_in_order():
    start = re.search(r"^ExecStart=(.*(?:\\\n.*)*)", UNIT, re.M)
    given = set(re.findall(r"--[a-z-]+", start[1]))
    assert given <= option_names(), given - option_names()
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)", UNIT, re.M)[1])
    # The drain, and five seconds for the ranks to stop.
    assert stop_s > ServiceConfig().drain_s + 5


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The program's path is the reader's to edit: here one that exists.
    unit = tmp_path / "megamoe.service"
    unit.write_text(UNIT.replace("/opt/megamoe/.venv/bin/megamoe", "/bin/true"))
    argv = ["systemd-analyze", "verify", "--man=no", str(unit)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert "megamoe.service" not in said.stderr, said.stderr


def test_the_manifest_fits_together():
    deployment, service = manifest()
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    given = {argument.partition("=")[0] for argument in container["args"]}
    assert given <= option_names(), given - option_names()
    assert pod["terminationGracePeriodSeconds"] > ServiceConfig().drain_s + 5
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    # The key: mounted where the option says, and readable by a user that is not root.
    assert "--api-key-file=/etc/megamoe/key" in container["args"]
    [secret] = [v["secret"] for v in pod["volumes"] if "secret" in v]
    assert secret["defaultMode"] & 0o400
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    [port] = container["ports"]
    assert f"--port={port['containerPort']}" in container["args"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
    assert probes == {"/v2/health/ready"}
    ranks = next(a for a in container["args"] if a.startswith("--ranks="))
    assert int(ranks.partition("=")[2]) == container["resources"]["limits"]["nvidia.com/gpu"]
