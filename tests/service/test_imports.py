"""The HTTP process carries no tensor library, and nothing of the service can unpickle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

FORBIDDEN = ("torch", "cuda", "pynvml", "triton", "transformers", "launcher", "megamoe.layer")


def test_importing_the_service_leaves_torch_out():
    code = (
        "import sys, service.__main__, service.app, service.remote; "
        f"print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_serving_without_the_extra_names_it():
    code = (
        "import sys; sys.modules['msgspec'] = None; from launcher.cli import app; "
        "app(['serve', '--random', 'hidden=128,inter=128,experts=2,topk=1', '--backend', 'cpu'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert said.returncode == 2, said.stderr
    assert "megamoe[service]" in said.stderr
    assert "Traceback" not in said.stderr


def test_nothing_is_pickled():
    bad = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
    calls = {
        "send_pyobj",
        "recv_pyobj",
        "all_gather_object",
        "broadcast_object_list",
        "eval",
        "exec",
    }
    sources = [*Path("service").rglob("*.py"), *Path("launcher/serving").rglob("*.py")]
    sources.append(Path("launcher/serve.py"))
    assert len(sources) > 20
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not bad & set(names), (path, names)
            if isinstance(node, ast.Call):
                function = node.func
                name = getattr(function, "attr", getattr(function, "id", ""))
                assert name not in calls, (path, node.lineno, name)
