"""Runs files of kernels' cases against their twins, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baton.tests.helpers.rank_processes import SECONDS

_KERNELS = Path(__file__).parents[1] / "kernels"
# The machine's own plugins and their warnings are no part of a test, nor are plugins that it lacks.
_PYTEST = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:benchmark",
           "-o", "addopts=", "-o", "filterwarnings=default"]


def check_cases(*files: str, timeout: float = SECONDS) -> None:
    """Asserts that all cases of some files in tests/kernels pass, and none is skipped."""
    done = subprocess.run([*_PYTEST, *(str(_KERNELS / file) for file in files)], capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
