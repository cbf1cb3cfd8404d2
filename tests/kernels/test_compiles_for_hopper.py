"""The Triton kernels compile for an H100 or H200, without one: the interpreter accepts code that the compiler refuses.

They are compiled in a process of their own, in which launchers take every tensor for one on a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs  # noqa: E402

from baton.tests.kernels import hopper_cases  # noqa: E402

MOST_SHARED = 227 << 10
"""Bytes of shared memory that a program can have on a Hopper GPU."""
KERNELS = Path(hopper_cases.__file__).parents[2] / "kernels"


def has_tools() -> bool:
    try:
        return all(Path(tool.path).is_file() for tool in (knobs.nvidia.ptxas, knobs.nvidia.cuobjdump))
    except RuntimeError:  # says that none was found
        return False


pytestmark = pytest.mark.skipif(not has_tools(), reason="this Triton comes without ptxas or cuobjdump")


def compiled(names: list[str], timeout: float) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-m", "baton.tests.kernels.compile_for_hopper", "--json", "--exactly",
                           *names], env={**env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                          capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def troubles(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for row in rows:
        name = f"{row.get('kernel', 'a kernel')} of {row['case']!r}"
        if "error" in row:
            found.append(f"{name}: {row['error']}")
            continue
        if "size" in row:
            found.append(f"{name} is compiled anew for a batch of {row['size']}, while requests wait")
        if row["shared"] > MOST_SHARED:
            found.append(f"{name} takes {row['shared']} bytes of shared memory")
        if row["spilled"] > hopper_cases.SPILL_MORE.get(row["case"], hopper_cases.MOST_SPILLED):
            found.append(f"{name} spills {row['spilled']} bytes of each thread")
    return found


def test_every_kernel_compiles_and_serves_batches_of_other_sizes():
    rows = compiled(hopper_cases.FEW, timeout=280)
    assert not troubles(rows)
    written = {name for file in KERNELS.rglob("*.py") for name in re.findall(r"def (_\w+_kernel)\(", file.read_text())}
    assert {row["kernel"] for row in rows} == written, "give it a case in hopper_cases.py, and a place in FEW"


def test_attention_that_stores_current_kv_is_pipelined():
    """Two iterations' keys and values of 16 KiB: a Triton that does not pipeline loops with stores gets one without."""
    rows = compiled(["paged_decode Qwen3, takes rows in"], timeout=60)
    assert not troubles(rows)
    assert [row["shared"] > 4 * 16384 for row in rows if row["kernel"] == "_paged_decode_kernel"] == [True]


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_every_case_compiles():
    rows = compiled(list(hopper_cases.CASES), timeout=1200)
    assert not troubles(rows)


def test_what_does_not_compile_is_reported():
    rows = [{"case": "sample", "error": "CompilationError: at 3:5"},
            {"case": "sample", "kernel": "_sample_kernel", "shared": MOST_SHARED + 1, "spilled": 0},
            {"case": "sample", "kernel": "_sample_kernel", "shared": 0, "spilled": hopper_cases.MOST_SPILLED + 1},
            {"case": "sample", "kernel": "_sample_kernel", "shared": 0, "spilled": 0, "size": 3}]
    assert len(troubles(rows)) == 4
