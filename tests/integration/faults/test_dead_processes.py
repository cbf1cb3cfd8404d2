"""A part of an engine that dies takes all of it down, at once and with a reason: ranks, and hosts of several."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from baton.tests.helpers.harness import Server, post_json
from baton.tests.helpers.ports import free_ports

FLAGS = ["server", "--model-path", "tinychat", "--device", "cpu", "--log-level", "warning"]
SHAPES = {"tp2": ["--tp-size", "2"], "dp2": ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]}
ENDS_WITHIN = 40.0  # 10 s, on a machine four times slower
LONG = {"text": "x", "sampling_params": {"ignore_eos": True, "max_new_tokens": 3000, "temperature": 0}}


def ranks_of(server: Server) -> list[psutil.Process]:
    """The processes of a server's ranks, in order."""
    found = [child for child in psutil.Process(server.process.pid).children()
             if "multiprocessing.spawn" in " ".join(child.cmdline())]
    return sorted(found, key=lambda child: child.pid)


class Held:
    """Requests that run when the engine dies, each on a thread."""

    def __init__(self, url: str, count: int):
        self.answers: list[tuple[int, dict]] = []
        self._threads = [threading.Thread(target=self._ask, args=(url,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self, url: str) -> None:
        self.answers.append(post_json(url + "/generate", LONG, timeout=300))

    def join(self) -> list[tuple[int, dict]]:
        for thread in self._threads:
            thread.join(ENDS_WITHIN)
        return self.answers


def wait_running(server: Server, count: int) -> None:
    deadline = time.monotonic() + 60
    while sum(state["num_running"] for state in json.load(urllib.request.urlopen(
            server.url + "/get_server_info"))["internal_states"]) < count:
        assert time.monotonic() < deadline, repr(server)
        time.sleep(0.05)


def assert_unhealthy(server: Server) -> None:
    """503 with the reason, or nobody there any more; never 200 again."""
    try:
        with urllib.request.urlopen(server.url + "/health", timeout=10):
            raise AssertionError("healthy without a rank")
    except urllib.error.HTTPError as error:
        assert error.code == 503 and json.loads(error.read())["status"] == "dead"
    except OSError:
        pass


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("shape", ["dp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_server(tmp_path, shape):
    server = Server("baton.launch", [*FLAGS, *SHAPES[shape]], free_ports(1)[0], tmp_path / "log").start()
    try:
        server.wait_ready()
        parts = psutil.Process(server.process.pid).children(recursive=True)
        held = Held(server.url, 2)
        wait_running(server, 2)
        ranks_of(server)[-1].send_signal(signal.SIGKILL)
        answers = held.join()
        assert len(answers) == 2
        for status, answer in answers:
            assert status == 503 and "of the engine ended with exit code" in answer["error"]["message"], answer
        assert_unhealthy(server)
        assert server.process.wait(ENDS_WITHIN) == 1
        log = server.log.read_text()
        assert "Traceback" not in log and log.splitlines()[-1].startswith("error: Rank "), log
        assert_all_gone(parts)
    finally:
        server.kill()


@pytest.mark.slow
def test_a_rank_that_stands_still_is_noticed(tmp_path):
    argv = [*FLAGS, *SHAPES["tp2"], "--watchdog-timeout", "6"]
    server = Server("baton.launch", argv, free_ports(1)[0], tmp_path / "log").start()
    try:
        server.wait_ready()
        parts = psutil.Process(server.process.pid).children(recursive=True)
        ranks_of(server)[-1].send_signal(signal.SIGSTOP)
        assert server.process.wait(2 * ENDS_WITHIN) == 1
        assert "ended with exit code 14" in server.log.read_text().splitlines()[-1]
        assert_all_gone(parts)
    finally:
        server.kill()


def caught_signals(pid: int) -> set[int]:
    """The signals for which a process has a handler."""
    with open(f"/proc/{pid}/status") as file:
        mask = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


class Hosts:
    """A server of two ranks on two hosts, both of them this one."""

    def __init__(self, folder, *flags: str):
        meeting, _, port, other = free_ports(4)  # the port above the meeting is used too
        argv = [*FLAGS, "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{meeting}", *flags]
        self.first = Server("baton.launch", [*argv, "--node-rank", "0"], port, folder / "first.log")
        self.second = Server("baton.launch", [*argv, "--node-rank", "1"], other, folder / "second.log")

    def __enter__(self) -> Hosts:
        for server in (self.second, self.first):
            server.start()
        self.first.wait_ready()
        self.parts = [part for server in (self.first, self.second)
                      for part in psutil.Process(server.process.pid).children(recursive=True)]
        return self

    def __exit__(self, *exc: object) -> None:
        for server in (self.first, self.second):
            server.kill()


def assert_answers(server: Server) -> None:
    question = {"model": "tinychat", "temperature": 0,
                "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    for _ in range(2):  # one for each attention group
        status, answer = post_json(server.url + "/v1/chat/completions", question)
        assert status == 200 and "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_two_hosts_answer_and_stop_together(tmp_path):
    with Hosts(tmp_path) as hosts:
        assert len(ranks_of(hosts.first)) == len(ranks_of(hosts.second)) == 1
        assert_answers(hosts.first)
        assert hosts.first.stop(ENDS_WITHIN) == 0, repr(hosts.first)
        assert hosts.second.process.wait(ENDS_WITHIN) == 0, repr(hosts.second)
        assert_all_gone(hosts.parts)


@pytest.mark.slow
def test_a_host_that_is_stopped_lets_requests_end(tmp_path):
    """The first answers what runs, takes nothing more, and ends with status 0, too."""
    with Hosts(tmp_path) as hosts, ThreadPoolExecutor(1) as pool:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        answer = pool.submit(post_json, hosts.first.url + "/generate", body)
        wait_running(hosts.first, 1)
        assert hosts.second.stop(ENDS_WITHIN) == 0, repr(hosts.second)
        status, found = answer.result()
        assert status == 200 and found["meta_info"]["completion_tokens"] == 200
        assert hosts.first.process.wait(ENDS_WITHIN) == 0, repr(hosts.first)
        assert_all_gone(hosts.parts)


@pytest.mark.slow
def test_a_host_that_is_asked_twice_ends_at_once(tmp_path):
    with Hosts(tmp_path) as hosts:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post_json, hosts.first.url + "/generate", body)
            wait_running(hosts.first, 1)
            for _ in range(2):
                hosts.second.process.send_signal(signal.SIGTERM)
                time.sleep(0.5)
            assert hosts.second.process.wait(ENDS_WITHIN) == 0, repr(hosts.second)
            assert answer.result()[0] == 503
        assert hosts.first.process.wait(ENDS_WITHIN) in (0, 1)


def test_a_host_may_be_stopped_before_the_first_is_there(tmp_path):
    hosts = Hosts(tmp_path)
    try:
        hosts.second.start()
        deadline = time.monotonic() + 60
        while signal.SIGTERM not in caught_signals(hosts.second.process.pid):
            assert time.monotonic() < deadline and hosts.second.process.poll() is None, repr(hosts.second)
            time.sleep(0.05)
        assert hosts.second.stop() == 0, repr(hosts.second)
    finally:
        hosts.second.kill()


@pytest.mark.parametrize("killed", ["second", pytest.param("first", marks=pytest.mark.slow)])
def test_a_host_that_dies_ends_the_other(tmp_path, killed):
    with Hosts(tmp_path, "--dp-size", "2", "--enable-dp-attention") as hosts:
        assert_answers(hosts.first)
        held = Held(hosts.first.url, 2) if killed == "second" else None
        if held is not None:
            wait_running(hosts.first, 2)
        dead, left = (hosts.first, hosts.second) if killed == "first" else (hosts.second, hosts.first)
        os.kill(dead.process.pid, signal.SIGKILL)
        for status, answer in held.join() if held is not None else ():
            assert status == 503 and "of the engine" in answer["error"]["message"], answer
        assert left.process.wait(ENDS_WITHIN) == 1, repr(left)
        log = left.log.read_text()
        assert "Traceback" not in log, log  # of the rank's collective: what matters is the last line
        last = log.splitlines()[-1]
        assert last.startswith("error: ") and "of the engine" in last, last
        assert_all_gone(hosts.parts)


def test_hosts_with_different_flags_do_not_meet(tmp_path):
    hosts = Hosts(tmp_path)
    hosts.second.argv += ["--dp-size", "2", "--enable-dp-attention"]
    try:
        for server in (hosts.first, hosts.second):
            server.start()
        assert hosts.second.process.wait(120) == 1
        assert "dp_size is 1 on node 0 and 2 on node 1" in hosts.second.log.read_text().splitlines()[-1]
    finally:
        for server in (hosts.first, hosts.second):
            server.kill()
