"""Real server processes for tests: start, wait until ready, look inside, stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.tests.helpers.ports import free_ports

START_SECONDS = 120.0


def get_json(url: str, timeout: float = 10.0, headers: Mapping[str, str] | None = None) -> dict:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout) as answer:
        return json.load(answer)


def post_json(url: str, body: dict | None = None, timeout: float = 60.0,
              headers: Mapping[str, str] | None = None) -> tuple[int, dict]:
    """Status and JSON body, whatever the status."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


class Server:
    """One process of ours with an HTTP port."""

    def __init__(self, module: str, argv: Sequence[str], port: int, log: Path, **environment: str):
        self.probe = "/readiness" if "router" in module else "/health"
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.argv = [sys.executable, "-m", module, *argv, "--port", str(port)]
        self.environment = os.environ | environment
        self.process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"{' '.join(self.argv[2:])}\n--- {self.log}:\n{self.log.read_text()[-3000:]}"

    def start(self) -> Server:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.argv, stdout=output, stderr=output, env=self.environment)
        return self

    def wait_ready(self, seconds: float = START_SECONDS) -> Server:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process is not None and self.process.poll() is None, f"the server died: {self!r}"
            try:
                with urllib.request.urlopen(self.url + self.probe, timeout=5):
                    return self
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"not ready after {seconds} s: {self!r}")

    def state(self) -> dict:
        """The engine's own snapshot of itself (``State`` of the engine's messages)."""
        return get_json(self.url + "/get_server_info")["internal_states"][0]

    def pages(self) -> dict[str, int]:
        state = self.state()
        return {name: state[f"{name}_pages"] for name in ("total", "free", "held", "cached")}

    def assert_clean(self, seconds: float = 5.0) -> None:
        """All pages are free or cached, within a while."""
        deadline = time.monotonic() + seconds
        while (pages := self.pages())["held"]:
            assert time.monotonic() < deadline, f"{pages} after {seconds} s: {self!r}"
            time.sleep(0.02)
        assert pages["free"] + pages["cached"] == pages["total"], pages

    def stop(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not stop within {seconds} s: {self!r}") from None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Cluster:
    """Router, prefill and decode servers of one model."""

    def __init__(self, folder: Path, *, prefill: int = 1, decode: int = 1, flags: Sequence[str] = (),
                 prefill_flags: Sequence[str] = (), decode_flags: Sequence[str] = (),
                 router_flags: Sequence[str] = ("--policy", "round_robin"),
                 environment: Mapping[str, str] | None = None, start_seconds: float = START_SECONDS):
        ports = free_ports(2 * prefill + decode + 1)
        self._start_seconds = start_seconds
        common = ["--model-path", "tinychat", "--device", "cpu", "--log-level", "warning", *flags]
        self.prefill, self.decode, routed = [], [], []
        for i in range(prefill):
            port, bootstrap = ports.pop(), ports.pop()
            argv = [*common, *prefill_flags, "--disaggregation-bootstrap-port", str(bootstrap)]
            self.prefill.append(Server("baton.prefill.launch", argv, port, folder / f"prefill-{i}.log",
                                       **(environment or {})))
            routed += ["--prefill", self.prefill[-1].url, str(bootstrap)]
        for i in range(decode):
            argv = [*common, *decode_flags]
            self.decode.append(Server("baton.decode.launch", argv, ports.pop(), folder / f"decode-{i}.log",
                                      **(environment or {})))
            routed += ["--decode", self.decode[-1].url]
        argv = ["--pd-disaggregation", "--log-level", "warning", *routed, *router_flags]
        self.router = Server("baton.router.launch", argv, ports.pop(), folder / "router.log", **(environment or {}))

    @property
    def workers(self) -> list[Server]:
        return [*self.prefill, *self.decode]

    @property
    def url(self) -> str:
        return self.router.url

    def __enter__(self) -> Cluster:
        for server in (*self.workers, self.router):
            server.start()
        try:
            for server in (*self.workers, self.router):
                server.wait_ready(self._start_seconds)
            self._wait_routed()
        except BaseException:
            self._kill()
            raise
        return self

    def _wait_routed(self, seconds: float = 30.0) -> None:
        """Wait until the router has found every worker healthy: it is ready as soon as one pair is."""
        argv = self.router.argv
        key = argv[argv.index("--admin-api-key") + 1] if "--admin-api-key" in argv else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        deadline = time.monotonic() + seconds
        while not all(worker["healthy"] for worker in get_json(self.url + "/list_workers", headers=headers)["workers"]):
            assert time.monotonic() < deadline, f"a worker is not routed to after {seconds} s: {self.router!r}"
            time.sleep(0.05)

    def __exit__(self, *exc: object) -> None:
        try:
            for server in (self.router, *self.workers):
                assert server.stop() == 0, repr(server)
        finally:
            self._kill()

    def _kill(self) -> None:
        for server in (self.router, *self.workers):
            if server.process is not None and server.process.poll() is None:
                server.kill()
