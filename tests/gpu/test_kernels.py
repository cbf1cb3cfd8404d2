"""The Triton kernels on a GPU against their plain-torch twins, bfloat16 included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("file", ["kernel_cases.py", "draw_cases.py", "fp8_cases.py"])
def test_kernels_equal_their_twins(file):
    cases = Path(__file__).parents[1] / "kernels" / file
    done = subprocess.run([sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider",
                           str(cases)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
