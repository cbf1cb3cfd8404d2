"""Every launcher chooses on an H200 what was measured there: kernel, grid, tile, warps and stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

MEASURED = Path(__file__).with_name("h200_choices.json")


def recorded(*flags: str) -> dict[str, list[str]]:
    """The launches of each case, recorded by a process that emulates the GPU."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([sys.executable, "-m", "baton.tests.kernels.record_choices", *flags],
                          env={**env, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    return spelled_out(json.loads(done.stdout))


def spelled_out(content: dict[str, Any]) -> dict[str, list[str]]:
    return {case: [content["launches"][number] for number in numbers] for case, numbers in content["cases"].items()}


def test_an_h200_runs_what_was_measured():
    measured, chosen = spelled_out(json.loads(MEASURED.read_text())), recorded()
    assert list(chosen) == list(measured)
    different = {case: (measured[case], chosen[case]) for case in measured if chosen[case] != measured[case]}
    assert not different
