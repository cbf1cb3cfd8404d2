"""Every file of examples/ runs as it is, against the cluster that examples/two_hosts.sh starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.tests.helpers.harness import get_json, post_json
from baton.tests.helpers.ports import free_ports

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SERVER_FLAGS = ["--device", "cpu", "--log-level", "warning"]
EXPECTED = {
    "chat.py": ["Paris", "prompt tokens, 0 of them cached"],
    "streaming.py": ["b-a-n-a-n-a", "plus 5? 12", "Rome", "first token after"],
    "tools.py": ["get_weather({", "Paris"],
    "structured_output.py": ["capital: "],
    "batch.py": ["completed: 5 of 5 lines", "What is 1 plus 3? 4"],
    "rl_round.py": ["sent: 2 of 2 workers", "32 answers of step 1", "trainer and server differ by 0.00"],
}


class Hosts(dict[str, str]):
    """The environment of two_hosts.sh, with this machine as both hosts."""

    def __init__(self) -> None:
        router, prefill, bootstrap, decode = map(str, free_ports(4))
        super().__init__(os.environ, MODEL="tinychat", PREFILL_HOST="127.0.0.1", DECODE_HOST="127.0.0.1",
                         ROUTER_PORT=router, PREFILL_PORT=prefill, BOOTSTRAP_PORT=bootstrap, DECODE_PORT=decode,
                         PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        self.url = f"http://127.0.0.1:{router}"
        self.decode_url = f"http://127.0.0.1:{decode}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    hosts = Hosts()
    flags = {"prefill": SERVER_FLAGS, "decode": [*SERVER_FLAGS, "--file-storage-path", str(folder / "files")],
             "router": ["--log-level", "warning"]}
    logs = {role: folder / f"{role}.log" for role in flags}
    processes = [subprocess.Popen(["bash", str(EXAMPLES / "two_hosts.sh"), role, *flags[role]], env=hosts,
                                  stdout=logs[role].open("wb"), stderr=subprocess.STDOUT) for role in flags]
    try:
        wait_ready(hosts.url, processes, lambda: "\n".join(log.read_text()[-1500:] for log in logs.values()))
        yield hosts
        for process in reversed(processes):
            process.terminate()
        assert [process.wait(30) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_ready(url: str, processes: list[subprocess.Popen], logs) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            with urllib.request.urlopen(f"{url}/readiness", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the cluster is not ready: {logs()}")


def run(name: str, *argv: str, **environment: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *argv], env=os.environ | environment,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_client(hosts, name):
    shown = run(name, BATON_URL=hosts.url)
    assert [text for text in EXPECTED[name] if text not in shown] == [], shown
    if name == "rl_round.py":
        assert float(shown.partition("by up to ")[2].split()[0]) > 0.1 and shown.count("differ by 0.00") == 2, shown


def test_autoscaler(hosts):
    """It adds a worker where there are too few, drains one that idles, and leaves a cluster that fits alone."""
    def decode_urls() -> list[str]:
        workers = get_json(f"{hosts.url}/list_workers")["workers"]
        return [worker["url"] for worker in workers if worker["role"] == "decode"]

    flags = ["--router", hosts.url, "--standby", hosts.decode_url, "--once"]
    assert run("autoscaler.py", *flags) == ""
    assert run("autoscaler.py", *flags, "--min-workers", "0") == f"drained {hosts.decode_url}\n"
    deadline = time.monotonic() + 10
    while decode_urls():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert run("autoscaler.py", *flags) == f"added {hosts.decode_url}\n"
    assert decode_urls() == [hosts.decode_url]
    status, _ = post_json(f"{hosts.url}/generate", {"text": "The", "sampling_params": {"max_new_tokens": 2}})
    assert status == 200


def test_two_hosts_refuses_an_unknown_role():
    done = subprocess.run(["bash", str(EXAMPLES / "two_hosts.sh"), "both"], env=Hosts(), capture_output=True, text=True)
    assert done.returncode == 2 and "not both" in done.stderr


def test_offline_engine():
    assert run("offline_engine.py").splitlines()[-1] == "Paris"


def test_every_example_is_run_and_listed():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == {*EXPECTED, "autoscaler.py", "two_hosts.sh", "offline_engine.py"}
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in files if f"| `{name}` |" not in listed] == []
