"""The source distribution holds all that git does. The wheel that is built of it holds the packages and the shipped
model, nothing else, and works from outside the checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves folders behind in the checkout
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", str(folder)], cwd=source, check=True)
    sdist = next(folder.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(filter(None, files)) <= held | {name for name in files if not (ROOT / name).is_file()}
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(sdist)]
    subprocess.run(build, check=True)
    return next(folder.glob("*.whl"))


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"baton", next(t for t in tops if t.endswith(".dist-info"))}
    inside = {name.split("/")[1] for name in names if name.startswith("baton/")}
    assert inside == {"py.typed", "__init__.py", "launch.py", "offline.py", "utils.py", "bench.py",
                      *(f"launch_{name}.py" for name in ("router", "server", "cluster", "prefill", "decode")),
                      "calibrate_double_sparsity.py", *(f"bench_{name}.py" for name in (
                          "serving", "one_batch", "one_batch_server", "offline_throughput")),
                      "common", "kernels", "kvtransfer", "prefill", "decode", "router", "simulate", "lang"}
    shipped = {name.removeprefix("baton/common/tinychat/") for name in names if "/tinychat/" in name}
    assert {name for name in shipped if name.endswith(".py")} == {"__init__.py"}, "training code is not for users"
    assert {*(f"baton/common/tinychat/{name}/{file}" for name in ("checkpoint", "eagle3", "nextn", "draft")
              for file in ("model.safetensors", "config.json")), "baton/router/monitoring/dashboard.html",
            "baton/simulate/costs/tables/llama-3-8b-h200.json",
            "baton/simulate/validation/measured/h200-1P1D-poisson.json",
            "baton/common/tokenizer/chat_templates/qwen.jinja"} <= set(names)
    assert {f"baton/{table.relative_to(ROOT)}" for table in (ROOT / "kernels/tuning").rglob("*.json")} <= set(names)


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
    told = archive.read(name).decode().partition("\n\n")[0]
    assert "License-Expression: Apache-2.0\n" in told and "License-File: LICENSE\n" in told
    assert "Requires-Python: >=3.10\n" in told
    needed = [line.partition(": ")[2] for line in told.splitlines()
              if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert needed and not any(name.startswith(("torch", "numpy", "psutil")) for name in needed)


def test_it_runs_from_outside_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)],
                   check=True)
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import baton; assert sys.argv[1] in baton.__file__; "
            "from baton.common.tinychat import CHECKPOINT; assert (CHECKPOINT / 'config.json').is_file(); "
            "sys.argv = ['launch_router', '--help']; from baton.router.launch import main; main()")
    run = subprocess.run([sys.executable, "-c", code, str(target)], cwd=tmp_path, capture_output=True, text=True,
                         timeout=60)
    assert run.returncode == 0 and "--worker-urls" in run.stdout, run.stderr
