"""What commands say where a part of Baton is not installed, or another package of its name is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_BLOCKED = """
import importlib.util, sys
class Blocked:
    names = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "jinja2", "xgrammar",
             "llguidance", "nixl", "triton", "psutil"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
ENGINE_COMMANDS = ("prefill.launch:main", "decode.launch:main", "launch:launch_server", "launch:launch_cluster",
                   "bench:bench_one_batch", "bench:bench_kvtransfer", "bench:bench_draft_acceptance",
                   "bench:bench_offline_throughput")


def run_without_engine(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _BLOCKED + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", ENGINE_COMMANDS)
def test_the_routers_install_names_what_a_command_needs(command):
    module, _, name = command.partition(":")
    flags = [] if name == "bench_kvtransfer" else ["--model-path", "tinychat"]
    done = run_without_engine(f"from baton.{module} import {name} as main\nmain({flags})")
    assert done.returncode == 2 or done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr, done.stderr
    assert "error: This needs the engine (" in done.stderr and "pip install '.[engine]'" in done.stderr


@pytest.mark.parametrize("command", ["router.launch:main", *ENGINE_COMMANDS[:4]])
def test_help_needs_no_engine(command):
    module, _, name = command.partition(":")
    done = run_without_engine(f"from baton.{module} import {name} as main\nmain(['--help'])")
    assert done.returncode == 0 and "--port" in done.stdout, done.stderr


def test_the_offline_engine_is_an_import_error():
    done = run_without_engine("import baton\ntry:\n    baton.Engine\nexcept ImportError as error:\n    print(error)")
    assert done.stdout.startswith("This needs the engine (") and done.returncode == 0, done.stderr


@pytest.mark.parametrize("over", [True, False], ids=["over ours", "beside ours"])
def test_an_unrelated_package_of_the_same_name(tmp_path, over):
    folder = tmp_path / "site" / "baton"
    folder.mkdir(parents=True)
    for entry in ROOT.iterdir():
        if entry.name in ("common", "router", "launch.py") or (entry.name == "__init__.py" and not over):
            (folder / entry.name).symlink_to(entry)
    (folder / "_baton").mkdir()
    if over:
        (folder / "__init__.py").write_text("")
    else:
        (folder / "common").unlink()
        (folder / "common").mkdir()
        for entry in (ROOT / "common").iterdir():
            (folder / "common" / entry.name).symlink_to(entry)
    code = f"import sys; sys.path.insert(0, {str(folder.parent)!r}); {{}}; import baton.router.launch"
    asked = subprocess.run([sys.executable, "-c", code.format("pass")], capture_output=True, text=True, timeout=60)
    assert "ImportError: An unrelated package that is also called baton" in asked.stderr
    command = code.format("sys.argv[0] = '/usr/bin/launch_router'")
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: An unrelated") and done.stderr.count("\n") == 1
