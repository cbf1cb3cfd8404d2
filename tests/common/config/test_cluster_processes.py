"""The parts of a cluster end with whoever watches them, however that one ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton.common.cluster import ClusterProcess, run_parts
from baton.tests.helpers.ports import free_ports

_ROUTER = """
import http.server, json, sys

class Unready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"status": "not ready", "misfits": [{"why": "give both servers one page size"}]}).encode()
        self.send_response(503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Unready).serve_forever()
"""
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


def test_servers_that_do_not_fit_end_the_cluster(tmp_path: Path, capfd) -> None:
    """Their router would never be ready."""
    (port,) = free_ports(1)
    router = ClusterProcess("router", [sys.executable, "-c", _ROUTER, str(port)], f"http://127.0.0.1:{port}",
                            tmp_path / "log", "/readiness")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert run_parts([router], pytest.fail) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert capfd.readouterr().err == "give both servers one page size\n"
    assert router.dead
