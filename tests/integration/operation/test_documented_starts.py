"""SGLang's documents' server commands, started: each answers with the shipped model in place of theirs, or ends at once
with the sentence that names the GPU or the package that it lacks; each stops with status 0.

    python -m pytest -m slow tests/integration/operation/test_documented_starts.py
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import time
from pathlib import Path

import pytest

from baton.tests.helpers.harness import Server, get_json, post_json
from baton.tests.helpers.ports import free_ports
from baton.tests.integration.operation.test_sglang_commands import GPU_FLAGS, QUESTION, SERVERS, with_our_model

pytestmark = pytest.mark.slow

LACKING = {
    "--disaggregation-ib-device": None if importlib.util.find_spec("mooncake") else
    "needs the package mooncake-transfer-engine",
    "--disaggregation-transfer-backend nixl": None if importlib.util.find_spec("nixl") else "needs the package nixl",
    "--quantization modelopt": "is for checkpoints of modelopt",
}
"""Sentences with which a command ends on this machine, by a part of it."""


def expected_sentence(line: str) -> str | None:
    if GPU_FLAGS.search(line):
        return "needs a GPU"
    return next((sentence for part, sentence in LACKING.items() if part in line), None)


def servers_of(line: str, folder: Path) -> list[Server]:
    """The command's server, the first, and those of the other hosts that it names."""
    argv = with_our_model(line, folder)
    port, bootstrap = free_ports(2)
    for flag in ("--port", "--host"):
        argv = _without(argv, flag)
    if "--device" not in argv:
        argv += ["--device", "cpu"]
    if "prefill" in argv:
        argv += ["--disaggregation-bootstrap-port", str(bootstrap)]
    servers = []
    for rank in range(2 if "--nnodes" in argv else 1):
        own = [*_without(argv, "--node-rank"), "--node-rank", str(rank)] if "--nnodes" in argv else argv
        servers.append(Server("baton.launch_server", own, port, folder / f"log-{rank}"))
    return servers


def _without(argv: list[str], flag: str) -> list[str]:
    """``argv`` without a flag and its value, in either form."""
    argv = [word for word in argv if not word.startswith(f"{flag}=")]
    if flag not in argv:
        return argv
    at = argv.index(flag)
    return argv[:at] + argv[at + 2:]


@pytest.mark.parametrize("line", SERVERS)
def test_it_starts_answers_and_stops(line, tmp_path):
    servers = servers_of(line, tmp_path)
    first = servers[0]
    if (sentence := expected_sentence(line)) is not None:
        done = subprocess.run(first.argv, capture_output=True, text=True, timeout=120)
        assert done.returncode in (1, 2) and sentence in done.stderr.splitlines()[-1], done.stderr
        return
    try:
        for server in servers:
            server.start()
        _wait(servers)
        assert_serves(first, line)
        assert servers[-1].stop() == 0, f"{servers!r}"
        assert first.process.wait(30) == 0, f"{servers!r}"  # a stopped host takes the others with it
    finally:
        for server in servers:
            if server.process is not None:
                server.kill()


def _wait(servers: list[Server]) -> None:
    first, *others = servers
    deadline = time.monotonic() + 180
    while True:
        assert all(server.process is not None and server.process.poll() is None for server in servers), f"{servers!r}"
        try:
            get_json(first.url + "/health")
            return
        except OSError:
            assert time.monotonic() < deadline, f"{servers!r}"
            time.sleep(0.2)


def assert_serves(server: Server, line: str) -> None:
    if "--disaggregation-mode" in line:  # alone it answers no request
        assert get_json(server.url + "/get_server_info")["disaggregation_mode"] in line
    elif "--is-embedding" in line:
        status, answer = post_json(server.url + "/v1/embeddings", {"model": "default", "input": "Rome"})
        assert status == 200 and answer["data"][0]["embedding"], answer
    elif "--skip-tokenizer-init" in line:
        status, answer = post_json(server.url + "/generate", {"input_ids": [5, 6, 7], "sampling_params": {
            "max_new_tokens": 4}})
        assert status == 200 and len(answer["output_ids"]) >= 1, answer
    else:
        status, answer = post_json(server.url + "/v1/chat/completions", QUESTION | {"max_tokens": 16})
        assert status == 200, answer
        if not re.search(r"--chat-template|--reasoning-parser|dummy|--torchao-config|--quantization", line):
            assert answer["choices"][0]["message"]["content"] == "Rome", answer
