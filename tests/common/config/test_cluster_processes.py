"""The parts of a cluster end with whoever watches them, however that one ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_SUPERVISOR = """
import sys
from pathlib import Path
from baton.common.cluster import ClusterProcess, run_parts
argv = [sys.executable, "-c", "import time; time.sleep(600)"]
part = ClusterProcess("part", argv, "http://127.0.0.1:9", Path(sys.argv[1]))
sys.exit(run_parts([part], lambda: True))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_no_part_is_left(tmp_path: Path, number: signal.Signals) -> None:
    """SIGHUP: the terminal was closed."""
    supervisor = psutil.Popen([sys.executable, "-c", _SUPERVISOR, str(tmp_path / "log")], stdout=subprocess.PIPE,
                              text=True)
    assert "part" in supervisor.stdout.readline()
    (part,) = supervisor.children()
    supervisor.send_signal(number)
    supervisor.communicate(timeout=30)
    gone, alive = psutil.wait_procs([part], timeout=10)
    assert not alive
