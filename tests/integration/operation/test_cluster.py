"""launch_cluster: one command, an answer, and a clean end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import psutil

from baton.tests.helpers.harness import post_json
from baton.tests.helpers.ports import free_ports


def cluster(tmp_path, *flags):
    """Its logs lie in a temporary folder below ``tmp_path``."""
    port = free_ports(4)[0]  # router, two servers, bootstrap
    argv = [sys.executable, "-m", "baton.launch", "cluster", "--device", "cpu", "--port", str(port), *flags]
    return port, psutil.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=os.environ | {"TMPDIR": str(tmp_path)})


def read_until(process, text, seconds=120):
    lines, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        lines.append(line)
        if text in line:
            return "".join(lines)
        assert line, "".join(lines)
    raise AssertionError("".join(lines))


def test_ask_prints_the_answer_and_stops(tmp_path):
    _, process = cluster(tmp_path, "--ask", "What is the capital of Italy?")
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0 and "Answer:   Rome" in output, output
    assert "curl http://" in output
    folder = re.search(r"The logs of all parts are in (\S+),", output)[1]
    assert folder.startswith(str(tmp_path)) and not os.path.exists(folder)


def test_ctrl_c_stops_all_parts(tmp_path):
    port, process = cluster(tmp_path)
    read_until(process, "Ctrl-C stops")
    children = process.children(recursive=True)
    assert len(children) >= 3
    status, answer = post_json(f"http://127.0.0.1:{port}/v1/chat/completions", {
        "model": "tinychat", "messages": [{"role": "user", "content": "What is the capital of Italy?"}]})
    assert status == 200 and answer["choices"][0]["message"]["content"] == "Rome"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


def test_the_cluster_ends_when_a_part_dies(tmp_path):
    _, process = cluster(tmp_path)
    read_until(process, "Ctrl-C stops")
    children = process.children(recursive=True)
    decode = next(child for child in process.children() if "baton.decode.launch" in child.cmdline())
    decode.kill()
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 1 and "decode-0 ended with exit code" in output
    [folder] = tmp_path.glob("baton-logs-*")
    assert {file.name for file in folder.iterdir()} == {"prefill-0.log", "decode-0.log", "router.log"}
    psutil.wait_procs(children, timeout=5)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
